"""One subtask as a machine: channels, alignment of barriers, operators, snapshots.

`machine.py` decides, without I/O, clock or threads. `events.py` is what it is told, `instructions.py` what it asks its
runtime to do. `runtimes/task_host.py` drives it.
"""
