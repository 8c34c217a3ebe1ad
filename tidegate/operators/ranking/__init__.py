"""Operators that keep some rows of each key: deduplication and the first N."""
