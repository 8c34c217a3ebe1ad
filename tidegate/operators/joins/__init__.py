"""Joins of two inputs: operators that combine rows with equal keys and related times."""
