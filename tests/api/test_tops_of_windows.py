"""The first rows of windows, of plain rows and of results, in whole jobs; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from local_jobs import finish, local

import tidegate as tg
from tidegate.testing import Faults, simulate

ROWS = pl.DataFrame({"k": ["a", "b", "a", "b", "c", "a"], "t": [1, 2, 3, 12, 13, 14], "x": [5, 9, 9, 1, 1, 0]})


def test_plain_rows_and_results_are_ranked_when_a_window_ends(tmp_path: Path) -> None:
    """Rows that share the first place all come; what follows is windowed again, and takes no row twice."""
    with local() as env:
        rows = env.from_batches(ROWS, timestamp="t", splits=1)
        best = rows.window(tg.Tumbling(10)).top_n(1, by="x", ties=True, rank="place").to_table(str(tmp_path / "best"))
        counts = rows.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count(), total=tg.sum("x"))
        by_window = counts.key_by("window_start", "window_end")
        most = by_window.top_n(1, by=("n", "total"), emit="final", parallelism=1)
        again = most.window(tg.Tumbling(20)).aggregate(total=tg.sum("total")).to_table(str(tmp_path / "again"))
        chosen = most.to_table(str(tmp_path / "most"))
        finish(env, tmp_path / "checkpoints")
    found = sorted(best.to_polars().select("window_start", "k", "x", "place").rows())
    assert found == [(0, "a", 9, 1), (0, "b", 9, 1), (10, "b", 1, 1), (10, "c", 1, 1)]
    first, second = sorted(chosen.to_polars().select("window_end", "k", "n", "total").rows())
    assert first == (10, "a", 2, 14)
    # Two keys are equal in the second window: the one whose count comes first has the place.
    assert second in ((20, "b", 1, 1), (20, "c", 1, 1))
    assert again.to_polars().rows() == [(0, 20, 15)]


def test_sessions_that_end_together_are_windows_of_their_own(tmp_path: Path) -> None:
    """They have begun at different times, so each has a first row."""
    clicks = pl.DataFrame({"user": [1, 1, 1, 2, 2, 3, 3, 3], "t": [0, 50, 100, 50, 100, 20, 60, 100]})
    with local(1) as env:
        rows = env.from_batches(clicks, timestamp="t", max_out_of_orderness=1_000, splits=1)
        counts = rows.key_by("user").window(tg.Session(60)).aggregate(n=tg.count())
        top = counts.key_by("window_start", "window_end").top_n(1, by="n", emit="final").to_table(str(tmp_path / "top"))
        finish(env, tmp_path / "checkpoints")
    found = sorted(top.to_polars().select("window_start", "window_end", "user").rows())
    assert found == [(0, 160, 1), (20, 160, 3), (50, 160, 2)]


def test_late_rows_are_told(tmp_path: Path) -> None:
    """A row that misses its window is on the side, with the window that it misses."""
    with local(parallelism=1) as env:
        rows = env.from_batches(pl.DataFrame({"t": [1, 30, 2], "x": [1, 2, 3]}), splits=1)
        timed = rows.assign_timestamps("t")
        top = timed.window(tg.Tumbling(10)).top_n(1, by="x")
        late = top.late_rows().to_table(str(tmp_path / "late"))
        first = top.to_table(str(tmp_path / "first"))
        finish(env, tmp_path / "checkpoints")
    found = sorted(first.to_polars().rows() + late.to_polars().rows())
    assert [row[:2] for row in found] == [(1, 1), (2, 3), (30, 2)]


@pytest.mark.slow
def test_a_windowed_top_is_the_same_under_faults() -> None:
    """Whatever crashes, and at any parallelism."""

    def build(env: tg.StreamEnvironment) -> None:
        rows = [{"k": i % 7, "t": i, "x": i * 37 % 50} for i in range(300)]
        stream = env.from_batches(pl.DataFrame(rows), timestamp="t", max_out_of_orderness=5, splits=3)
        top = stream.key_by("k").window(tg.Sliding(40, 20)).top_n(2, by="x", rank="place", uid="top")
        top.to_table("sim://top", uid="table")

    for seed in range(3):
        report = simulate(build, seed=seed, faults=Faults(crash=0.02, storage=0.05, delay="0..2s"))
        assert report.ok, f"{report}"


REFUSED: list[tuple[Callable[[tg.Stream], Any], str]] = [
    (lambda s: s.window(tg.Session(5)).top_n(1, by="x"), "takes tg.Tumbling"),
    (lambda s: s.window(tg.Count(5)).top_n(1, by="x"), "takes tg.Tumbling"),
    (lambda s: s.window(tg.Tumbling(5)).allowed_lateness(5).top_n(1, by="x"), "remove allowed_lateness"),
    (lambda s: s.window(tg.Tumbling(5)).top_n(1, by="k"), "cannot be ordered"),
    (lambda s: s.key_by("k").top_n(1, by="x", emit="final"), "is for results of a window"),
    (lambda s: s.key_by("k").top_n(1, by="x", emit="late"), "emit must be"),  # type: ignore[arg-type]
    (lambda s: s.key_by("k").top_n(1, by="x", ties=True), "which rows share a rank"),
    (
        lambda s: s.key_by("k").window(tg.Tumbling(5)).aggregate(n=tg.count()).key_by("k").top_n(1, "n", emit="final"),
        "'window_end' must be among the keys",
    ),
    (
        lambda s: (
            s.window(tg.Tumbling(5)).aggregate(n=tg.count()).key_by("window_end").top_n(1, "n", emit="final", ttl=5)
        ),
        "remove ttl=",
    ),
    (
        lambda s: (
            s.window(tg.Tumbling(5))
            .aggregate(n=tg.count(), emit="update")
            .key_by("window_end")
            .top_n(1, "n", emit="final")
        ),
        "cannot follow",
    ),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED)
def test_what_cannot_be_is_refused(call: Callable[[tg.Stream], Any], reason: str) -> None:
    """While the program is made, with what to do instead."""
    with tg.StreamEnvironment.local() as env, pytest.raises(tg.TidegateError, match=reason):
        call(env.from_batches(ROWS, timestamp="t"))
