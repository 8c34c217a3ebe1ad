"""A step behind assign_timestamps that changes the column of event time: refused, or right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import config, local

import tidegate as tg

HOUR = 3_600_000
ROWS = pa.table({"k": ["a"] * 100, "ts": [10_000_000 + 1_000 * i for i in range(100)], "at": [0] * 100})
Step = Callable[[Any], Any]


def _counted(stream: Any) -> Any:
    return stream.key_by("k").window(tg.Tumbling("10s")).aggregate(n=tg.count())


def _run(folder: Path, change: Step, table: pa.Table = ROWS) -> int:
    """The rows that windows count."""
    with local(1) as env:
        made = _counted(change(env.from_batches(table, timestamp="ts"))).collect()
        job = env.execute("times", checkpoints=config(folder / "c"), restart=tg.RestartStrategy.fixed_delay(5, "1ms"))
        assert job.wait("4min") == "finished"
        return sum(made.to_arrow()["n"].to_pylist())


EXPRESSIONS: dict[str, Step] = {
    "with_columns": lambda s: s.with_columns(ts=pl.col("ts") - HOUR),
    "select": lambda s: s.select("k", ts=pl.col("ts") - HOUR),
    "another column": lambda s: s.select("k", ts="at"),
    "of another column": lambda s: s.with_columns(ts=pl.coalesce("ts", "at")),
    "a constant": lambda s: s.with_columns(ts=pl.lit(7)),
    "seconds": lambda s: s.with_columns(ts=pl.col("ts") // 1000),
    "another unit": lambda s: s.with_columns(ts=pl.col("ts").cast(pl.Datetime("us"))),
    "before a filter": lambda s: s.with_columns(ts=pl.col("ts") - HOUR).filter(pl.col("k") == "a"),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_that_change_it_are_refused(name: str) -> None:
    """The error names the step and both remedies, before anything runs."""
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=r"'ts', anew.*assign_timestamps\('ts'\)") as error:
        _counted(EXPRESSIONS[name](env.from_batches(ROWS, timestamp="ts")))
    assert "select" in str(error.value) or "with_columns" in str(error.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda s, o: s.interval_join(o, on="k", between=(-1, 1)),
        lambda s, o: o.interval_join(s, on="k", between=(-1, 1)),
        lambda s, o: s.join_asof(o, on="k"),
        lambda s, o: s.join_latest(o, on="k", ttl="1h"),
        lambda s, o: s.key_by("k").deduplicate(ttl="1h"),
        lambda s, o: s.key_by("k").aggregate(n=tg.count(), ttl="1h"),
        lambda s, o: s.key_by("k").top_n(1, by="ts", ttl="1h"),
        lambda s, o: s.window(tg.Session("1s")).aggregate(n=tg.count()),
    ],
)
def test_every_step_that_goes_by_it_refuses(use: Callable[[Any, Any], Any]) -> None:
    """Joins on either side, times to live, and windows."""
    with local(1) as env:
        stream = env.from_batches(ROWS, timestamp="ts")
        changed, other = stream.with_columns(ts=pl.col("ts") - HOUR), stream.select("k", "ts", w="at")
        with pytest.raises(tg.ConfigurationError, match="computes the column of event time, 'ts', anew"):
            use(changed, other)


def _later(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {**row}
    yield {**row, "ts": row["ts"] - HOUR}


FUNCTIONS: dict[str, Step] = {
    "map": lambda s: s.map(lambda row: {**row, "ts": row["ts"] - HOUR}, schema=ROWS.schema),
    "map by row": lambda s: s.map(lambda row: {**row, "ts": row["ts"] - HOUR}, schema=ROWS.schema, traced=False),
    "flat_map": lambda s: s.flat_map(_later, schema=ROWS.schema),
    "before a rename": lambda s: s.map(lambda row: {**row, "ts": row["ts"] - HOUR}, schema=ROWS.schema).select(
        "k", t="ts"
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_change_it_fail_at_once(tmp_path: Path, name: str) -> None:
    """The error names the function and the row, and the job is not restarted."""
    with local(1) as env:
        _counted(FUNCTIONS[name](env.from_batches(ROWS, timestamp="ts"))).collect()
        job = env.execute("times", checkpoints=config(tmp_path), restart=tg.RestartStrategy.fixed_delay(5, "1ms"))
        with pytest.raises(tg.JobFailedError, match=r"event time, 'ts', from 10000000 to 6400000.*assign_timestamps"):
            job.wait("4min")
        assert job.progress().restarts == 0


def test_rows_that_change_it_may_go_to_a_side_output(tmp_path: Path) -> None:
    """With errors_to the other rows are counted."""

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "ts": row["ts"] - (HOUR if row["ts"] % 10_000 == 0 else 0)}

    with local(1) as env:
        mapped = env.from_batches(ROWS, timestamp="ts").map(changed, schema=ROWS.schema, errors_to="bad")
        counted, bad = _counted(mapped).collect(), mapped.side_output("bad").collect()
        assert env.execute("times", checkpoints=config(tmp_path)).wait("4min") == "finished"
    assert (sum(counted.to_arrow()["n"].to_pylist()), bad.to_arrow().num_rows) == (90, 10)


TIMES = ROWS.set_column(1, "ts", pa.array([datetime(2026, 1, 1) + timedelta(seconds=i) for i in range(100)]))
AS_MS = TIMES.schema.set(1, pa.field("ts", pa.timestamp("ms")))

RIGHT: dict[str, tuple[Step, pa.Table]] = {
    "assigned again": (lambda s: s.with_columns(ts=pl.col("ts") - HOUR).assign_timestamps("ts"), ROWS),
    "assigned again behind a function": (
        lambda s: s.map(lambda row: {**row, "ts": row["ts"] - HOUR}, schema=ROWS.schema).assign_timestamps("ts"),
        ROWS,
    ),
    "another name": (lambda s: s.with_columns(earlier=pl.col("ts") - HOUR), ROWS),
    "as it is": (lambda s: s.with_columns(ts=pl.col("ts")), ROWS),
    "milliseconds as a datetime": (lambda s: s.with_columns(ts=pl.col("ts").cast(pl.Datetime("ms"))), ROWS),
    "a coarser unit": (lambda s: s.with_columns(ts=pl.col("ts").cast(pl.Datetime("ms"))), TIMES),
    "a zone": (lambda s: s.with_columns(ts=pl.col("ts").dt.replace_time_zone("UTC")), TIMES),
    "renamed": (lambda s: s.select("k", t="ts"), ROWS),
    "a function that keeps it": (lambda s: s.map(lambda row: {**row, "k": "b"}, schema=ROWS.schema), ROWS),
    "a function that gives it another type": (lambda s: s.map(dict, schema=AS_MS), TIMES),
    "flat_map": (lambda s: s.flat_map(lambda row: [row], schema=ROWS.schema), ROWS),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_it_or_assigns_it_again_counts_all_rows(tmp_path: Path, name: str) -> None:
    """The same time in another type is no change."""
    change, table = RIGHT[name]
    assert _run(tmp_path, change, table) == 100


def test_it_may_change_where_nothing_goes_by_it(tmp_path: Path) -> None:
    """A table, or a running aggregate, takes any times."""
    with local(1) as env:
        stream = env.from_batches(ROWS, timestamp="ts")
        plain = stream.with_columns(ts=pl.col("ts") - HOUR).collect()
        mapped = stream.map(lambda row: {**row, "ts": 0}, schema=ROWS.schema)
        counted = mapped.key_by("k").aggregate(n=tg.count(), emit="final").collect()
        assert env.execute("times", checkpoints=config(tmp_path)).wait("4min") == "finished"
    assert (plain.to_arrow().num_rows, counted.to_arrow()["n"].to_pylist()) == (100, [100])
