"""State files: what a snapshot is made of, written as a stream, read by ranges, verified."""
