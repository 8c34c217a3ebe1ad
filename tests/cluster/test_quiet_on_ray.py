"""A job that runs well on Ray and Spark prints nothing in its driver, and what its functions print is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from waiting import until

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

MARK = "the job is over, and this was printed behind it"


def test_a_job_that_runs_well_prints_nothing(
    raydp_session: RayDPSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray brings all that processes print: before a mark there is what a function has printed, and nothing else."""
    rows = pa.table({"x": range(10)})

    def plus(row: Mapping[str, Any]) -> Mapping[str, Any]:
        if row["x"] == 7:
            # One write with its newline: Ray reads the file of a worker at any time, also between two writes.
            print(f"a function sees seven, pid {os.getpid()}\n", end="")
        return {"x": row["x"] + 1}

    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    with tg.StreamEnvironment(runtime, 1) as env:
        env.from_batches(rows).map(plus, schema=rows.schema).to_table(str(tmp_path / "out"))
        checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(tmp_path / "checkpoints"))
        assert env.execute("quiet", checkpoints=checkpoints, progress="off").wait("4min") == "finished"
    assert raydp_session.spark.range(10).count() == 10

    written: list[str] = []

    def told(mark: str) -> bool:
        written.append("".join(capfd.readouterr()))
        return mark in "".join(written)

    until("what the function has printed", lambda: told("a function sees seven"), lambda: written)
    print_there: Any = ray.remote(print)
    ray.get(print_there.remote(MARK))
    until("the mark", lambda: told(MARK), lambda: written)
    said = "".join(written)
    worker = re.findall(r"a function sees seven, pid (\d+)", said)[0]
    lines = [line for line in said.splitlines() if "a function sees seven" not in line and MARK not in line]
    # Ray reports late that an earlier test has killed a process.
    of_others = [line for line in lines if "A worker died" in line and f"Worker PID: {worker} " not in line]
    assert [line for line in lines if line not in of_others] == []
