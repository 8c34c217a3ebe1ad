"""An as-of join gives each row the version that held at its time, whatever comes first, through restores."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_subtasks import JoinSubtasks

from tidegate.operators.joins import asof_join
from tidegate.operators.joins.asof_join import AsOfJoin
from tidegate.operators.joins.join_operator import JoinHow, JoinSides
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

LEFT = pa.schema({"k": pa.int64(), "t": pa.int64(), "n": pa.int64()})
RIGHT = pa.schema({"id": pa.int64(), "since": pa.int64(), "v": pa.string()})
SIDES = JoinSides((("k",), ("id",)), ("t", "since"))
KEYS = (("k",), ("id",))

_STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.tuples(st.none() | st.integers(0, 1), st.integers(0, 30)), min_size=1, max_size=6),
    )
    | st.tuples(st.just("watermark"), st.integers(0, 30))
    | st.tuples(st.just("restore"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=14,
)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["inner", "left"]), st.booleans(), _STEPS)
def test_each_row_meets_the_version_of_its_time(how: JoinHow, sweeping: bool, steps: list[Any]) -> None:
    """Versions that are in time: with old ones removed at each watermark, or never. Late rows are dropped."""
    before, asof_join.SWEPT_VERSIONS_MIN = asof_join.SWEPT_VERSIONS_MIN, 0 if sweeping else 10_000
    try:
        _check(how, steps)
    finally:
        asof_join.SWEPT_VERSIONS_MIN = before


def _check(how: JoinHow, steps: list[Any]) -> None:
    job = JoinSubtasks(lambda: AsOfJoin(SIDES, (LEFT, RIGHT), how), KEYS)
    watermark, number = -1, 0
    rows: list[tuple[Any, ...]] = []
    versions: list[tuple[Any, ...]] = []
    found: list[pa.RecordBatch] = []
    for what, argument in steps:
        if what == "watermark":
            watermark = max(watermark, argument)
            found += job.advance(watermark)
        elif what == "restore":
            job.restore(*argument)
        elif what == 0:
            batch = [(key, at, number + i) for i, (key, at) in enumerate(argument)]
            number += len(batch)
            rows += [row for row in batch if row[1] > watermark]
            found += job.process(0, pa.RecordBatch.from_pylist(_dicts(LEFT, batch), LEFT))
        else:
            batch = [(key, max(at, watermark + 1), f"v{number + i}") for i, (key, at) in enumerate(argument)]
            number += len(batch)
            versions += batch
            found += job.process(1, pa.RecordBatch.from_pylist(_dicts(RIGHT, batch), RIGHT))
    found += job.advance(MAX_WATERMARK_MS)
    assert job.stored_rows.get("left", 0) == 0
    job.close()
    expected = []
    for key, at, n in rows:
        held = [v for v in versions if key is not None and v[0] == key and v[1] <= at]
        if held or how == "left":
            newest = max(enumerate(held), key=lambda each: (each[1][1], each[0]))[1] if held else (None,) * 3
            expected.append((key, at, n, *newest[1:]))
    assert sorted((tuple(row.values()) for b in found for row in b.to_pylist()), key=repr) == sorted(expected, key=repr)


def _dicts(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(schema.names, row, strict=True)) for row in rows]


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
def test_versions_that_have_ended_are_removed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each key stays the one that holds at the watermark, and those to come."""
    monkeypatch.setattr(asof_join, "SWEPT_VERSIONS_MIN", 1)
    job = JoinSubtasks(lambda: AsOfJoin(SIDES, (LEFT, RIGHT)), KEYS)
    job.restore(2, backend)
    job.process(1, pa.RecordBatch.from_pylist(_dicts(RIGHT, [(k, t, "v") for k in (1, 2) for t in range(20)]), RIGHT))
    job.advance(15)
    assert job.stored_rows["right"] == 2 * 5
    (out,) = job.process(0, pa.RecordBatch.from_pylist(_dicts(LEFT, [(1, 16, 0)]), LEFT)) or job.advance(16)
    assert out.column("since").to_pylist() == [16]
    job.close()


def test_it_is_inner_or_left() -> None:
    """Other kinds are refused."""
    with pytest.raises(ConfigurationError, match='must be "inner" or "left"'):
        AsOfJoin(SIDES, (LEFT, RIGHT), "full")
