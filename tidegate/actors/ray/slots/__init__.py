"""Where the processes of a job on Ray go: which slots it needs, how they are reserved, and what is said meanwhile."""
