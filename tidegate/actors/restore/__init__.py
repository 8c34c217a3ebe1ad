"""Restores the state of each task of a job from a checkpoint, at any parallelism.

At submission `restore_checks.py` refuses a program that does not fit the checkpoint. When tasks are deployed,
`restore_task.py` gives each task its part of the stored state and in-flight rows.
"""
