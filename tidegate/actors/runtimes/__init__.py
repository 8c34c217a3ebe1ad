"""The runtimes: a job on Ray, or in one process. `ray_runtime.py` and `local_runtime.py` are what the driver starts.

`tidegate/actors/drivers/ports.py` names all in which they differ; the third one is `tidegate/testing/runtime`.
"""
