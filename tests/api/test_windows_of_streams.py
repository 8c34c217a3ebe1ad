"""Windows in the public API: jobs on the local runtime, and what is refused when the program is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening
from waiting import until

import tidegate as tg

ROWS = pa.table({"k": ["a", "b", "a", "a", "b"], "t": [1, 2, 12, 3, 25], "x": [1, 2, 3, 4, 5]})


def timed(env: tg.StreamEnvironment, out_of_order: int = 0) -> tg.Stream:
    """The rows, with event time."""
    return env.from_batches(ROWS, splits=1, timestamp="t", max_out_of_orderness=out_of_order)


def sorted_rows(collected: tg.CollectedRows) -> list[dict[str, Any]]:
    """Rows in the order of their values."""
    return sorted(collected.to_arrow().to_pylist(), key=lambda row: [str(value) for value in row.values()])


def test_windows_by_key_and_of_all_rows(tmp_path: Path) -> None:
    """Two programs in one job: both have the bounds of their windows."""
    with local() as env:
        stream = timed(env, out_of_order=100)
        by_key = stream.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count(), total=tg.sum("x")).collect()
        of_all = stream.window(tg.Sliding(20, 10)).aggregate(n=tg.count(), name="all").collect()
        finish(env, tmp_path)
    assert sorted_rows(by_key) == [
        {"k": "a", "window_start": 0, "window_end": 10, "n": 2, "total": 5},
        {"k": "a", "window_start": 10, "window_end": 20, "n": 1, "total": 3},
        {"k": "b", "window_start": 0, "window_end": 10, "n": 1, "total": 2},
        {"k": "b", "window_start": 20, "window_end": 30, "n": 1, "total": 5},
    ]
    assert [(row["window_start"], row["n"]) for row in sorted_rows(of_all)] == [(-10, 3), (0, 4), (10, 2), (20, 1)]


def test_sessions_of_a_job(tmp_path: Path) -> None:
    """Rows that follow each other within the gap."""
    with local(rows_max=1) as env:
        found = timed(env, 100).key_by("k").window(tg.Session(9)).aggregate(n=tg.count()).collect()
        finish(env, tmp_path)
    assert [(row["k"], row["window_start"], row["window_end"], row["n"]) for row in sorted_rows(found)] == [
        ("a", 1, 21, 3),
        ("b", 2, 11, 1),
        ("b", 25, 34, 1),
    ]


def test_windows_of_so_many_rows_need_no_event_time(tmp_path: Path) -> None:
    """They have no bounds; what is not full at the end does not come out."""
    with local() as env:
        stream = env.from_batches(ROWS, splits=1)
        pairs = stream.key_by("k").window(tg.Count(2)).aggregate(total=tg.sum("x")).collect()
        fours = stream.window(tg.Count(4)).aggregate(n=tg.count(), most=tg.max("x"), name="all").collect()
        finish(env, tmp_path)
    assert sorted_rows(pairs) == [{"k": "a", "total": 4}, {"k": "b", "total": 7}]
    assert fours.to_arrow().to_pylist() == [{"n": 4, "most": 4}]


def test_updates_go_to_a_table_by_key_and_window(tmp_path: Path) -> None:
    """They replace each other; the table ends with what the windows held."""
    with local(rows_max=1) as env:
        counted = timed(env, 100).key_by("k").window(tg.Cumulating(10, 30)).aggregate(n=tg.count(), emit="update")
        table = counted.to_table(str(tmp_path / "t"), mode="upsert", keys=["k", "window_start", "window_end"])
        finish(env, tmp_path / "chk")
    rows = table.to_arrow().sort_by([("k", "ascending"), ("window_end", "ascending")]).to_pylist()
    assert [(row["k"], row["window_end"], row["n"]) for row in rows] == [
        ("a", 10, 2),
        ("a", 20, 3),
        ("a", 30, 3),
        ("b", 10, 1),
        ("b", 20, 1),
        ("b", 30, 2),
    ]


@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_early_results_come_before_windows_end(tmp_path: Path, backend: str) -> None:
    """While the source waits and no window has ended. The table ends with what the windows held."""
    source = GatedSource(20, gates=[10])
    with local(1) as env, opening(source):
        stream = env.from_source(source).assign_timestamps("x").key_by("k").window(tg.Tumbling(15))
        sums = stream.aggregate(total=tg.sum("x"), emit_every="10ms")
        table = sums.to_table(str(tmp_path / "t"), mode="upsert", keys=["k", "window_start", "window_end"])
        every = sums.collect()
        settings = config(tmp_path / "chk", interval="20ms", backend=backend)
        job = env.execute("early", checkpoints=settings, restart=NO_RESTART)
        newest = lambda: {row["k"]: row["total"] for row in every.to_arrow(wait=False).to_pylist()}  # noqa: E731
        until("results of ten rows", lambda: newest() == {k: k + k + 5 for k in range(5)}, newest)
        source.open_all()
        assert job.wait("4min") == "finished"
    rows = sorted(tuple(row.values()) for row in table.to_arrow().to_pylist())
    assert rows == [row for k in range(5) for row in ((k, 0, 15, k + k + 5 + k + 10), (k, 15, 30, k + 15))]


def test_early_results_come_as_event_time_goes_on(tmp_path: Path) -> None:
    """Each time the watermark passes a multiple of the interval, whatever the clock says."""
    rows = pa.table({"k": ["a"] * 6, "t": [0, 4, 12, 15, 33, 40], "x": [1] * 6})
    with local(1, rows_max=1) as env:
        stream = env.from_batches(rows, splits=1, timestamp="t").key_by("k").window(tg.Tumbling(100))
        found = stream.aggregate(total=tg.sum("x"), emit_every="10ms", emit_every_time="event").collect()
        finish(env, tmp_path)
    totals = found.to_arrow()["total"].to_pylist()
    assert totals == sorted(totals)
    assert totals[-1] == 6
    assert {3, 5} <= {*totals}, "with 12 and with 33 another multiple of ten is passed"


def test_late_rows_are_a_stream(tmp_path: Path) -> None:
    """With all their columns, also those that no aggregate reads."""
    rows = pa.table({"k": [1, 1, 1], "t": [5, 50, 6], "note": ["first", "second", "late"]})
    with local(1, rows_max=1) as env:
        stream = env.from_batches(rows, splits=1, timestamp="t")
        counted = stream.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count())
        late, kept = counted.late_rows().collect(), counted.collect()
        finish(env, tmp_path)
    assert late.to_arrow().to_pylist() == [{"k": 1, "t": 6, "note": "late"}]
    assert [row["n"] for row in sorted_rows(kept)] == [1, 1]


@pytest.mark.parametrize("emit", ["final", "changes"])
def test_sessions_that_grow_late_are_corrected(tmp_path: Path, emit: Literal["final", "changes"]) -> None:
    """In a table, which loses what was taken back, and in an aggregate behind them, which calculates backwards."""
    rows = pa.table({"k": [1, 1, 2, 1, 1, 2], "t": [0, 20, 0, 60, 10, 1], "v": [1, 2, 4, 8, 16, 32]})
    with local(1, rows_max=1) as env:
        stream = env.from_batches(rows, splits=1, timestamp="t")
        sessions = stream.key_by("k").window(tg.Session(10)).allowed_lateness(100).aggregate(n=tg.sum("v"), emit=emit)
        table = sessions.to_table(tmp_path / "sessions", mode="upsert", keys=["k", "window_start", "window_end"])
        numbers = sessions.key_by("k").aggregate(sessions=tg.count(), total=tg.sum("n"), emit="final").collect()
        finish(env, tmp_path)
    assert sorted(tuple(row.values()) for row in table.to_arrow().to_pylist()) == [
        (1, 0, 30, 19),
        (1, 60, 70, 8),
        (2, 0, 11, 36),
    ]
    assert [tuple(row.values()) for row in sorted_rows(numbers)] == [(1, 2, 27), (2, 1, 36)]


def doubled(rows: pa.Table) -> pa.Table:
    """Twice the values."""
    return pa.table({"twice": pc.multiply(rows.column("x"), 2)})


def listed(rows: pa.Table) -> dict[str, list[int]]:
    """All values in a list."""
    return {"x": rows.column("x").to_pylist()}


def test_functions_get_the_rows_of_windows(tmp_path: Path) -> None:
    """Of each key, and of all rows. What they return for no rows tells the columns before the job runs."""
    with local() as env:
        stream = timed(env, 20)
        by_key = stream.key_by("k").window(tg.Tumbling(10)).apply(doubled, name="by key")
        assert by_key.schema == pa.schema(
            [("k", pa.string()), ("window_start", pa.int64()), ("window_end", pa.int64()), ("twice", pa.int64())]
        )
        again = by_key.window(tg.Tumbling(100)).aggregate(n=tg.sum("twice"), name="again").collect()
        table = by_key.to_table(tmp_path / "rows")
        found = stream.window(tg.Session(2)).apply(lambda rows: {"n": rows.num_rows}, name="all").collect()
        lists = pa.schema([("x", pa.list_(pa.int64()))])
        windows = stream.key_by("k").window(tg.Count(2))
        assert windows.apply(listed, name="lists").schema is None
        pairs = windows.apply(listed, schema=lists, name="pairs").collect()
        finish(env, tmp_path)
    assert sorted(tuple(row.values()) for row in table.to_arrow().to_pylist()) == [
        ("a", 0, 10, 2),
        ("a", 0, 10, 8),
        ("a", 10, 20, 6),
        ("b", 0, 10, 4),
        ("b", 20, 30, 10),
    ]
    assert [row["n"] for row in again.to_arrow().to_pylist()] == [30]
    assert [row["n"] for row in sorted_rows(found)] == [3, 1, 1]
    assert [tuple(row.values()) for row in sorted_rows(pairs)] == [("a", [1, 3]), ("b", [2, 5])]


def test_rows_too_late_for_a_function_are_a_stream(tmp_path: Path) -> None:
    """With all their columns."""
    rows = pa.table({"k": [1, 1, 1], "t": [5, 50, 6], "note": ["first", "second", "late"]})
    with local(1, rows_max=1) as env:
        stream = env.from_batches(rows, splits=1, timestamp="t")
        notes = stream.key_by("k").window(tg.Tumbling(10)).apply(lambda rows: rows.select(["note"]))
        late, kept = notes.late_rows().collect(), notes.collect()
        finish(env, tmp_path)
    assert late.to_arrow().to_pylist() == [{"k": 1, "t": 6, "note": "late"}]
    assert [row["note"] for row in sorted_rows(kept)] == ["first", "second"]


def test_punctuations_judge_rows_within_a_batch(tmp_path: Path) -> None:
    """A row is late by the marked rows before it, and not by others; windows go by the same watermark."""
    rows = pa.table(
        {"k": [1] * 5, "t": [5, 50, 6, 20, 7], "x": [1, 2, 4, 8, 16], "p": [False, False, False, True, None]}
    )
    with local(1) as env:
        stream = env.from_batches(rows, splits=1).assign_timestamps("t", punctuated_by="p")
        sums = stream.key_by("k").window(tg.Tumbling(10)).aggregate(total=tg.sum("x"))
        late, kept = sums.late_rows().collect(), sums.collect()
        finish(env, tmp_path)
    assert [row["x"] for row in late.to_arrow().to_pylist()] == [16]
    assert [row["total"] for row in sorted_rows(kept)] == [5, 8, 2]


@pytest.mark.parametrize("fires", [True, False])
def test_windows_of_processing_time_need_no_event_time(tmp_path: Path, fires: bool) -> None:
    """What is open when the input ends comes out if that is asked for. The bounds are no event time."""
    with local() as env:
        stream = env.from_batches(ROWS, splits=2)
        windows = stream.key_by("k").window(tg.Tumbling("1000d"), time="processing", fire_at_end=fires)
        sums = windows.aggregate(n=tg.sum("x"))
        assert sums.timestamp is None
        assert sums.schema is not None
        assert sums.schema.field("window_start").type == pa.timestamp("ms", "UTC")
        found = sums.select("k", "n").collect()
        finish(env, tmp_path)
    assert sorted_rows(found) == ([{"k": "a", "n": 8}, {"k": "b", "n": 7}] if fires else [])


@pytest.mark.parametrize("function", [False, True])
def test_windows_that_are_not_full_come_out_at_the_end_or_are_reported(
    tmp_path: Path, function: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `fire_at_end` the log reports how many rows are left. Both ways to ask for it are one."""

    def run(spec: tg.Count, folder: str, **more: bool) -> list[list[int]]:
        with local() as env:
            windows = env.from_rows([1, 2, 3, 4, 5]).window(spec, **more)
            if function:
                found = windows.apply(lambda rows: {"x": rows["value"].to_pylist()}, schema={"x": list[int]}).collect()
            else:
                found = windows.aggregate(x=tg.collect_list("value", limit=9)).collect()
            with caplog.at_level(logging.WARNING):
                finish(env, tmp_path / folder)
        return sorted(found.to_arrow()["x"].to_pylist())

    assert run(tg.Count(3), "left") == [[1, 2, 3]]
    said = [record.getMessage() for record in caplog.records if "were left at" in record.getMessage()]
    assert [line.split(" left at ")[0] for line in said] == ["test job: 2 rows were"]
    caplog.clear()
    assert run(tg.Count(3, fire_at_end=True), "all") == run(tg.Count(3), "too", fire_at_end=True)
    assert run(tg.Count(3, fire_at_end=True), "again") == [[1, 2, 3], [4, 5]]
    assert not [record for record in caplog.records if "left at" in record.getMessage()]


SEEN = {"ms": list[int], "names": list[str]}
GAPS: dict[str, Any] = {
    "a column": "gap",
    "an expression": pl.col("gap") * 1,
    "a duration": pl.duration(milliseconds=pl.col("gap")),
}


@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
@pytest.mark.parametrize("gap", GAPS)
def test_sessions_have_a_gap_of_each_row(tmp_path: Path, gap: str, backend: str) -> None:
    """Aggregates, functions and windows by the clock read the gap; neither late rows nor a function get its column."""
    times = [1, 2, 3, 4, 9, 9, 15, 5]
    rows = pa.table({"k": ["hi"] * 8, "ms": times, "gap": [*times[:7], 1]})
    with local(rows_max=1) as env:
        stream = env.from_batches(rows, splits=1, timestamp="ms").key_by("k")
        windows = stream.window(tg.Session(GAPS[gap]))
        sums = windows.aggregate(n=tg.count(), total=tg.sum(pl.col("ms") * 2))
        found, late = sums.collect(), sums.late_rows().collect()
        lists = windows.apply(lambda of: {"ms": of["ms"].to_pylist(), "names": of.column_names}, schema=SEEN)
        seen, late_too = lists.collect(), lists.late_rows().collect()
        wide = stream.window(tg.Session(pl.col("gap") * 3_600_000), time="processing", fire_at_end=True)
        by_clock = wide.aggregate(n=tg.count(), name="clock").collect()
        env.execute("gaps", checkpoints=config(tmp_path / "chk", backend=backend), restart=NO_RESTART).wait()
    bounds = [(1, 8), (9, 30)]
    out, of_function = found.to_arrow().to_pylist(), seen.to_arrow().to_pylist()
    assert [(row["window_start"], row["window_end"]) for row in out] == bounds
    assert [(row["n"], row["total"]) for row in out] == [(4, 20), (3, 66)]
    assert [(row["window_start"], row["window_end"]) for row in of_function] == bounds
    assert [row["ms"] for row in of_function] == [[1, 2, 3, 4], [9, 9, 15]]
    assert {tuple(row["names"]) for row in of_function} == {("k", "ms", "gap")}
    assert late.to_arrow().to_pylist() == late_too.to_arrow().to_pylist() == [{"k": "hi", "ms": 5, "gap": 1}]
    assert by_clock.to_arrow()["n"].to_pylist() == [8]


def test_a_row_without_a_gap_fails_the_job_with_its_values(tmp_path: Path) -> None:
    """It belongs to no session."""
    rows = pa.table({"k": ["a", "b"], "ms": [1, 2], "gap": [5, None]})
    with local() as env:
        stream = env.from_batches(rows, splits=1, timestamp="ms").key_by("k")
        stream.window(tg.Session("gap")).aggregate(n=tg.count()).collect()
        words = r"the gap of a row is null \(in column 'gap'\).*of the batch: .*'k': 'b'"
        with pytest.raises(tg.JobFailedError, match=words):
            finish(env, tmp_path / "chk")


@pytest.mark.parametrize("keyed", [False, True])
def test_the_last_rows_come_out_after_every_few(tmp_path: Path, keyed: bool) -> None:
    """Fewer at the beginning, as in Flink; what is left comes out where that was asked for."""
    rows = pa.table({"k": ["a"] * 6, "x": [100, 60, 200, 40, 120, 80]})
    with local() as env:
        stream = env.from_batches(rows, splits=1)
        of = stream.key_by("k") if keyed else stream
        means = of.window(tg.Count(3, slide=1)).aggregate(n=tg.count(), mean=tg.mean("x")).collect()
        windows = of.window(tg.Count(3, slide=2), fire_at_end=True)
        lists = windows.apply(lambda rows: {"x": rows["x"].to_pylist()}, schema={"x": list[int]}).collect()
        whole = of.window(tg.Count(4, slide=4)).aggregate(total=tg.sum("x"), name="whole").collect()
        finish(env, tmp_path / "chk")
    assert [(row["n"], row["mean"]) for row in means.to_arrow().to_pylist()] == [
        (1, 100),
        (2, 80),
        (3, 120),
        (3, 100),
        (3, 120),
        (3, 80),
    ]
    assert lists.to_arrow()["x"].to_pylist() == [[100, 60], [60, 200, 40], [40, 120, 80]]
    assert whole.to_arrow()["total"].to_pylist() == [400]


@pytest.mark.parametrize("function", [False, True])
def test_a_timeout_ends_a_window_of_rows_while_the_source_waits(tmp_path: Path, function: bool) -> None:
    """Two rows of three come out by the clock, before the source goes on."""
    source = GatedSource(7, gates=[2])
    with local(1) as env, opening(source):
        windows = env.from_source(source).window(tg.Count(3, timeout="10ms", fire_at_end=True))
        if function:
            found = windows.apply(lambda rows: {"x": rows["x"].to_pylist()}, schema={"x": list[int]}).collect()
        else:
            found = windows.aggregate(x=tg.collect_list("x", limit=9)).collect()
        job = env.execute("timeout", checkpoints=config(tmp_path, interval="20ms"), restart=NO_RESTART)
        out = lambda: sorted(x for row in found.to_arrow(wait=False).to_pylist() for x in row["x"])  # noqa: E731
        until("rows that wait for a third", lambda: out() == [0, 1], out)
        source.open_all()
        assert job.wait("4min") == "finished"
        assert out() == list(range(7))
        assert max(len(row["x"]) for row in found.to_arrow().to_pylist()) <= 3


REFUSED: dict[str, tuple[Callable[[tg.StreamEnvironment], object], str]] = {
    "no event time": (lambda env: env.from_batches(ROWS).window(tg.Tumbling(1)), "no event time"),
    "no window": (lambda env: timed(env).key_by("k").window("1h"), "window takes"),  # type: ignore[arg-type]
    "parallel": (
        lambda env: timed(env).window(tg.Tumbling(1)).aggregate(n=tg.count(), parallelism=2),
        "one subtask",
    ),
    "sessions that update": (
        lambda env: timed(env).key_by("k").window(tg.Session(1)).aggregate(n=tg.count(), emit="update"),
        'other bounds.*emit="changes"',
    ),
    "event time of nothing": (
        lambda env: timed(env).key_by("k").window(tg.Tumbling(1)).aggregate(n=tg.count(), emit_every_time="event"),
        'needs emit_every=; give one such as emit_every="10s"',
    ),
    "event time of the clock": (
        lambda env: (
            timed(env)
            .key_by("k")
            .window(tg.Tumbling(1), time="processing")
            .aggregate(n=tg.count(), emit_every="1s", emit_every_time="event")
        ),
        "have no event time",
    ),
    "changes of bounds that stay": (
        lambda env: timed(env).key_by("k").window(tg.Tumbling(1)).aggregate(n=tg.count(), emit="changes"),
        'emit="update"',
    ),
    "a kind among the columns": (
        lambda env: timed(env).key_by("k").window(tg.Session(1)).aggregate(row_kind=tg.count(), emit="changes"),
        "row_kind",
    ),
    "no such time to emit": (
        lambda env: timed(env).key_by("k").window(tg.Session(1)).aggregate(n=tg.count(), emit="soon"),  # type: ignore[arg-type]
        "not 'soon'",
    ),
    "so many rows that update": (
        lambda env: timed(env).key_by("k").window(tg.Count(2)).aggregate(n=tg.count(), emit="update"),
        "no bounds",
    ),
    "sessions every so often": (
        lambda env: timed(env).key_by("k").window(tg.Session(1)).aggregate(n=tg.count(), emit_every="1s"),
        "other bounds.*remove emit_every",
    ),
    "so many rows every so often": (
        lambda env: timed(env).key_by("k").window(tg.Count(2)).aggregate(n=tg.count(), emit_every="1s"),
        "no bounds.*emit_every",
    ),
    "every so often and after each batch": (
        lambda env: (
            timed(env).key_by("k").window(tg.Tumbling(1)).aggregate(n=tg.count(), emit="update", emit_every="1s")
        ),
        "remove one of them",
    ),
    "every nothing": (
        lambda env: timed(env).key_by("k").window(tg.Tumbling(1)).aggregate(n=tg.count(), emit_every=0),
        "greater than 0",
    ),
    "early results counted": (
        lambda env: (
            timed(env)
            .key_by("k")
            .window(tg.Tumbling(1))
            .aggregate(n=tg.count(), emit_every="1s")
            .key_by("k")
            .aggregate(m=tg.sum("n"))
        ),
        "cannot follow",
    ),
    "so many rows that are late": (
        lambda env: timed(env).key_by("k").window(tg.Count(2)).allowed_lateness("1s"),
        "count windows have no late rows; remove allowed_lateness=",
    ),
    "no function": (
        lambda env: timed(env).window(tg.Tumbling(2)).apply("sum"),  # type: ignore[arg-type]
        "takes a function of an Arrow table",
    ),
    "a gap that is no column": (
        lambda env: timed(env).key_by("k").window(tg.Session("gap")).aggregate(n=tg.count()),
        r"tg.Session\(gap='gap'\): this is neither a duration, .*nor one of the columns",
    ),
    "a gap that is no column, for a function": (
        lambda env: timed(env).key_by("k").window(tg.Session("gap")).apply(doubled),
        "neither a duration",
    ),
    "a gap that is a text": (
        lambda env: timed(env).key_by("k").window(tg.Session("k")).aggregate(n=tg.count()),
        "column 'k' is string; a gap is a duration, or a whole number of milliseconds",
    ),
    "a gap that is computed as a fraction": (
        lambda env: timed(env).key_by("k").window(tg.Session(pl.col("x") / 2)).aggregate(n=tg.count()),
        "the expression is double; a gap is a duration",
    ),
    "a gap of a column that is not there": (
        lambda env: timed(env).key_by("k").window(tg.Session(pl.col("y") * 2)).aggregate(n=tg.count()),
        "y",
    ),
    "a gap that a key has replaced": (
        lambda env: timed(env).key_by((pl.col("x") % 2).alias("x")).window(tg.Session("x")).aggregate(n=tg.count()),
        "would read the key with which key_by has replaced column 'x'",
    ),
    "a slide longer than the window": (
        lambda env: env.from_rows([1]).window(tg.Count(2, slide=3)),
        "a slide of 3 rows is longer than the window of 2 rows",
    ),
    "a slide of no rows": (
        lambda env: env.from_rows([1]).window(tg.Count(2, slide=0)),
        "slide=0 must be a whole number",
    ),
    "a slide with a time-out": (
        lambda env: env.from_rows([1]).window(tg.Count(2, slide=1, timeout="1s")),
        "timeout= cannot be combined with slide=",
    ),
    "the last rows of changes": (
        lambda env: (
            timed(env)
            .key_by("k")
            .aggregate(n=tg.count(), emit="changes")
            .key_by("k")
            .window(tg.Count(2, slide=1))
            .aggregate(n=tg.sum("n"))
        ),
        "cannot follow",
    ),
    "late rows of sessions for a function": (
        lambda env: timed(env).window(tg.Session(2)).allowed_lateness(1).apply(lambda rows: None),
        "give schema= with the columns that the function returns",
    ),
    "functions' late results counted": (
        lambda env: (
            timed(env)
            .key_by("k")
            .window(tg.Tumbling(1))
            .allowed_lateness("1s")
            .apply(doubled)
            .key_by("k")
            .aggregate(m=tg.sum("twice"))
        ),
        "cannot follow",
    ),
    "a function that returns the key": (
        lambda env: timed(env).key_by("k").window(tg.Tumbling(2)).apply(lambda rows: rows),
        r"\['k'\], which the result has anyway",
    ),
    "functions of all rows, in parallel": (
        lambda env: timed(env).window(tg.Tumbling(2)).apply(doubled, parallelism=2),
        "in one subtask",
    ),
    "so many rows by the clock": (
        lambda env: env.from_batches(ROWS).key_by("k").window(tg.Count(2), time="processing"),
        "no time",
    ),
    "an end of event time": (
        lambda env: timed(env).key_by("k").window(tg.Tumbling(2), fire_at_end=True),
        "all end with the input",
    ),
    "late by the clock": (
        lambda env: timed(env).window(tg.Tumbling(2), time="processing").allowed_lateness(1),
        "no late rows",
    ),
    "no such time": (
        lambda env: timed(env).window(tg.Tumbling(2), time="wall"),  # type: ignore[arg-type]
        "not 'wall'",
    ),
    "no such column": (
        lambda env: timed(env).key_by("k").window(tg.Tumbling(1)).aggregate(n=tg.sum("nothing")),
        "nothing",
    ),
    "updates counted": (
        lambda env: (timed(env).key_by("k").window(tg.Tumbling(1)).aggregate(n=tg.count(), emit="update")).to_table(
            "memory://t", name="table"
        ),
        "cannot follow",
    ),
    "late results counted": (
        lambda env: (
            timed(env)
            .key_by("k")
            .window(tg.Tumbling(1))
            .allowed_lateness("1s")
            .aggregate(n=tg.count())
            .key_by("k")
            .aggregate(m=tg.sum("n"))
        ),
        "cannot follow",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """When it is written."""
    make, words = REFUSED[name]
    with local() as env, pytest.raises(tg.ConfigurationError, match=words):
        make(env)
