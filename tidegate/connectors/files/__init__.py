"""Files as a source: the files that match a pattern, read once or as they appear."""
