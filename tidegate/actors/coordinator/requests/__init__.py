"""Decides which checkpoint comes next, of which kind, and which tasks take part (Flink's `CheckpointRequestDecider`).

Pure functions: `checkpoints/checkpoint_keeper.py` asks them after each event, and does what they say.
"""
