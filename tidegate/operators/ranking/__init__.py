"""Operators that keep some rows of each key: deduplication, distinct values, newest rows, and top-n."""
