"""Restores: what each task of a job starts with, from a checkpoint or savepoint, at any parallelism.

At submission `restore_checks.py` refuses a program that does not fit the checkpoint. When tasks are deployed,
`restore_task.py` and `restore_in_flight.py` distribute state and in-flight rows over them.
"""
