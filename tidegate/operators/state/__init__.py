"""What functions remember: keyed and operator state, its types, expiry, timers."""
