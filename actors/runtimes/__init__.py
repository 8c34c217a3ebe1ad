"""The runtimes: hosts that drive the machines, the I/O that they ask for, on Ray and in one process.

`ray_runtime.py` and `local.py` are what the driver starts. `ports.py` has all in which they differ.
"""
