"""Operators that emit or store some rows of each key: deduplication, distinct counts, newest rows, and top-n."""
