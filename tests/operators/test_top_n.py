"""`TopN` keeps the first rows of each key, as a plain model does, with any batches, backends and restores."""

from __future__ import annotations

import tempfile
from typing import Any

import pyarrow as pa
import pytest
from change_view import ChangeView
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run
from ranking_harness import Running

from tidegate.operators.ranking.top_n import Ranking, TopN
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

_SCHEMA = pa.schema([("v", pa.float64()), ("k", pa.string()), ("w", pa.int64()), ("t", pa.int64()), ("n", pa.string())])
_INF, _LEAST, _MOST = float("inf"), -(1 << 63), (1 << 63) - 1
_VALUES = st.sampled_from([-1.5, -0.0, 0.0, 2.0, 7.0, _INF, -_INF, None])
_WHOLE = st.sampled_from([_LEAST, 0, 1, 2, _MOST, None])
_ROWS = st.lists(st.tuples(st.sampled_from(["", "a", None]), _VALUES, _WHOLE), min_size=1, max_size=9)
_RESTART = st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "incremental", "rocksdb", "crowded"]))


def _rows(step: list[tuple[str | None, float | None, int | None]], number: int) -> list[dict[str, Any]]:
    return [{"v": v, "k": k, "w": w, "t": number + i, "n": f"n{number + i}"} for i, (k, v, w) in enumerate(step)]


def _first(rows: list[dict[str, Any]], n: int, last: tuple[bool, bool]) -> list[tuple[Any, ...]]:
    """The first rows of each key, by v descending and then w ascending, with their ranks. `last`: where nulls are."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        nulls = [(1 if behind else -1) if row[name] is None else 0 for name, behind in zip("vw", last, strict=True)]
        return nulls[0], -(row["v"] or 0.0), nulls[1], row["w"] or 0, row["t"]

    found = []
    for key in {row["k"] for row in rows}:
        of_key = sorted((row for row in rows if row["k"] == key), key=place)
        found += [(*row.values(), rank) for rank, row in enumerate(of_key[:n], start=1)]
    return sorted(found, key=repr)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([None, "changes", "update"]),
    st.none() | st.tuples(st.booleans(), st.booleans()),
    st.lists(_ROWS | _RESTART, max_size=9),
)
def test_it_keeps_what_a_model_keeps(
    n: int, emit: str | None, nulls_last: tuple[bool, bool] | None, steps: list[Any]
) -> None:
    """Without ranks, with ranks as changes and as updates: after each batch they come to the model's rows.

    Nulls are where Spark has them unless it is said where, and never equal to a value.
    """
    ranking = Ranking(("k",), n, ("v", "w"), (True, False), emit and "rank", emit != "update", nulls_last=nulls_last)
    last = nulls_last or (True, False)
    came: list[dict[str, Any]] = []
    view, newest = ChangeView(), {}
    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: TopN(ranking, _SCHEMA), directory)
        for step in steps:
            if isinstance(step, tuple):
                running.restart(*step)
                continue
            rows = _rows(step, len(came))
            came += rows
            found = running.process(pa.RecordBatch.from_pylist(rows, _SCHEMA))
            expected = _first(came, n, last)
            if emit == "update":
                newest |= {(row["k"], row["rank"]): tuple(row.values()) for row in found}
                assert sorted(newest.values(), key=repr) == expected
            else:
                view.apply(found)
                without = expected if emit else sorted([row[:-1] for row in expected], key=repr)
                assert sorted(view.rows.elements(), key=repr) == without
        kept = sum(table.rows.num_rows for table in running.stored())
        assert kept == len(_first(came, n, last))
        running.close()


def _batch(*rows: tuple[str, float, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"v": v, "k": k, "w": 0, "t": t, "n": "x"} for k, v, t in rows], _SCHEMA)


@pytest.mark.parametrize("nulls_last", [False, True])
def test_a_null_is_no_extreme_value(nulls_last: bool) -> None:
    """It is before the least integer, or behind the greatest one, whichever comes first, and in other batches."""
    extreme = _MOST if nulls_last else _LEAST
    first, second = (extreme, None) if nulls_last else (None, extreme)
    for batches in ([[first, second]], [[second, first]], [[first], [second]], [[second], [first]]):
        operator = opened(TopN(Ranking(("k",), 1, ("w",), (False,), nulls_last=(nulls_last,)), _SCHEMA))
        rows = [[{"v": 0.0, "k": "a", "w": w, "t": 0, "n": "x"} for w in batch] for batch in batches]
        view = ChangeView()
        for out in run(operator, [pa.RecordBatch.from_pylist(batch, _SCHEMA) for batch in rows]):
            view.apply(out.to_pylist())
        assert [row[2] for row in view.rows.elements()] == [first]


def test_ranks_that_do_not_change_are_not_told() -> None:
    """A row that takes the second place says nothing of the first, and takes back the one that drops out."""
    operator = opened(TopN(Ranking(("k",), 2, ("v",), (True,), "rank"), _SCHEMA))
    run(operator, [_batch(("a", 9.0, 0), ("a", 5.0, 1))], finish=False)
    found = [row for out in run(operator, [_batch(("a", 7.0, 2), ("a", 1.0, 3))]) for row in out.to_pylist()]
    assert [(row["v"], row["rank"], row["row_kind"]) for row in found] == [(5.0, 2, "-U"), (7.0, 2, "+U")]


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
def test_idle_keys_are_forgotten_in_silence(backend: str, tmp_path: Any) -> None:
    """A key whose newest row is a time to live behind the watermark goes; what comes later begins anew."""
    running = Running(lambda: TopN(Ranking(("k",), 2, ("v",), (True,)), _SCHEMA, "t", 20), str(tmp_path))
    running.start(2, backend, [])
    running.process(_batch(("a", 1.0, 5), ("b", 1.0, 5), ("b", 2.0, 9)))
    assert running.advance(25) == []
    assert {key for table in running.stored() for key in table.rows.column("k").to_pylist()} == {"b"}
    assert [row["row_kind"] for row in running.process(_batch(("a", 0.0, 30)))] == ["+I"]
    running.advance(MAX_WATERMARK_MS)
    assert sum(table.rows.num_rows for table in running.stored()) == 3
    running.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"keys": ()}, "at least one key"),
        ({"n": 0}, "between 1 and"),
        ({"by": ()}, "at least one column"),
        ({"descending": (True, False)}, "one boolean, or one for each column"),
        ({"nulls_last": (True, False)}, "or one for each column of by="),
        ({"changes": False}, "give rank="),
    ],
)
def test_rankings_that_make_no_sense_are_refused(arguments: dict[str, Any], reason: str) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigurationError, match=reason):
        Ranking(**({"keys": ("k",), "n": 3, "by": ("v",), "descending": (True,)} | arguments))


@pytest.mark.parametrize(
    ("ranking", "options", "reason"),
    [
        (Ranking(("k",), 1, ("n",), (True,)), {}, "cannot be ordered by a column of type string"),
        (Ranking(("k",), 1, ("x",), (True,)), {}, "no column 'x'"),
        (Ranking(("k",), 1, ("v",), (True,), "t"), {}, "twice"),
        (Ranking(("k",), 1, ("v",), (True,)), {"ttl_ms": 5}, "assign_timestamps"),
        (Ranking(("k",), 1, ("v",), (True,)), {"ttl_ms": 0, "time": "t"}, "greater than 0"),
    ],
)
def test_columns_that_do_not_fit_are_refused(ranking: Ranking, options: dict[str, Any], reason: str) -> None:
    """While the program is made."""
    with pytest.raises(ConfigurationError, match=reason):
        TopN(ranking, _SCHEMA, **options)
