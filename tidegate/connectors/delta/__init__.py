"""Reads Delta Lake tables, and merges rows into them by keys. Appends are tables of tidegate with a mirror."""
