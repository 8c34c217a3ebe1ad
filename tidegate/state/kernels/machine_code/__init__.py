"""Machine code of kernels: compiled once, kept on disk, and loaded without a compiler.

`jit.py` above it asks. numba is imported by `compiling.py` and `intrinsics.py` alone, when something is compiled: it
costs a process half a second and 60 MB.
"""
