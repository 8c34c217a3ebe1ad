"""Files as a source: those that a pattern names, once or as they come."""
