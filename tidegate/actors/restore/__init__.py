"""Restores: finds what each task of a job starts with in a checkpoint or savepoint, at any parallelism.

`restore_checks.py` refuses at submission what does not fit; `restore_task.py` and `restore_in_flight.py` deal state and
in-flight rows out, when tasks are deployed.
"""
