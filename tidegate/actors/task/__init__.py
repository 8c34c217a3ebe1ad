"""One subtask as a state machine: input and output channels, alignment of barriers, operators, snapshots.

`task_machine.py` maps each event (`events.py`) to instructions (`instructions.py`), without I/O, clock or threads.
`TaskDriver` runs the machine.
"""
