"""Rows that a function of the program cannot accumulate leave by a side output, exactly once; all others count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from local_jobs import finish, local

import tidegate as tg
from tidegate.testing import Faults, simulate


class SumOfTexts(tg.BatchAggregateFunction):
    """The sum of numbers that are written down. It fails for a batch with a text that is no number."""

    state = pa.schema([("total", pa.int64())])
    output = pa.int64()
    initial = {"total": 0}  # noqa: RUF012 - as programs write it

    def accumulate(self, state: pa.RecordBatch, groups: Any, *columns: pa.Array) -> dict[str, Any]:
        """Add numbers."""
        totals = state["total"].to_numpy().copy()
        np.add.at(totals, groups, [0 if text is None else int(text) for text in columns[0].to_pylist()])
        return {"total": totals}

    def merge(self, state: pa.RecordBatch, groups: Any, other: pa.RecordBatch) -> dict[str, Any]:
        """Add totals."""
        totals = state["total"].to_numpy().copy()
        np.add.at(totals, groups, other["total"].to_numpy())
        return {"total": totals}

    def result(self, state: pa.RecordBatch) -> pa.Array:
        """The total."""
        return state["total"]


ROWS = 200
DATA = pa.table(
    {
        "k": [x * 7 % 5 for x in range(ROWS)],
        "x": range(ROWS),
        "text": [None if x % 13 == 5 else f"no {x}" if x % 17 == 3 else str(x) for x in range(ROWS)],
    }
)
BAD = [row for row in DATA.to_pylist() if row["text"] is not None and row["text"].startswith("no")]
GOOD = [row for row in DATA.to_pylist() if row not in BAD]
TOTAL = tg.udaf(SumOfTexts(), "text")


def letter(row: dict[str, Any]) -> dict[str, Any]:
    """The dead letter of a row."""
    return {**row, "error": f"ValueError: invalid literal for int() with base 10: {row['text']!r}"}


def totals(names: list[Any]) -> list[tuple[Any, ...]]:
    """What comes out: the names of each group, total and count of its rows."""
    found: dict[Any, list[int]] = {}
    for row, name in zip(GOOD, names, strict=True):
        found.setdefault(name, []).append(int(row["text"] or 0))
    return sorted((*name, sum(values), len(values)) for name, values in found.items())


STEPS: dict[str, tuple[Any, Any]] = {
    "by key": (
        lambda s: s.key_by("k").aggregate(total=TOTAL, n=tg.count(), emit="final", errors_to="bad"),
        lambda row: (row["k"],),
    ),
    "by an expression": (
        lambda s: s.key_by((pl.col("x") % 3).alias("k")).aggregate(
            total=TOTAL, n=tg.count(), emit="final", errors_to="bad"
        ),
        lambda row: (row["x"] % 3,),
    ),
    "of everything": (
        lambda s: s.aggregate(total=TOTAL, n=tg.count(), emit="final", errors_to="bad"),
        lambda row: (),
    ),
    "windows": (
        lambda s: s.key_by("k").window(tg.Tumbling(50)).aggregate(total=TOTAL, n=tg.count(), errors_to="bad"),
        lambda row: (row["k"], row["x"] // 50 * 50, row["x"] // 50 * 50 + 50),
    ),
    "windows of everything": (
        lambda s: s.window(tg.Tumbling(50)).aggregate(total=TOTAL, n=tg.count(), errors_to="bad"),
        lambda row: (row["x"] // 50 * 50, row["x"] // 50 * 50 + 50),
    ),
}


@pytest.mark.parametrize("step", list(STEPS))
def test_rows_that_cannot_be_accumulated_are_set_aside(tmp_path: Path, step: str) -> None:
    """With their columns as they came. All others count, for aggregates beside the function, too."""
    build, name_of = STEPS[step]
    with local(2, 40) as env:
        made = build(env.from_batches(DATA, timestamp="x", parallelism=1))
        good, bad = made.collect(), made.side_output("bad").collect()
        finish(env, tmp_path / "c")
    rows = [tuple(row.values()) for row in good.to_arrow().to_pylist()]
    assert sorted(rows) == totals([name_of(row) for row in GOOD])
    letters = bad.to_arrow().select(["x", "text", "error"]).sort_by("x").to_pylist()
    assert letters == [letter({"x": row["x"], "text": row["text"]}) for row in BAD]


def test_a_count_of_rows_and_a_condition(tmp_path: Path) -> None:
    """Rows that do not meet the condition are not tried; expressions are computed; two functions name the first."""
    written = pl.col("text").str.replace("no ", "x")
    with local(2, 40) as env:
        made = (
            env.from_batches(DATA, timestamp="x", parallelism=1)
            .key_by("k")
            .window(tg.Count(10))
            .aggregate(
                total=tg.udaf(SumOfTexts(), written).where(pl.col("x") < 100),
                other=tg.udaf(SumOfTexts(), "text").where(pl.col("x") >= 150),
                n=tg.count(),
                errors_to="bad",
            )
        )
        good, bad = made.collect(), made.side_output("bad").collect()
        finish(env, tmp_path / "c")
    letters = bad.to_arrow().sort_by("x").to_pylist()
    tried = [row for row in BAD if row["x"] < 100 or row["x"] >= 150]
    assert 0 < len(tried) < len(BAD)
    assert [(row["x"], row["text"], row["error"].split(":")[0]) for row in letters] == [
        (row["x"], row["text"], "total" if row["x"] < 100 else "other") for row in tried
    ]
    counts = [sum(row["k"] == k for row in DATA.to_pylist() if row not in tried) // 10 for k in range(5)]
    assert sorted(row["k"] for row in good.to_arrow().to_pylist()) == [k for k in range(5) for _ in range(counts[k])]


def test_what_a_function_returns_of_a_row_is_tried_too(tmp_path: Path) -> None:
    """A state of another type is a failure of the row."""

    class Odd(SumOfTexts):
        def accumulate(self, state: pa.RecordBatch, groups: Any, *columns: pa.Array) -> dict[str, Any]:
            """The longest text instead, where one is no number."""
            texts = columns[0].to_pylist()
            if any(text is not None and text.startswith("no") for text in texts):
                return {"total": [max(text or "" for text in texts)] * len(state)}
            return super().accumulate(state, groups, *columns)

    with local(1, 40) as env:
        made = env.from_batches(DATA).aggregate(total=tg.udaf(Odd(), "text"), emit="final", errors_to="bad")
        good, bad = made.collect(), made.side_output("bad").collect()
        finish(env, tmp_path / "c")
    assert good.to_arrow().to_pylist() == [{"total": sum(int(row["text"] or 0) for row in GOOD)}]
    assert sorted(bad.to_arrow()["x"].to_pylist()) == [row["x"] for row in BAD]
    assert all("Odd.accumulate: total is not an array of int64" in text for text in bad.to_arrow()["error"].to_pylist())


def test_errors_to_without_a_function_is_refused() -> None:
    """Also behind changes, of which one half might be set aside; and a name that late rows have."""
    env = local()
    keyed = env.from_batches(DATA, timestamp="x").key_by("k")
    for aggregate in (keyed.aggregate, keyed.window(tg.Tumbling(50)).aggregate, keyed.stream.aggregate):
        with pytest.raises(tg.ConfigurationError, match="none of the aggregates calls a function of the program"):
            aggregate(n=tg.count(), errors_to="bad")
    with pytest.raises(tg.ConfigurationError, match="two side outputs are called 'late'"):
        keyed.window(tg.Tumbling(50)).aggregate(total=TOTAL, errors_to="late")
    changes = keyed.aggregate(text=tg.first("text"), emit="changes")
    with pytest.raises(tg.ConfigurationError, match="which emits changes"):
        changes.key_by("k").aggregate(total=TOTAL, emit="changes", errors_to="bad")
    made = keyed.aggregate(total=TOTAL, errors_to="bad")
    with pytest.raises(tg.ConfigurationError, match="has no side output 'other'"):
        made.side_output("other")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_set_aside_once_whatever_crashes(seed: int) -> None:
    """The simulator compares results and dead letters with those of an undisturbed run."""

    def build(env: tg.StreamEnvironment) -> None:
        keyed = env.from_batches(DATA, timestamp="x", parallelism=1).key_by("k")
        running = keyed.aggregate(total=TOTAL, n=tg.count(), emit="final", errors_to="bad", parallelism=2)
        windows = keyed.window(tg.Sliding(20, 10)).aggregate(total=TOTAL, errors_to="bad", parallelism=2)
        for name, step in (("running", running), ("windows", windows)):
            step.to_table(f"sim://{name}")
            step.side_output("bad").to_table(f"sim://{name}-bad")

    report = simulate(
        build,
        seed=seed,
        faults=Faults(crash=0.05, coordinator_crash=0.01, storage=0.03, delay="0..1s"),
        options=tg.DataPlaneOptions(source_rows_max=5),
    )
    assert report.ok, report
    assert report.crashes + report.coordinator_crashes > 0
