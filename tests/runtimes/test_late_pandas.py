"""A process of a task imports pandas when somebody uses it, and Arrow then knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import pyarrow as pa
from tidegate.actors.runtimes.ray.process.late_pandas import import_pandas_late
from tidegate.actors.runtimes.ray.task.warm_up import warm_up

import_pandas_late()
warm_up()
assert "pandas" not in sys.modules
assert pa.array([1, None]).to_pylist() == [1, None]
import pandas as pd
after = list(sys.meta_path)
assert not [finder for finder in after if "late_pandas" in type(finder).__module__]
assert "late_pandas" not in type(pd.__spec__.loader).__module__ + type(pd.__loader__).__module__
assert pa.array(pd.Series([1.0, None])).null_count == 1, "Arrow does not know that this is of pandas"
assert pa.table({"x": [1]}).to_pandas().x.tolist() == [1]
assert type(pa.array([1], pa.timestamp("ns"))[0].as_py()) is pd.Timestamp
import_pandas_late()
assert sys.meta_path == after, "pandas is there, so nothing is to be done"
"""


@pytest.mark.slow
def test_pandas_comes_when_it_is_used() -> None:
    """Not before; and from then on everything is as it would have been."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
