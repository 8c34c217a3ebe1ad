"""Kernels: operations that Arrow and NumPy lack, as small numba functions over plain arrays.

They hash keys, partition rows (stable), map keys to slots, and accumulate by group. Operators, state backends and
partitioners call them. Each releases the GIL and is cached on disk. `tests/support/kernel_reference.py` computes the
same results in plain Python. Kernels do not depend on operators, channels or checkpoints.
"""
