"""What becomes of one: triggered, completed, committed, given up, deleted."""
