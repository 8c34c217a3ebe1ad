"""Machine code of kernels: compiled once, stored on disk, and loaded without a compiler.

`kernels/jit.py` uses it. Only `compiling.py` and `intrinsics.py` import numba, and only if something must be compiled,
because numba costs a process half a second and 60 MB.
"""
