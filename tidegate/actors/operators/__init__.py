"""Operators: what transforms batches inside a task, and what spreads them over the subtasks downstream.

`operator.py` is the contract. `batches/` has those over whole batches: functions and polars expressions, and keyed
aggregates, whose state lies in tables of a backend (`state_backends/`) that `kernels/` change in place. `rows/` runs
functions of the user row by row, with typed state and timers of their own (`state/`). None of them does I/O.
"""
