"""Keyed state in memory: columns in pages that snapshots share with the task."""
