"""State files: the stored form of a snapshot. They are written as a stream, read by ranges, and verified."""
