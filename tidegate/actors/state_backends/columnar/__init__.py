"""The columnar backend: keyed state in memory, in columns of pages that snapshots share with the task."""
