"""Windows with functions in whole jobs: late rows, and what a restart finds."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

COUNTED = pa.schema({"n": pa.int64()})
TOLD = pa.schema({"n": pa.int64(), "calls": pa.int64()})


class Told(tg.ProcessWindowFunction):
    """Counts its calls in the state of a window, and tells of it when the window is over."""

    def __init__(self, lateness_ms: int) -> None:
        self.lateness_ms = lateness_ms

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind the state."""
        self.calls = context.window_state(tg.ValueState("calls", int))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, int]:
        """Count a call, and wait for the end of the window's life."""
        assert context.window is not None
        self.calls.update((self.calls.value() or 0) + 1)
        context.timer_service.register_event_time_timer(context.window.end_ms - 1 + self.lateness_ms)
        context.timer_service.register_event_time_timer(context.window.end_ms + self.lateness_ms)
        return {"n": rows.num_rows, "calls": 0}

    def on_timer(self, timestamp: int, context: tg.ProcessWindowContext) -> dict[str, int]:
        """Tell."""
        return {"n": -1, "calls": self.calls.value()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_windows_come_through_a_restart(tmp_path: Path, backend: str) -> None:
    """Open ones, and those that have fired and are kept, with their state and their timers.

    Also where a backend on disk can only estimate how many rows there are: most have come and gone by then.
    """
    rows, failed = 5_010, tmp_path / "failed"

    def fails_once(batch: pa.RecordBatch) -> pa.RecordBatch:
        """The last row of all comes to no window: nothing but the end makes the last one give what it has."""
        wanted = pc.less(batch["x"], rows)
        if pc.any(pc.invert(wanted)).as_py() and not failed.exists():
            failed.touch()
            raise ValueError("odd")
        return batch.filter(wanted)

    source = GatedSource(rows + 1, gates=(rows,))
    with opening(source), local(1, 500) as env:
        passed = env.from_source(source).map_batches(fails_once, schema=source.schema)
        timed = passed.with_columns(t=pl.col("x").cast(pl.Datetime("ms"))).assign_timestamps("t")
        windows = timed.key_by("k").window(tg.Tumbling("1s"))
        counts = windows.apply(lambda table: {"n": table.num_rows}, schema=COUNTED).collect()
        told = windows.allowed_lateness("1s").process(Told(1_000), schema=TOLD).collect()
        checkpoints = config(tmp_path / "checkpoints", backend=backend)
        job = env.execute("windows", checkpoints=checkpoints, restart=tg.RestartStrategy.fixed_delay(1, "1ms"))
        source.await_gate(rows)
        job.trigger_checkpoint()
        source.open_all()
        assert job.wait("4min") == "finished"
    assert failed.exists()
    assert sum(counts.to_arrow()["n"].to_pylist()) == rows
    of_windows = told.to_arrow().filter(pc.greater(pc.field("n"), 0))
    of_timers = told.to_arrow().filter(pc.less(pc.field("n"), 0))
    assert (of_windows.num_rows, sum(of_windows["n"].to_pylist())) == (30, rows)
    assert of_timers["calls"].to_pylist() == [1] * 30


class Numbered(tg.ProcessWindowFunction):
    """Counts the results of a key, and tells of a session."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind the count."""
        self.results = context.state(tg.ValueState("results", int))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, object]:
        """Count a result."""
        self.results.update((self.results.value() or 0) + 1)
        return {"result": self.results.value(), "xs": sorted(rows.column("x").to_pylist())}


@pytest.mark.slow
@pytest.mark.parametrize("rows_max", [7, 100])
def test_sessions_that_have_come_out_change_after_savepoints_and_rescaling(tmp_path: Path, rows_max: int) -> None:
    """Two subtasks, then three, then one: in the end the table has the sessions of all rows, each once."""

    def run(parallelism: int, restore: str | None, gate: int | None) -> tuple[str | None, tg.OutputTable]:
        gates = () if gate is None else (gate,)
        with opening(GatedSource(600, gates=gates)) as source, local(parallelism, rows_max) as env:
            ahead = pl.col("x") // 5
            behind = pl.when(ahead % 7 == 3).then(45).otherwise(0)
            stream = env.from_source(source, uid="in").with_columns(t=ahead * 10 - behind, uid="times")
            sessions = stream.assign_timestamps("t", uid="event-time").key_by("k").window(tg.Session(8))
            told = sessions.allowed_lateness(100).process(
                Numbered(), schema=pa.schema({"result": pa.int64(), "xs": pa.list_(pa.int64())}), uid="sessions"
            )
            keys = ["k", "window_start", "window_end"]
            table = told.to_table(tmp_path / "sessions", mode="upsert", keys=keys, uid="out")
            checkpoints = config(tmp_path / "checkpoints")
            job = env.execute("sessions", checkpoints=checkpoints, restart=NO_RESTART, restore=restore)
            if gate is None:
                assert job.wait("4min") == "finished"
                return None, table
            source.await_gate(gate)
            return job.stop(savepoint=str(tmp_path / "savepoints"), timeout="4min"), table

    saved, _ = run(2, None, 200)
    saved, _ = run(3, saved, 400)
    _, table = run(1, saved, None)
    found = {(r["k"], r["window_start"], r["window_end"]): r["xs"] for r in table.to_arrow().to_pylist()}
    expected: dict[tuple[int, int, int], list[int]] = {}
    for k in range(5):
        times = sorted((x // 5 * 10 - (45 if x // 5 % 7 == 3 else 0), x) for x in range(k, 600, 5))
        held: list[list[tuple[int, int]]] = []
        for t, x in times:
            if not held or t - held[-1][-1][0] > 8:
                held.append([])
            held[-1].append((t, x))
        expected |= {(k, each[0][0], each[-1][0] + 8): sorted(x for _, x in each) for each in held}
    assert found == expected
    assert max(len(xs) for xs in found.values()) == 3
    numbers = [row["result"] for row in table.to_arrow().to_pylist()]
    assert max(numbers) > len(expected) // 5, "sessions have come out again, and the key's count goes on"


def test_a_late_row_replaces_the_result_of_its_window(tmp_path: Path) -> None:
    """As with aggregates: an upsert by key and window keeps the newest. A timer after the window's life is dropped."""
    rows = pa.table({"k": [1, 1, 1, 2, 1], "t": [1, 10, 2, 3, 15]})
    with local(1, rows_max=1) as env:
        stream = env.from_batches(rows, splits=1, timestamp="t")
        windows = stream.key_by("k").window(tg.Tumbling(10)).allowed_lateness(5)
        counts = windows.apply(lambda table: {"n": table.num_rows}, schema=COUNTED, name="counts")
        every = counts.collect()
        table = counts.to_table(tmp_path / "counts", mode="upsert", keys=["k", "window_start", "window_end"])
        told = windows.process(Told(5), schema=TOLD, name="told").collect()
        env.execute("late", checkpoints=config(tmp_path / "checkpoints")).wait("4min")
    found = [(row["k"], row["window_start"], row["n"]) for row in every.to_arrow().to_pylist()]
    assert found == [(1, 0, 1), (1, 0, 2), (2, 0, 1), (1, 10, 2)]
    kept = sorted((row["k"], row["window_start"], row["n"]) for row in table.to_arrow().to_pylist())
    assert kept == [(1, 0, 2), (1, 10, 2), (2, 0, 1)]
    calls = [(row["k"], row["window_start"], row["n"], row["calls"]) for row in told.to_arrow().to_pylist()]
    assert sorted(calls) == [
        *[(1, 0, -1, 2), (1, 0, 1, 0), (1, 0, 2, 0)],
        *[(1, 10, -1, 1), (1, 10, 2, 0)],
        *[(2, 0, -1, 1), (2, 0, 1, 0)],
    ]
