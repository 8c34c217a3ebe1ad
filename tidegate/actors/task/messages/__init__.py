"""The border of the task machine: the events that it is told, and the instructions that it gives."""
