"""The interface of the runtimes (`running_job.py`), and code that they share: metrics, snapshots and timers.

`tidegate/actors/ray` and `tidegate/actors/local` are the runtimes, and `tidegate/testing/runtime` is a simulated one.
`tidegate/actors/drivers/ports.py` defines their differences.
"""
