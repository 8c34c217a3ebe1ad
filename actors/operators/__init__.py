"""Operators: what transforms batches inside a task, and what spreads them over the subtasks downstream.

`base.py` is the contract. Stateless operators wrap functions and polars expressions; stateful ones keep their
state in columns (`tidegate.storage.columnar`) and find it through `tidegate.actors.kernels`. None of them
does I/O.
"""
