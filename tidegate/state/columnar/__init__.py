"""The columnar backend: keyed state in memory, in columns of pages that snapshots share with the task.

Start with `columnar_backend.py`. `key_space.py` gives each key a slot. `vector_table.py`, `object_state.py`,
`row_table.py` and `columnar_timers.py` store state by slot, on the base of `paged_state.py`. `change_tracking.py` and
`undo_log.py` record what changes between snapshots.
"""
