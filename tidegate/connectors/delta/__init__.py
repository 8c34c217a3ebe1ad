"""Reads Delta Lake tables, and merges rows into them by keys.

Appending to Delta uses tidegate's own tables with a mirror.
"""
