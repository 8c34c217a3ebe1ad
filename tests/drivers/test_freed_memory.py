"""A process that runs tasks does not give memory back that the next batch takes again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tidegate.actors.drivers.worker import keep_freed_memory

_ROUNDS = """
import resource
import numpy as np
from tidegate.actors.drivers.worker import keep_freed_memory

assert keep_freed_memory()
for began in (False, True):
    if began:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        arrays = [np.ones(1 << 17) for _ in range(4)]
        del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no thresholds to set")
def test_arrays_of_a_batch_find_their_pages_again() -> None:
    """A hundred rounds of four megabytes cost less than a page fault each, where each round had a thousand."""
    told = subprocess.run([sys.executable, "-c", _ROUNDS], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 100


@pytest.mark.parametrize(
    "settings",
    [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"MALLOC_MMAP_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}],
)
def test_settings_of_the_environment_stay(settings: dict[str, str]) -> None:
    """Whoever started the process has the last word."""
    assert not keep_freed_memory(settings)
