"""All settings: in Python, under Flink's keys from a file, and by variables of the environment."""
