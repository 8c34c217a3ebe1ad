"""Timers in memory: a table of moments, and the order in which they fire."""
