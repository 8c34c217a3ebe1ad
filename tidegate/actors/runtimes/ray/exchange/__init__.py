"""Frames between tasks on one node: rows through memory that both processes map, their order by Ray's calls."""
