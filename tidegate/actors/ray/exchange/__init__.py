"""Frames between tasks on one node: rows through memory that both processes map, all else over a socket."""
