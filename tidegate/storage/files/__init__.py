"""Places where bytes rest: local folders, S3 and memory behind one interface."""
