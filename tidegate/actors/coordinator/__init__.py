"""The coordinator of one job: it takes checkpoints, restarts failed attempts, and ends the job.

`coordinator_machine.py` decides, without I/O, clock or threads. `messages/events.py` is what it is told,
`messages/instructions.py` what it asks its runtime to do, `state/coordinator_state.py` what it remembers. Which
checkpoint comes next is in `requests/`, what becomes of it in `checkpoints/`. `hosts/coordinator/coordinator_host.py`
drives it.
"""
