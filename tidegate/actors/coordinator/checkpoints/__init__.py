"""The life of a checkpoint in the coordinator: trigger, acknowledgements, completion, sink commit, and deletion.

`CheckpointCoordinator` runs a checkpoint up to the last acknowledgement. `CheckpointFinalizer` then writes `_metadata`
and commits the sink files. `CheckpointAborter` aborts checkpoints, and `CheckpointCleaner` deletes them.
"""
