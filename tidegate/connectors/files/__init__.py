"""Sources over files: the files that match a pattern, read once or as they appear."""
