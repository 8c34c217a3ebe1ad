"""The actor of a task, and what only such processes have: frames, counts of rows, warm standbys."""
