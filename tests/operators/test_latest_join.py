"""A join of newest rows gives what a dict of each side gives, row by row, whatever the batches, through restores."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_subtasks import JoinSubtasks

from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.joins.latest_join import LatestEmit, LatestJoin
from tidegate.storage.errors import ConfigurationError

LEFT = pa.schema({"k": pa.int64(), "v": pa.string(), "t": pa.int64()})
RIGHT = pa.schema({"id": pa.int64(), "v": pa.string(), "u": pa.int64()})
SIDES = JoinSides((("k",), ("id",)), ("t", "u"))
KEYS = (("k",), ("id",))

_STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.sampled_from("xyz")), min_size=1, max_size=6),
    )
    | st.tuples(st.just("restore"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=14,
)
Row = tuple[Any, ...]


class _Model:
    """Bytewax's `join` with `insert_mode="last"`: `emit_mode` "complete" or "running"."""

    def __init__(self, emit: LatestEmit) -> None:
        self._emit = emit
        self._newest: tuple[dict[int, Row], dict[int, Row]] = ({}, {})

    def process(self, side: int, key: int | None, *row: Any) -> list[Row]:
        """What a row gives."""
        mine, theirs = self._newest[side], self._newest[1 - side]
        partner = None if key is None else theirs.get(key)
        if key is not None:
            mine[key] = row
        if self._emit == "complete":
            if partner is None or key is None:
                return []
            del mine[key], theirs[key]
        sides = [row, partner or (None, None)]
        left, right = sides if side == 0 else reversed(sides)
        return [(key, *left, *right)]

    @property
    def rows(self) -> list[int]:
        """How many rows are kept of each side."""
        return [len(newest) for newest in self._newest]


def _batch(side: int, rows: list[Row]) -> pa.RecordBatch:
    schema = (LEFT, RIGHT)[side]
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def _told(batches: list[pa.RecordBatch]) -> list[Row]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["complete", "always"]), _STEPS)
def test_it_gives_what_a_dict_of_each_side_gives(emit: LatestEmit, steps: list[Any]) -> None:
    """In the order of each key, with null keys and null values, and keeps one row of a key and side at most."""
    job = JoinSubtasks(lambda: LatestJoin(SIDES, (LEFT, RIGHT), emit), KEYS)
    model = _Model(emit)
    for number, (what, argument) in enumerate(steps):
        if what == "restore":
            job.restore(*argument)
            continue
        rows = [(key, value, 10 * number + place) for place, (key, value) in enumerate(argument)]
        expected = [made for row in rows for made in model.process(what, *row)]
        found = _told(job.process(what, _batch(what, rows)))
        of_key = [[row for row in every if row[0] == key] for key in (None, 0, 1, 2, 3) for every in (found, expected)]
        assert of_key[::2] == of_key[1::2]
        stored = job.stored_rows
        assert [stored.get("left", 0), stored.get("right", 0)] == model.rows
    job.close()


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
def test_a_key_is_forgotten_when_its_newest_row_is_old(backend: str) -> None:
    """On both sides at once: what is left of the other side would come beside rows of another time."""
    job = JoinSubtasks(lambda: LatestJoin(SIDES, (LEFT, RIGHT), "always", ttl_ms=10), KEYS)
    job.restore(2, backend)
    job.process(0, _batch(0, [(1, "old", 0), (2, "old", 0)]))
    job.process(1, _batch(1, [(2, "young", 5)]))
    assert job.advance(12) == []
    found = _told(job.process(1, _batch(1, [(1, "a", 13), (2, "b", 13)])))
    assert sorted(found) == [(1, None, None, "a", 13), (2, "old", 0, "b", 13)]
    assert job.advance(2**63 - 1) == []
    assert job.stored_rows["right"] == 2
    job.close()


def test_other_options_are_refused() -> None:
    """With what there is."""
    with pytest.raises(ConfigurationError, match='"complete" or "always"'):
        LatestJoin(SIDES, (LEFT, RIGHT), "final")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="ttl must be greater than 0"):
        LatestJoin(SIDES, (LEFT, RIGHT), ttl_ms=0)
