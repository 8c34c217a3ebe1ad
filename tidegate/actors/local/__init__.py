"""The local runtime: whole jobs in one process, on the real clock, without Ray."""
