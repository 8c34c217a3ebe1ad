"""The net change of each key in a batch, however a stream of changes is cut into batches."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tidegate.operators.sinks.kafka_sink import net_changes

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("row_kind", pa.string())])
Row = tuple[int, int, str]


def changes_of(steps: list[tuple[int, int | None]]) -> tuple[list[Row], dict[int, int]]:
    """Rows of a stream of changes, and the table that they make. A step sets the value of a key, or deletes it."""
    table: dict[int, int] = {}
    rows: list[Row] = []
    for key, value in steps:
        old = table.pop(key, None)
        if old is not None:
            rows.append((key, old, "-D" if value is None else "-U"))
        if value is not None:
            rows.append((key, value, "+I" if old is None else "+U"))
            table[key] = value
    return rows, table


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    """Returns rows as a batch."""
    return pa.RecordBatch.from_arrays([pa.array(column) for column in zip(*rows, strict=True)], schema=SCHEMA)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 99)), min_size=1, max_size=40),
    st.lists(st.integers(1, 7), min_size=1, max_size=80),
)
def test_events_of_any_batches_make_the_table(steps: list[tuple[int, int | None]], sizes: list[int]) -> None:
    """A row is created when it is not there, and updated and deleted with the row that is there."""
    rows, expected = changes_of(steps)
    table: dict[int, int] = {}
    upserted: dict[int, int] = {}
    for size in sizes * 40:
        if not rows:
            break
        batch, rows = batch_of(rows[:size]), rows[size:]
        found = net_changes(batch, ("id",), drops_passing=True)
        assert len(set(found.rows.tolist())) == len(found)
        for before, after in zip(found.before.tolist(), found.after.tolist(), strict=True):
            key = batch.column("id")[max(before, after)].as_py()
            assert table.pop(key, None) == (None if before < 0 else batch.column("v")[before].as_py())
            if after >= 0:
                table[key] = batch.column("v")[after].as_py()
        every = net_changes(batch, ("id",))
        for row, after in zip(every.rows.tolist(), every.after.tolist(), strict=True):
            key = batch.column("id")[row].as_py()
            upserted.pop(key, None)
            if after >= 0:
                upserted[key] = batch.column("v")[after].as_py()
        keys = [batch.column("id")[row].as_py() for row in every.rows.tolist()]
        assert sorted(keys) == sorted(set(batch.column("id").to_pylist()))
    assert not rows
    assert table == upserted == expected


def test_a_row_that_passes_within_a_batch_gives_no_event() -> None:
    """As an upsert it gives a tombstone: the row may have been written before a failure."""
    batch = batch_of([(1, 5, "+I"), (2, 6, "+I"), (1, 5, "-D")])
    found = net_changes(batch, ("id",), drops_passing=True)
    assert (found.before.tolist(), found.after.tolist()) == ([-1], [1])
    found = net_changes(batch, ("id",))
    assert (found.before.tolist(), found.after.tolist()) == ([-1, 2], [1, -1])
