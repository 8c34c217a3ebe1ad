"""State of functions: keyed state, operator state, types of values, time to live, and timers."""
