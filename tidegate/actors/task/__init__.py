"""One subtask as a machine: channels, alignment of barriers, operators, snapshots.

`task_machine.py` decides, without I/O, clock or threads. Events (`events.py`) come in, instructions (`instructions.py`)
go out. `TaskDriver` drives it.
"""
