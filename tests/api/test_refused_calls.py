"""A call that is refused adds nothing to the program, however many steps it has added before it was refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import local, rows

import tidegate as tg

ROWS = [{"k": "a", "n": 1, "at": 0}, {"k": "b", "n": 2, "at": 1}]
NEW_KEYS = pa.schema([("k", pa.string()), ("n", pa.int64())])


def grouped_wrongly(env: tg.StreamEnvironment, stream: tg.Stream) -> object:
    """A query whose aggregate is added before its column is refused."""
    env.create_temporary_view("orders", stream)
    return env.sql("SELECT k, n, COUNT(*) FROM orders GROUP BY k", uid="q")


def timed_wrongly(env: tg.StreamEnvironment, stream: tg.Stream) -> object:
    """A source whose event time is refused after the source was added."""
    return env.from_rows(ROWS, timestamp="nowhere", uid="other")


def written_twice(env: tg.StreamEnvironment, stream: tg.Stream) -> object:
    """A table that is added before its step is refused."""
    return stream.to_table("out", name="no/name\n")


def distinct_of_wrong_ttl(env: tg.StreamEnvironment, stream: tg.Stream) -> object:
    """A key step before an operator that is refused."""
    return stream.distinct(pl.col("k").str.to_uppercase(), ttl="never")


def windows_of_no_parallelism(env: tg.StreamEnvironment, stream: tg.Stream) -> object:
    """An aggregate of expressions, whose inputs are computed in a step before."""
    return stream.key_by("k").window(tg.Tumbling("1s")).aggregate(m=tg.sum(pl.col("n") * 2), parallelism=0)


def hybrid_of_wrong_columns(env: tg.StreamEnvironment, stream: tg.Stream) -> object:
    """A hybrid source of two sources that do not fit."""
    return env.hybrid(stream, then=lambda last: env.from_rows(ROWS), position="n")


REFUSED: list[Callable[[tg.StreamEnvironment, Any], object]] = [
    grouped_wrongly,
    timed_wrongly,
    written_twice,
    distinct_of_wrong_ttl,
    windows_of_no_parallelism,
    hybrid_of_wrong_columns,
]


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_a_refused_call_adds_no_step(
    call: Callable[[tg.StreamEnvironment, Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan after it is the plan before it."""
    monkeypatch.chdir(tmp_path)
    with local(1) as env:
        stream = env.from_rows(ROWS, timestamp="at", uid="in")
        found = stream.collect()
        before = str(env.plan("job"))
        with pytest.raises(tg.ConfigurationError):
            call(env, stream)
        assert str(env.plan("job")) == before
        env.execute("job").wait("4min")
        assert len(rows(found.to_arrow())) == 2


def test_a_corrected_query_runs_with_the_uid_of_the_refused_one() -> None:
    """The refused query has not used up its uid."""
    with local(1) as env:
        env.create_temporary_view("orders", env.from_rows(ROWS))
        with pytest.raises(tg.ConfigurationError, match="GROUP BY"):
            env.sql("SELECT k, n, COUNT(*) FROM orders GROUP BY k", uid="q")
        found = env.sql("SELECT k, COUNT(*) AS c FROM orders GROUP BY k", uid="q", emit="final").collect()
        env.execute("job").wait("4min")
        assert sorted(rows(found.to_arrow())) == [("a", 1), ("b", 1)]


def test_a_refused_table_can_be_written_at_once() -> None:
    """The refused step has not claimed its table."""
    with local(1) as env:
        stream = env.from_rows(ROWS)
        with pytest.raises(tg.ConfigurationError, match="control characters"):
            stream.to_table("memory://", name="no/name\n")
        stream.to_table("memory://", name="table")
