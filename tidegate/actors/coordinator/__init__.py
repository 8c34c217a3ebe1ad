"""The coordinator of one job: it deploys tasks, takes checkpoints, restarts what failed, and ends the job.

`coordinator_machine.py` decides, without I/O, clock or threads. `events.py` go in, `instructions.py` come out.
`coordinator_state.py` is its memory, and `invariants.py` has its rules. `CoordinatorDriver` drives the machine.
"""
