"""The columnar backend: keyed state in memory, in columns of pages that snapshots share with the task.

`columnar_backend.py` is where it is opened. `key_space.py` gives each key a slot; `vector_table.py`, `cells.py`,
`row_table.py` and `timer_state/` keep states by slot; `changes/` notes what differs from the last snapshot.
"""
