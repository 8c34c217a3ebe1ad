"""`execute` reports what is probably not meant, and steps refuse what cannot work, where the program says it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import config, local

import tidegate as tg
from tidegate.storage.errors import ConfigurationError

ROWS = pa.table({"k": ["a", "b"], "t": [0, 1_000], "tags": [["x"], []]})
SECONDS = pa.table({"k": ["a"], "at": [1_700_000_000]})
SCHEMA = pa.schema({"k": pa.string()})


class Ticks(tg.ProcessFunction):
    """Sets a timer of event time in a function of its own."""

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        self._later(context)
        yield {"k": row["k"]}

    def _later(self, context: Any) -> None:
        context.timer_service.register_event_time_timer(1)


class Clocked(tg.ProcessFunction):
    """Sets a timer of the clock."""

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        context.timer_service.register_processing_time_timer(1)
        yield {"k": row["k"]}


def _said(caplog: pytest.LogCaptureFixture, build: Callable[[Any], object], **options: Any) -> list[str]:
    """Warnings that `execute` logs."""
    with local(1) as env:
        build(env)
        with caplog.at_level(logging.WARNING, logger="tidegate.api.environment"):
            job = env.execute("doubtful", **options)
        job.cancel()
        job.wait("4min")
    return [record.getMessage() for record in caplog.records if record.name == "tidegate.api.environment"]


def test_a_table_without_checkpoints_behind_a_source_without_an_end(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing would ever become visible."""
    (said,) = _said(caplog, lambda env: env.from_rate(10, uid="clock").to_table(tmp_path / "table", uid="table"))
    assert "'to_table' (uid 'table') writes rows of 'from_rate' (uid 'clock'), which has no end" in said
    caplog.clear()
    periodic = config(tmp_path / "checkpoints", interval="1h")
    assert not _said(caplog, lambda env: env.from_rate(10).to_table(tmp_path / "other"), checkpoints=periodic)
    assert not _said(caplog, lambda env: env.from_batches(ROWS).to_table(tmp_path / "bounded"))
    assert not _said(caplog, lambda env: env.from_rate(10, rows=3).to_table(tmp_path / "rows")), "it has a last row"


def test_rows_of_a_rate_with_a_last_row_are_collected() -> None:
    """There is an end to wait for."""
    with local(1) as env:
        rows = env.from_rate(None, rows=3).collect()
        env.execute("three", progress="off")
        assert rows.to_arrow()["value"].to_pylist() == [0, 1, 2]


def test_timers_of_event_time_without_event_time(caplog: pytest.LogCaptureFixture) -> None:
    """They fire when the input ends, and never if it does not end."""

    def build(env: Any, function: tg.ProcessFunction, timestamp: str | None) -> object:
        rows = env.from_batches(ROWS, timestamp=timestamp)
        return rows.select("k").key_by("k").process(function, schema=SCHEMA, uid="ticks").collect()

    (said,) = _said(caplog, lambda env: build(env, Ticks(), None))
    assert "'process' (uid 'ticks') sets event-time timers in Ticks._later" in said
    assert "only when the input ends" in said
    caplog.clear()
    assert not _said(caplog, lambda env: build(env, Ticks(), "t"))  # watermarks pass a step that drops the column
    assert not _said(caplog, lambda env: build(env, Clocked(), None))


def test_timers_behind_one_input_without_event_time(caplog: pytest.LogCaptureFixture) -> None:
    """The other input holds event time back: the warning names it."""

    class Meeting(tg.CoProcessFunction):
        def process1(self, row: Any, context: tg.ProcessContext) -> None:
            context.timer_service.register_event_time_timer(0)

        def process2(self, row: Any, context: tg.ProcessContext) -> None:
            pass

    def build(env: Any, timestamp: str | None) -> object:
        first = env.from_batches(ROWS, timestamp="t").key_by("k")
        second = env.from_batches(ROWS, timestamp=timestamp, uid="rules").key_by("k")
        return first.connect(second).process(Meeting(), schema=SCHEMA, uid="meet").collect()

    (said,) = _said(caplog, lambda env: build(env, None))
    assert "'process' (uid 'meet') sets event-time timers in Meeting.process1" in said
    assert "its input 'from_batches' (uid 'rules') has no event time: they fire only when that input ends" in said
    caplog.clear()
    assert not _said(caplog, lambda env: build(env, "t"))


def test_event_times_that_look_like_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Integers are milliseconds."""
    (said,) = _said(caplog, lambda env: env.from_batches(SECONDS, timestamp="at").collect())
    assert "int64 event times are milliseconds since 1970, and 1700000000 is in early 1970" in said
    assert "timestamp=(pl.col('at') * 1000).alias('at')" in said
    caplog.clear()
    assert not _said(caplog, lambda env: env.from_batches(ROWS, timestamp="t").collect())


def test_seconds_of_other_sources_are_seen_when_they_come(caplog: pytest.LogCaptureFixture) -> None:
    """A task warns once, at its first row."""
    with local(1) as env, caplog.at_level(logging.WARNING):
        made = env.from_batches(ROWS).map(
            lambda row: {"at": 1_700_000_000 + row["t"]}, schema=pa.schema({"at": pa.int64()})
        )
        made.assign_timestamps("at", uid="times").collect()
        env.execute("seconds").wait("4min")
    said = [r.getMessage() for r in caplog.records if "int64 event times are milliseconds" in r.getMessage()]
    assert len(said) == 1
    assert "(uid 'times')" in said[0]


def test_streams_that_lead_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """No step and no sink reads their rows."""

    def build(env: Any) -> None:
        rows = env.from_batches(ROWS)
        rows.collect()
        rows.select("k", uid="forgotten")

    (said,) = _said(caplog, build)
    assert "'select' (uid 'forgotten') leads nowhere" in said


def test_print_and_peek_may_be_the_last_step(caplog: pytest.LogCaptureFixture) -> None:
    """Their purpose is that somebody looks at the rows, so nothing has to follow them."""

    def build(env: Any) -> None:
        rows = env.from_batches(ROWS)
        rows.print()
        rows.peek(lambda row: None)

    assert not _said(caplog, build)


def test_rows_are_not_there_before_the_job() -> None:
    """`to_arrow` before `execute` was empty, without a word."""
    with local(1) as env:
        rows = env.from_batches(ROWS).collect(uid="rows")
        with pytest.raises(ConfigurationError, match=r"collect \(uid 'rows'\): there are no rows before the job runs"):
            rows.to_arrow()
        env.execute("rows").wait("4min")
        assert rows.to_arrow().num_rows == 2


def test_keys_of_upserts(tmp_path: Path) -> None:
    """They are needed, and of types that can be compared; the program is refused, and not its first row."""
    with local(1) as env:
        rows = env.from_batches(ROWS)
        with pytest.raises(ConfigurationError, match=r'mode="upsert" needs keys=\[\.\.\.\]'):
            rows.to_table(tmp_path / "table", mode="upsert")
        with pytest.raises(ConfigurationError, match=r"keys=\['k'\] are for mode=\"upsert\""):
            rows.to_table(tmp_path / "table", keys=["k"])
        with pytest.raises(ConfigurationError, match=r"keys=\['tags'\]: .*'tags'"):
            rows.to_table(tmp_path / "table", mode="upsert", keys=["tags"])
