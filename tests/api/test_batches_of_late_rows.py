"""Where batches are cut makes no difference to windows: neither to what is late, nor to what comes out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import finish, local

import tidegate as tg

BOUND_MS = 20
LATENESS_MS = 30


def disordered(rows: int, seed: int) -> pa.Table:
    """Times that go on, and now and then back by more than the bound."""
    random, time, found = Random(seed), -2_000, []
    for number in range(rows):
        time += random.choice([0, 1, 5, 20, 40, 150])
        found.append({"k": random.randrange(3), "t": time - random.randrange(100), "i": number})
    return pa.Table.from_pylist(found)


ROWS = disordered(150, seed=1)


def counted(
    folder: Path, rows_max: int, window: Any, keyed: bool, lateness_ms: int, parallelism: int
) -> tuple[dict[tuple[Any, ...], int], list[int]]:
    """The newest count of each key and window, and which rows were late."""
    with local(parallelism, rows_max) as env:
        stream = env.from_batches(ROWS, splits=1, timestamp="t", max_out_of_orderness=BOUND_MS, parallelism=1)
        windows = (stream.key_by("k") if keyed else stream).window(window)
        result = (windows.allowed_lateness(lateness_ms) if lateness_ms else windows).aggregate(n=tg.count())
        found, late = result.collect(), result.late_rows().collect()
        finish(env, folder)
    newest: dict[tuple[Any, ...], int] = {}
    for row in found.to_arrow().to_pylist():
        place = (row.get("k"), row["window_start"], row["window_end"])
        if row.get("row_kind", "+I") in ("-U", "-D"):
            del newest[place]
        else:
            newest[place] = row["n"]
    return newest, sorted(late.to_arrow()["i"].to_pylist())


def windows_of(window: Any, time: int) -> list[tuple[int, int]]:
    """Start and end of each window that a row is in; of sessions that of the row alone."""
    match window:
        case tg.Tumbling():
            start = time // window.size_ms * window.size_ms
            return [(start, start + window.size_ms)]
        case tg.Sliding():
            first = time // window.slide_ms * window.slide_ms
            starts = range(first, time - window.size_ms, -window.slide_ms)
            return [(start, start + window.size_ms) for start in starts]
        case tg.Cumulating():
            start = time // window.max_ms * window.max_ms
            ends = range(start + window.step_ms, start + window.max_ms + 1, window.step_ms)
            return [(start, end) for end in ends if end > time]
    return [(time, time + window.gap_ms)]


def expected(window: Any, keyed: bool, lateness_ms: int) -> tuple[dict[tuple[Any, ...], int], list[int]]:
    """Row by row: each meets the watermark of the rows before it."""
    counts: Counter[tuple[Any, ...]] = Counter()
    late, watermark = [], -(10**9)
    for row in ROWS.to_pylist():
        key = row["k"] if keyed else None
        # A row at the end of a session belongs to it, so it ends a millisecond later.
        over = watermark - lateness_ms - int(isinstance(window, tg.Session))
        open_now = [(s, e) for s, e in windows_of(window, row["t"]) if e - 1 > over]
        if not open_now:
            late.append(row["i"])
        elif isinstance(window, tg.Session):
            ((start, end),), size = open_now, 1
            for place in [place for place in counts if place[0] == key and place[2] - 1 > over]:
                if place[1] <= end and start <= place[2]:
                    start, end, size = min(start, place[1]), max(end, place[2]), size + counts.pop(place)
            counts[key, start, end] = size
        else:
            counts.update((key, start, end) for start, end in open_now)
        watermark = max(watermark, row["t"] - BOUND_MS - 1)
    return dict(counts), late


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False], ids=["by key", "all rows"])
@pytest.mark.parametrize(
    ("window", "lateness_ms"),
    [
        (tg.Tumbling(100), 0),
        (tg.Tumbling(100), LATENESS_MS),
        (tg.Sliding(250, 100), 0),
        (tg.Cumulating(50, 200), 0),
        (tg.Session(30), 0),
        (tg.Session(30), LATENESS_MS),
    ],
    ids=str,
)
def test_the_same_rows_are_late_at_any_batch_size(window: Any, lateness_ms: int, keyed: bool, tmp_path: Path) -> None:
    """Behind an exchange and in the task of the source, of each window of a row, and of sessions that end meanwhile."""
    counts, late = expected(window, keyed, lateness_ms)
    for rows_max, parallelism in ((7, 2), (1_000, 1)):
        folder = tmp_path / str(rows_max)
        assert counted(folder, rows_max, window, keyed, lateness_ms, parallelism) == (counts, late)


@pytest.mark.slow
@pytest.mark.parametrize("rows_max", [7, 1_000])
def test_functions_and_first_rows_of_windows_get_the_same_rows(rows_max: int, tmp_path: Path) -> None:
    """As aggregates do."""
    counts, late = expected(tg.Sliding(250, 100), True, 0)
    schema = pa.schema({"n": pa.int64()})
    with local(2, rows_max) as env:
        stream = env.from_batches(ROWS, splits=1, timestamp="t", max_out_of_orderness=BOUND_MS, parallelism=1)
        windows = stream.key_by("k").window(tg.Sliding(250, 100))
        applied = windows.apply(lambda rows: {"n": rows.num_rows}, schema=schema)
        firsts = windows.top_n(1_000, by="i")
        collected = applied.collect(), applied.late_rows().collect(), firsts.collect()
        finish(env, tmp_path)
    found, too_late, ranked = (rows.to_arrow().to_pylist() for rows in collected)
    assert {(row["k"], row["window_start"], row["window_end"]): row["n"] for row in found} == counts
    assert sorted(row["i"] for row in too_late) == late
    assert Counter((row["k"], row["window_start"], row["window_end"]) for row in ranked) == counts


@pytest.mark.parametrize("rows_max", [1, 100])
def test_rows_that_are_the_gap_apart_are_in_one_session(rows_max: int, tmp_path: Path) -> None:
    """Also if a row of another key at the time of the second one has moved event time to just before it.

    What comes behind is in time for windows that end when the session does, also if event time has stood just before.
    """
    table = pa.table({"k": ["b", "a", "b", "c", "a"], "t": [0, 10, 10, 20, 50]})
    with local(1, rows_max) as env:
        stream = env.from_batches(table, splits=1, timestamp="t")
        sessions = stream.key_by("k").window(tg.Session(10)).aggregate(n=tg.count())
        again = sessions.window(tg.Tumbling(20)).aggregate(n=tg.sum("n"), sessions=tg.count(), name="again")
        found, late, of_windows = sessions.collect(), again.late_rows().collect(), again.collect()
        finish(env, tmp_path)
    assert sorted(tuple(row.values()) for row in found.to_arrow().to_pylist()) == [
        ("a", 10, 20, 1),
        ("a", 50, 60, 1),
        ("b", 0, 20, 2),
        ("c", 20, 30, 1),
    ]
    assert late.to_arrow().num_rows == 0
    assert sorted(tuple(row.values()) for row in of_windows.to_arrow().to_pylist()) == [
        (0, 20, 3, 2),
        (20, 40, 1, 1),
        (40, 60, 1, 1),
    ]


def test_rows_that_come_in_several_batches_of_one_call_meet_the_watermark_before_them(tmp_path: Path) -> None:
    """A step makes many rows of one, and the next one takes a row at a time: windows in its task end between rows."""
    schema = pa.schema({"t": pa.int64()})
    packed = pa.table({"times": [[0, 300, 50, 350]]})
    with local(1, 100) as env:
        rows = env.from_batches(packed, splits=1).map_batches(
            lambda batch: pa.record_batch({"t": batch["times"].flatten()}), schema=schema
        )
        single = rows.map_batches(lambda batch: batch, schema=schema, batch_rows=(1, 1), name="single")
        windows = single.assign_timestamps("t").window(tg.Tumbling(100)).aggregate(n=tg.count())
        found, late = windows.collect(), windows.late_rows().collect()
        finish(env, tmp_path)
    assert late.to_arrow()["t"].to_pylist() == [50]
    assert sorted(tuple(row.values()) for row in found.to_arrow().to_pylist()) == [(0, 100, 1), (300, 400, 2)]
