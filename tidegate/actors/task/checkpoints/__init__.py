"""The checkpoints of one subtask: from the first barrier to the acknowledgement.

`subtask_checkpoints.py` leads; the task machine calls it. `barriers/` beside it decides when a snapshot is due.
"""
