"""Operators: what transforms batches inside a task, and what spreads them over the subtasks downstream.

`operator.py` is the contract. `batches/` has operators over whole batches: functions, polars expressions, keyed
aggregates, table sinks. `rows/` calls functions of the user row by row, with the state and the timers of `state/`.
Keyed state lies in a backend (`state_backends/`). No operator does I/O.
"""
