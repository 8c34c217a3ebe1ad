"""Operators, the code that transforms batches inside a task.

`operator.py` is the contract. `functions/` calls functions of users and computes polars expressions, `aggregates/`,
`windows/`, `ranking/` and `joins/` keep state in columns, `watermarks/` generates event time, and `sinks/` decides
which rows become one file. `state/` has the keyed state, the operator state and the timers of functions. Keyed state is
stored in a backend (`tidegate/state/`). Operators do no other I/O.
"""
