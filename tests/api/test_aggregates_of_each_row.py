"""`aggregate(..., emit="each")` in jobs: a result for each row, which stands for itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, local
from programs import nodes_of

import tidegate as tg

_START = datetime(2024, 1, 1)
_ROWS = [
    {"k": [None, "a", "b"][n % 3], "x": n * 7 % 11, "at": _START + timedelta(minutes=n), "n": n} for n in range(60)
]


def _results(build: Callable[[tg.StreamEnvironment], tg.Stream], **options: Any) -> list[dict[str, Any]]:
    env = local(2, 7)
    rows = build(env).collect()
    assert env.execute("each", restart=NO_RESTART, **options).wait("4min") == "finished"
    found: list[dict[str, Any]] = rows.to_arrow().to_pylist()
    return found


def _by_key(rows: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["k"], []).append(row)
    return groups


def _timed(env: tg.StreamEnvironment) -> tg.Stream:
    return env.from_batches(pa.Table.from_pylist(_ROWS), timestamp="at", splits=1)


@pytest.mark.slow
def test_each_row_has_its_running_values() -> None:
    """In the order of the rows of a key, also of aggregates that other modes calculate in several places."""

    def build(env: tg.StreamEnvironment) -> tg.Stream:
        return (
            _timed(env)
            .key_by("k")
            .aggregate(
                n=tg.last("n"),
                total=tg.sum("x"),
                odd=tg.count().where(pl.col("x") % 2 == 1),
                kinds=tg.count_distinct("x"),
                emit="each",
            )
        )

    rows = _by_key(_results(build))
    assert rows.keys() == {None, "a", "b"}
    for key, found in rows.items():
        of_key = [row for row in _ROWS if row["k"] == key]
        for number, row in enumerate(found):
            values = [each["x"] for each in of_key[: number + 1]]
            assert row == {
                "k": key,
                "n": of_key[number]["n"],
                "total": sum(values),
                "odd": sum(value % 2 for value in values),
                "kinds": len(set(values)),
            }
        assert len(found) == len(of_key)


def test_rows_are_not_combined_before_they_are_sent() -> None:
    """Each row has a result of its own, also in a job that combines rows elsewhere."""

    def build(env: tg.StreamEnvironment) -> tg.Stream:
        return _timed(env).key_by("k").aggregate(n=tg.count(), emit="each")

    rows = _by_key(_results(build, local_aggregation="on"))
    assert {key: [row["n"] for row in found] for key, found in rows.items()} == {
        key: list(range(1, 21)) for key in (None, "a", "b")
    }


def test_results_stand_for_themselves(tmp_path: Path) -> None:
    """A filter, a window by the event time of the rows, and a table without keys may follow."""
    env = local(2, 7)
    totals = _timed(env).key_by("k").aggregate(at=tg.last("at"), total=tg.sum("x"), emit="each")
    hours = (
        totals.filter(pl.col("total") > 0).key_by("k").window(tg.Tumbling("1h")).aggregate(rows=tg.count()).collect()
    )
    table = totals.to_table(str(tmp_path / "totals"))
    env.execute("each", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "c")), restart=NO_RESTART).wait("4min")
    positive = [row for row in table.to_arrow().to_pylist() if row["total"] > 0]
    assert table.to_arrow().num_rows == len(_ROWS)
    assert sum(row["rows"] for row in hours.to_arrow().to_pylist()) == len(positive)


def test_keys_that_are_forgotten_begin_anew() -> None:
    """Within a batch as well."""
    rows = [{"k": "a", "at": _START + timedelta(minutes=minutes)} for minutes in (0, 5, 20, 21, 40)]

    def build(env: tg.StreamEnvironment) -> tg.Stream:
        timed = env.from_batches(pa.Table.from_pylist(rows), timestamp="at", splits=1)
        return timed.key_by("k").aggregate(n=tg.count(), emit="each", ttl="10min")

    assert [row["n"] for row in _results(build)] == [1, 2, 1, 2, 1]


def test_lists_come_in_small_batches() -> None:
    """Each row has a list of its own, so a call gets no more rows than have four million values together."""
    env = local()
    keyed = _timed(env).key_by("k")
    keyed.aggregate(every=tg.collect_list("x", limit=1 << 20), n=tg.count(), emit="each", uid="lists")
    keyed.aggregate(n=tg.count(), emit="each", uid="counts")
    keyed.aggregate(every=tg.collect_list("x", limit=1 << 20), uid="updates")
    bounds = {node.uid: node.batch_rows for node in nodes_of(env)}
    assert (bounds["lists"], bounds["counts"], bounds["updates"]) == ((1, 4), None, None)


def test_what_cannot_have_a_result_for_each_row_is_refused() -> None:
    """Behind changes and updates, without keys, and where windows would go by other times than those of the rows."""
    env = local()
    rows = _timed(env)
    keyed = rows.key_by("k")
    changes = keyed.aggregate(n=tg.count(), emit="changes")
    updates = keyed.aggregate(n=tg.count())
    other_times = keyed.aggregate(at=tg.first("at"), emit="each")
    own_times = keyed.aggregate(at=tg.last("at"), emit="each")
    own_times.key_by("k").window(tg.Tumbling("1h")).aggregate(n=tg.count())
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (
            lambda: changes.key_by("k").aggregate(n=tg.count(), emit="each"),
            "would change earlier results",
        ),
        (lambda: updates.key_by("k").aggregate(n=tg.count(), emit="each"), "cannot follow .* which emits updates"),
        (
            lambda: rows.aggregate(n=tg.count(), emit="each"),
            r'Give all rows one key: key_by\(pl.lit\(0\).alias\("all"\)\)',
        ),
        (
            lambda: other_times.key_by("k").window(tg.Tumbling("1h")).aggregate(n=tg.count()),
            "computes the column of event time, 'at', anew",
        ),
        (lambda: keyed.aggregate(n=tg.count(), emit="every"), 'must be "update", "each", "changes" or "final"'),
    )
    for call, said in calls:
        with pytest.raises(tg.ConfigurationError, match=said):
            call()
    everything = rows.key_by(pl.lit(0).alias("all")).aggregate(n=tg.count(), emit="each").collect()
    env.execute("all", restart=NO_RESTART).wait("4min")
    assert [row["n"] for row in everything.to_arrow().to_pylist()] == list(range(1, 61))
