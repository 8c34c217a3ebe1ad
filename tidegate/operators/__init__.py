"""Operators: what transforms batches inside a task.

`operator.py` is the contract. `batches/` has functions over whole batches and polars expressions; `aggregates/`,
`windows/`, `ranking/` and `joins/` keep state in columns. `watermarks/` makes event time, `sinks/` the rows of a file.
`rows/` calls functions of the user row by row, with the state and the timers of `state/`.
Keyed state lies in a backend (`state_backends/`). No operator does I/O.
"""
