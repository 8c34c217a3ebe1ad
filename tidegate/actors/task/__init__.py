"""One subtask as a machine: channels, alignment of barriers, operators, snapshots.

`task_machine.py` decides, without I/O, clock or threads. `messages/events.py` is what it is told,
`messages/instructions.py` what it asks its runtime to do. `hosts/task/task_host.py` drives it.
"""
