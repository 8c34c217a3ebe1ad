"""What a coordinator remembers: the fold over its event log."""
