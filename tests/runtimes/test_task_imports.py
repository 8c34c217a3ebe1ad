"""A process of a task loads what tasks need: each of them pays for it before its first row."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tidegate.state.key_index.int_index import IntIndex

OF_OTHERS = (
    "tidegate.actors.coordinator.instructions",
    "tidegate.actors.coordinator.coordinator_state",
    "tidegate.actors.runtimes.running_job",
    "tidegate.storage.tables.table_log",
    "tidegate.api",
    "pyarrow.parquet",
    "pyarrow.dataset",
    "polars",
    "pandas",
)
"""Of coordinators, of drivers, of tables, of functions of users."""
COMPILER = "numba"

PROGRAM = f"""
import sys
import tidegate.actors.ray.worker_actor
from tidegate.state.key_index.int_index import IntIndex
import numpy as np
loaded = [name for name in {OF_OTHERS!r} if name in sys.modules]
assert not loaded, f"a task loads {{loaded}}"
slots = IntIndex().upsert(np.array([7, 8, 7]), np.empty(0, dtype=np.uint8)).slots
assert slots.tolist() == [0, 1, 0], slots
assert {COMPILER!r} not in sys.modules, "machine code was there, and a task has loaded its compiler"
"""


@pytest.mark.slow
def test_a_task_loads_no_more_than_it_needs() -> None:
    """Neither what others are made of, nor the compiler for a kernel whose machine code is kept on disk."""
    IntIndex().upsert(np.array([1]), np.empty(0, dtype=np.uint8))  # It is kept now.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
