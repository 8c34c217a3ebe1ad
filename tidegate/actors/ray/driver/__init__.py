"""What a driver has of jobs on Ray: a connection, a job that it submitted or attaches to, and what outlives it."""
