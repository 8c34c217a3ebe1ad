"""State of functions: keyed and operator state, types of values, time to live, and timers."""
