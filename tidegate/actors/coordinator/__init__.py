"""The coordinator of one job: a state machine that deploys tasks, takes checkpoints, restarts failed tasks, and ends
the job.

`coordinator_machine.py` maps each event (`events.py`) to instructions (`instructions.py`), without I/O, clock or
threads. `coordinator_state.py` is its state, and `invariants.py` checks its rules. `CoordinatorDriver` runs the
machine.
"""
