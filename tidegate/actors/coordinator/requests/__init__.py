"""Which checkpoint comes next, of which kind, and with which tasks: pure functions."""
