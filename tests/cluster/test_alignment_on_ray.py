"""Two sources of a watermark group on Ray: one waits for the other, also after a process was killed."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
from ray import cloudpickle
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

ROWS, GATE, DRIFT, BATCH = 5_000, 100, 200, 50
AHEAD = GATE + DRIFT + 4 * BATCH
"""So far may the quick source have read while the other one stands at its gate: the drift, and what is read ahead."""
# Processes of the job cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Steps:
    """Rows 0, 1, 2, …, a millisecond each. With a gate those from `GATE` on are there when this file is."""

    gate: str | None = None
    unbounded: Literal[True] = True

    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])

    def splits(self) -> list[tg.SourceSplit]:
        """One."""
        return [tg.SourceSplit("all", b"", ROWS)]

    def reader(self) -> Steps:
        """Itself: there is nothing to open."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Some rows, or none at the gate."""
        end = ROWS if self.gate is None or os.path.exists(self.gate) else GATE
        stop = min(offset + min(rows_max, BATCH), end)
        if offset >= stop:
            return tg.ReadResult(None, offset, offset == ROWS)
        xs = list(range(offset, stop))
        batch = pa.record_batch({"k": [x % 5 for x in xs], "x": xs}, schema=self.schema)
        return tg.ReadResult(batch, stop, stop == ROWS)

    def close(self) -> None:
        """Nothing to release."""


def test_a_source_waits_for_another_one_through_the_loss_of_a_process(
    raydp_session: RayDPSession, tmp_path: Path
) -> None:
    """While one source stands still the join keeps no more of the other one than the drift allows, in either attempt.

    All rows are joined in the end, once.
    """
    gate = tmp_path / "gate"
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    with tg.StreamEnvironment(runtime, parallelism=1) as env:
        waits = tg.WatermarkAlignment("both", DRIFT, "20ms")
        quick, slow = (
            env.from_source(source, uid=uid).assign_timestamps("x", alignment=waits, uid=f"{uid}-time")
            for source, uid in ((Steps(), "quick"), (Steps(str(gate)), "slow"))
        )
        joined = quick.join(slow, on="k", window=tg.Tumbling(10), uid="join")
        table = joined.select("k", "x", "x_right").to_table(str(tmp_path / "table"), uid="table")
        config = tg.CheckpointConfig(interval="10min", storage=str(tmp_path / "checkpoints"))
        job = env.execute("aligned", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(3, 0))
        until("the drift", lambda: rows_into_the_join(job) >= 2 * GATE + DRIFT, job.vertices)
        kept = [rows_kept(job.savepoint(tmp_path / "before"))]
        job.trigger_checkpoint()
        os.kill(job.processes()[0].pid, signal.SIGKILL)
        until("a restart", lambda: job.progress().restarts == 1 and job.progress().status == "running", job.progress)
        kept += [rows_kept(job.savepoint(tmp_path / f"after {number}")) for number in range(3)]
        gate.touch()
        assert job.wait("4min") == "finished"
    assert DRIFT // 2 < min(kept) <= max(kept) <= AHEAD
    assert sorted(rows_of(table)) == sorted(
        (x % 5, x, y) for x in range(ROWS) for y in (x, x // 10 * 10 + (x + 5) % 10)
    )


def rows_of(table: tg.OutputTable) -> list[tuple[int, ...]]:
    """What a table shows."""
    shown = table.to_arrow()
    return list(zip(*(shown.column(name).to_pylist() for name in ("k", "x", "x_right")), strict=True))


def rows_into_the_join(job: tg.Job) -> int:
    """How many rows have come into the last vertex."""
    return job.vertices()[-1].records_in


def rows_kept(savepoint: str) -> int:
    """How many rows the join has in a savepoint."""
    operators = recovery.inspect(savepoint).operators
    return sum(state.rows or 0 for operator in operators if operator.uid == "join" for state in operator.states)
