"""The coordinator of one job: it deploys tasks, takes checkpoints, restarts what failed, and ends the job.

`coordinator_machine.py` decides, without I/O, clock or threads. It is told the events of `messages/events.py`, and
answers with the instructions of `messages/instructions.py`. `state/coordinator_state.py` is what it remembers,
`invariants.py` which rules it keeps. `requests/` says which checkpoint comes next, `checkpoints/` what becomes of it.
`hosts/coordinator/coordinator_host.py` drives the machine.
"""
