"""Starts the processes of jobs by forking one that has its imports: one such server on each node, for all jobs."""
