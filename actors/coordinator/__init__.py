"""The coordinator of one job: it takes checkpoints, restarts failed attempts, and ends the job.

`machine.py` decides, without I/O, clock or threads. `events.py` is what it is told, `instructions.py` what it asks its
runtime to do, `state.py` what it remembers. `runtimes/coordinator_host.py` drives it.
"""
