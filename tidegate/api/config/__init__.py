"""Settings of a job's checkpoints: in Python, under Flink's keys, and from a file."""
