"""The coordinator of one job: what it is told, what it decides, what it remembers."""
