"""The life of one checkpoint: triggered, acknowledged, completed, committed, and finally subsumed, or aborted.

`CheckpointCoordinator` takes it up to the last acknowledgement, `CheckpointFinalizer` from there to `_metadata` and the
commit of its output. `CheckpointAborter` gives checkpoints up, and `CheckpointCleaner` deletes them.
"""
