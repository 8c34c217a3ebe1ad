"""Jobs on Ray: one actor for each slot of a job, and one for its coordinator.

`ray_runtime.py` starts, finds and lists jobs, and `ray_job.py` is a job as its driver sees it. `coordinator_actor.py`
and `worker_actor.py` are the two kinds of actors. `attempt_supervisor.py` deploys attempts on the processes of
`worker_pool.py`, and `heartbeats.py` and `lost_nodes.py` watch these. `peer_connections.py` carries rows between
workers.
"""
