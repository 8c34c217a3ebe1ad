"""A whole job in one process, on the real clock."""
