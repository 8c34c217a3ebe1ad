"""Windows whose bounds are no moments of the type of event time: nanoseconds end in the year 2262."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config, finish, local

import tidegate as tg
from tidegate.operators.windows.window_columns import bounds_of

LAST_NS, FIRST_NS, DAY_NS = 2**63 - 1, -(2**63), 86_400 * 10**9
Keyed = tg.Stream


def _joined(s: Keyed, window: tg.Tumbling | tg.Sliding) -> Keyed:
    return s.join(s.select("k", "t", y="x"), on="k", window=window)


def _applied(s: Keyed, window: Any) -> Keyed:
    return s.key_by("k").window(window).apply(lambda rows: {"n": rows.num_rows}, schema=pa.schema({"n": pa.int64()}))


WINDOWS: dict[str, Callable[[Keyed], Keyed]] = {
    "tumbling": lambda s: s.key_by("k").window(tg.Tumbling("1d")).aggregate(n=tg.count()),
    "sliding": lambda s: s.key_by("k").window(tg.Sliding("2d", "1d")).aggregate(n=tg.count()),
    "cumulating": lambda s: s.key_by("k").window(tg.Cumulating("12h", "1d")).aggregate(n=tg.count()),
    "session": lambda s: s.key_by("k").window(tg.Session("1d")).aggregate(n=tg.count()),
    "with a function": lambda s: _applied(s, tg.Tumbling("1d")),
    "sessions with a function": lambda s: _applied(s, tg.Session("1d")),
    "first rows": lambda s: s.key_by("k").window(tg.Tumbling("1d")).top_n(1, by="x"),
    "joined": lambda s: _joined(s, tg.Tumbling("1d")),
    "joined in several": lambda s: _joined(s, tg.Sliding("2d", "1d")),
}


def _rows(time_ns: int) -> pa.Table:
    return pa.table({"k": [1], "t": pa.array([time_ns], pa.int64()).cast(pa.timestamp("ns")), "x": [2]})


@pytest.mark.parametrize("name", WINDOWS)
def test_what_ends_too_late_is_refused(tmp_path: Path, name: str) -> None:
    """Not told with bounds in the year 1677. The error has the row, and what to do."""
    with local(1) as env:
        rows = WINDOWS[name](env.from_batches(_rows(LAST_NS), timestamp="t")).collect()
        job = env.execute("late", checkpoints=config(tmp_path, interval=None), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match=r"timestamp\[ns\].*which ends before.*timestamp\(.ms.\).*'x': 2"):
            job.wait("4min")
    assert rows.to_arrow(wait=False).num_rows == 0


@pytest.mark.parametrize("name", WINDOWS)
def test_what_ends_in_time_comes_out(tmp_path: Path, name: str) -> None:
    """In the last window that the type has, and in one of the first."""
    for time_ns in (LAST_NS - 3 * DAY_NS, FIRST_NS + 3 * DAY_NS):
        with local(1) as env:
            rows = WINDOWS[name](env.from_batches(_rows(time_ns), timestamp="t")).collect()
            finish(env, tmp_path / str(time_ns))
        found = rows.to_arrow()
        assert found.num_rows >= 1
        for start, end in zip(
            *(found[c].cast(pa.int64()).to_pylist() for c in ("window_start", "window_end")), strict=True
        ):
            assert start <= time_ns < end


@pytest.mark.parametrize(("unit", "per_ms"), [("us", 1_000), ("ns", 1_000_000)])
def test_bounds_are_exact_or_refused(unit: str, per_ms: int) -> None:
    """At both ends of the type."""
    last_ms = (2**63 - 1) // per_ms
    exact = np.array([-last_ms, 0, last_ms])
    assert bounds_of(exact, pa.timestamp(unit)).cast(pa.int64()).to_pylist() == (exact * per_ms).tolist()
    for beyond in (-last_ms - 1, last_ms + 1):
        with pytest.raises(tg.ConfigurationError, match="which ends before"):
            bounds_of(np.array([0, beyond]), pa.timestamp(unit))
