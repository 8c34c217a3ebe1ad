"""A join without a window comes to what nested loops give of the rows that are there, whatever was taken back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from change_view import ChangeView
from hypothesis import given, settings
from hypothesis import strategies as st
from join_subtasks import JoinSubtasks

from tidegate.operators.joins.join_operator import JoinHow, JoinSides
from tidegate.operators.joins.regular_join import RegularJoin
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

LEFT = pa.schema({"k": pa.int64(), "v": pa.string(), "t": pa.int64()})
RIGHT = pa.schema({"id": pa.int64(), "v": pa.string(), "u": pa.int64()})
SIDES = JoinSides((("k",), ("id",)), ("t", "u"))
KIND = pa.field("row_kind", pa.string())

_ROW = st.tuples(st.none() | st.integers(0, 2), st.sampled_from("xy"), st.booleans())
_STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.lists(_ROW, min_size=1, max_size=6))
    | st.tuples(st.just("restore"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=12,
)
Row = tuple[Any, ...]


def _joined(left: Counter[Row], right: Counter[Row], how: str) -> Counter[Row]:
    """In plain Python: key, left value and time, right value and time."""
    found: Counter[Row] = Counter()
    lonely = Counter(right)
    for (key, *mine), times in left.items():
        partners = {} if key is None else {row: n for row, n in right.items() if row[0] == key}
        for row, n in partners.items():
            found[(key, *mine, *row[1:])] += times * n
            lonely.pop(row, None)
        if not partners and how in ("left", "full"):
            found[(key, *mine, None, None)] += times
    if how in ("right", "full"):
        for (key, *theirs), times in lonely.items():
            found[(key, None, None, *theirs)] += times
    return found


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["inner", "left", "right", "full"]), st.tuples(st.booleans(), st.booleans()), _STEPS)
def test_it_comes_to_what_nested_loops_give(how: JoinHow, changing: tuple[bool, bool], steps: list[Any]) -> None:
    """Rows come to both sides, and go again on those with changes, through restores at any parallelism."""
    plain = (LEFT, RIGHT)
    schemas = tuple(s.append(KIND) if c else s for s, c in zip(plain, changing, strict=True))
    job = JoinSubtasks(lambda: RegularJoin(SIDES, plain, how, changing), (("k",), ("id",)))
    there: tuple[Counter[Row], Counter[Row]] = (Counter(), Counter())
    view = ChangeView()
    for what, argument in steps:
        if what == "restore":
            job.restore(*argument)
            continue
        rows = []
        for key, value, back in argument:
            row = (key, value, 7)
            if back and changing[what] and there[what][row]:
                there[what][row] -= 1
                rows.append((*row, "-D"))
            else:
                there[what][row] += 1
                rows.append((*row, "+I"))
        for row in [row for row, times in there[what].items() if not times]:
            del there[what][row]
        names = schemas[what].names
        batch = pa.RecordBatch.from_pylist([dict(zip(names, row, strict=False)) for row in rows], schemas[what])
        for emitted in job.process(what, batch):
            view.apply([{"row_kind": "+I", **row} for row in emitted.to_pylist()])
        assert view.rows == _joined(*there, how)
    job.close()


def _batch(schema: pa.Schema, *rows: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def _told(batches: list[pa.RecordBatch]) -> list[Row]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_what_is_taken_back_comes_first() -> None:
    """A row without a partner is taken back before it comes with one, so that an upsert by its key keeps the latter."""
    job = JoinSubtasks(lambda: RegularJoin(SIDES, (LEFT, RIGHT), "left"), (("k",), ("id",)))
    job.process(0, _batch(LEFT, (1, "x", 0)))
    assert _told(job.process(1, _batch(RIGHT, (1, "y", 0)))) == [
        (1, "x", 0, None, None, "-D"), (1, "x", 0, "y", 0, "+I"),
    ]  # fmt: skip
    job.close()


def test_an_inner_join_of_plain_rows_takes_nothing_back() -> None:
    """Its rows have no kind."""
    join = RegularJoin(SIDES, (LEFT, RIGHT))
    assert "row_kind" not in join.output.names
    assert "row_kind" in RegularJoin(SIDES, (LEFT, RIGHT), changing=(True, False)).output.names


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
@pytest.mark.parametrize("how", ["inner", "left"])
def test_old_rows_are_forgotten_in_silence(how: JoinHow, backend: str) -> None:
    """Of an inner join each by itself, of others a key when its newest row is old; then a partner finds nobody."""
    job = JoinSubtasks(lambda: RegularJoin(SIDES, (LEFT, RIGHT), how, ttl_ms=10), (("k",), ("id",)))
    job.restore(2, backend)
    job.process(0, _batch(LEFT, (1, "x", 0), (2, "x", 0), (2, "y", 5)))
    job.process(1, _batch(RIGHT, (1, "z", 0)))
    assert job.advance(12) == []
    found = _told(job.process(1, _batch(RIGHT, (1, "late", 13), (2, "in time", 13))))
    assert sorted({row[1] for row in found if row[3] is not None}) == (["y"] if how == "inner" else ["x", "y"])
    assert {row[0] for row in found} == {2}
    job.advance(MAX_WATERMARK_MS)
    assert _told(job.process(1, _batch(RIGHT, (2, "after the end", 13)))) != []
    job.close()


def test_a_row_that_never_came_cannot_be_taken_back() -> None:
    """Unless it may have been forgotten: then it is nothing."""
    changes = LEFT.append(KIND)
    for ttl_ms, error in ((None, True), (10, False)):
        job = JoinSubtasks(
            lambda ttl_ms=ttl_ms: RegularJoin(SIDES, (LEFT, RIGHT), "left", (True, False), ttl_ms),  # type: ignore[misc]
            (("k",), ("id",)),
        )
        if error:
            with pytest.raises(OperatorError, match="retracted that never came"):
                job.process(0, _batch(changes, (1, "x", 0, "-D")))
        else:
            assert job.process(0, _batch(changes, (1, "x", 0, "-D"))) == []
        job.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: RegularJoin(SIDES, (LEFT, RIGHT), "semi"), "without a window is one of"),
        (lambda: RegularJoin(SIDES, (LEFT, RIGHT), ttl_ms=0), "greater than 0"),
        (
            lambda: RegularJoin(
                SIDES, (LEFT.append(pa.field("l", pa.list_(pa.int8()))), RIGHT), "inner", (True, False)
            ),
            "l",
        ),
    ],
)
def test_joins_that_cannot_be_are_refused(make: Any, reason: str) -> None:
    """While the program is made."""
    with pytest.raises(ConfigurationError, match=reason):
        make()
