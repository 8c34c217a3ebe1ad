"""Kernels: what Arrow and NumPy lack, as small numba functions over plain arrays.

Hash of keys, stable partition, key → slot index, grouped accumulation. Operators, state backends and partitioners call
them. Each releases the GIL and is cached on disk; `tests/support/kernel_reference.py` says in plain Python what each
computes. Nothing here knows operators, channels or checkpoints.
"""
