"""A job on Ray: an actor for each task and one for the coordinator.

`ray_runtime.py` is where it starts. `driver/` is what the driver has of it, `coordinator/` and `task/` are the two
kinds of actors. `fleet/` keeps the processes, `slots/` the places where they run; `process/` is what each of them has.
"""
