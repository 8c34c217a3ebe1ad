"""Operators: what transforms batches inside a task, and what spreads them over the subtasks downstream.

`base.py` is the contract. Stateless operators wrap functions and polars expressions; keyed aggregates keep their state
in tables of a backend (`tidegate.actors.state`) that `tidegate.actors.kernels` change in place; `process.py` runs
functions of the user row by row, with typed state and timers of their own. None of them does I/O.
"""
