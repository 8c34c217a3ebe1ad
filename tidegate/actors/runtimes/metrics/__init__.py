"""What a job shows of itself in numbers: `registry.py` names every metric, `job_values.py` has the values of a job.

Nothing here knows Ray: a runtime publishes them. `page.py` makes `docs/metrics.md` of the registry.
"""
