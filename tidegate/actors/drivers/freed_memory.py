"""Has the allocator of the C library keep what it was given back, in processes that run tasks.

Each batch takes some arrays of a megabyte and gives them back. By itself glibc returns the end of its heap to the
system as soon as a few of them are free, and the next batch waits for the same pages again, which are cleared first: a
hundred to two thousand page faults a batch. Rules:

- Arrays of up to `MAPPED_FROM_BYTES` lie in heaps, of which threads have their own; up to `KEPT_BYTES` at the end of
  each stay free for the next ones.
- Larger ones are mapped by themselves, and the system has them back at once: state, and what a restore takes.
- Who has set thresholds in the environment (`MALLOC_*`, `GLIBC_TUNABLES`) has thought about it: they stay.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

MAPPED_FROM_BYTES = 4 << 20
KEPT_BYTES = 16 << 20

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`."""
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Set the thresholds of this process. False where the C library has none, or somebody else has set them."""
    if any(name in environment for name in _OWN_SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # To set one of them keeps glibc from moving either.
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
