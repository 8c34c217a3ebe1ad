"""What a driver script is made of: the environment, streams, jobs and tables."""
