"""The pure part of a table sink: what becomes a file, which rows stay, and which version they carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import CUT, opened, run

from tidegate.operators.operator import Operator
from tidegate.operators.sinks.table_sink import TableSink
from tidegate.protocol.failures import OperatorError
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.state.snapshot import StateTable


def _sink(sink: TableSink, restored: list[StateTable] | None = None) -> TableSink:
    opened(sink, restored or [])
    return sink


def _stored(sink: Operator) -> StateTable:
    snapshot = sink.snapshot(CUT)
    assert snapshot is not None
    (state,) = snapshot.states
    (table,) = tables_of(state)
    return table


def test_append_stages_every_row_in_order() -> None:
    """All batches come out, as they came, once; then nothing is left. There is no state."""
    sink = _sink(TableSink("append"))
    batches = [pa.record_batch({"x": [1, 1]}), pa.record_batch({"x": [2]})]
    assert run(sink, batches) == []
    assert sink.take_pending(force=False) is None
    assert sink.take_pending(force=True) == batches
    assert sink.take_pending(force=True) is None
    assert sink.snapshot(CUT) is None


def test_enough_bytes_are_staged_without_force() -> None:
    """At `file_bytes_max` what is pending becomes a file; the buffer starts anew."""
    sink = _sink(TableSink("append", file_bytes_max=100))
    batch = pa.record_batch({"x": pa.array([0] * 8, pa.int64())})
    run(sink, [batch])
    assert sink.take_pending(force=False) is None
    run(sink, [batch])
    assert sink.take_pending(force=False) == [batch, batch]
    assert sink.take_pending(force=True) is None


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.none() | st.integers(0, 4), st.sampled_from([None, "a", "b"])), max_size=10),
        max_size=4,
    )
)
def test_upsert_keeps_the_last_row_of_each_key(parts: list[list[tuple[int | None, str | None]]]) -> None:
    """Of the rows of a key the last one stays, in the order of the last rows; nulls are keys."""
    sink = _sink(TableSink("upsert", ("i", "s")))
    last: dict[tuple[int | None, str | None], int] = {}
    row = 0
    for part in parts:
        columns = {
            "i": pa.array([i for i, _ in part], pa.int64()),
            "s": pa.array([s for _, s in part], pa.string()),
            "row": pa.array(range(row, row + len(part)), pa.int64()),
        }
        run(sink, [pa.record_batch(columns)])
        for key in part:
            last[key] = row
            row += 1
    staged = sink.take_pending(force=True)
    rows = [] if staged is None else [r for batch in staged for r in batch.to_pylist()]
    expected = sorted(((i, s, r) for (i, s), r in last.items()), key=lambda item: item[2])
    assert [(r["i"], r["s"], r["row"]) for r in rows] == expected
    assert {r[VERSION_COLUMN] for r in rows} <= {1}


def test_versions_increase_with_every_file() -> None:
    """Each take has a version of its own, greater than those before, also after a restore."""
    sink = _sink(TableSink("upsert", ("k",)))
    versions = []
    for _ in range(3):
        run(sink, [pa.record_batch({"k": [1]})])
        (batch,) = sink.take_pending(force=True) or []
        assert batch.schema.field(VERSION_COLUMN).type == pa.int64()
        versions += batch.column(VERSION_COLUMN).to_pylist()
    assert versions == [1, 2, 3]
    restored = _sink(TableSink("upsert", ("k",)), [_stored(sink)])
    run(restored, [pa.record_batch({"k": [1]})])
    (batch,) = restored.take_pending(force=True) or []
    assert batch.column(VERSION_COLUMN).to_pylist() == [4]


def test_every_subtask_goes_on_from_the_greatest_version() -> None:
    """Keys move when the parallelism changes: state is UNION, and the greatest counter counts for all."""
    tables = []
    for files in (5, 2):
        sink = _sink(TableSink("upsert", ("k",)))
        for _ in range(files):
            run(sink, [pa.record_batch({"k": [1]})])
            sink.take_pending(force=True)
        tables.append(_stored(sink))
    assert {table.kind for table in tables} == {StateKind.UNION}
    assert [table.rows.to_pydict() for table in tables] == [{"version": [5]}, {"version": [2]}]
    sink = _sink(TableSink("upsert", ("k",)), tables)
    run(sink, [pa.record_batch({"k": [1]})])
    (batch,) = sink.take_pending(force=True) or []
    assert batch.column(VERSION_COLUMN).to_pylist() == [6]


def test_pending_rows_must_not_be_snapshotted_away() -> None:
    """A snapshot with rows still pending would lose them: it is refused."""
    sink = _sink(TableSink("append"))
    run(sink, [pa.record_batch({"x": [1]})])
    with pytest.raises(AssertionError, match="pending"):
        sink.snapshot(CUT)


def test_null_columns_find_their_type() -> None:
    """Batches of one file have one schema, although a column had no type at first."""
    sink = _sink(TableSink("append"))
    run(sink, [pa.record_batch({"x": pa.array([None])}), pa.record_batch({"x": ["text"]})])
    staged = sink.take_pending(force=True)
    assert staged is not None
    assert [batch.schema.field("x").type for batch in staged] == [pa.string(), pa.string()]


def test_small_slices_leave_their_parents() -> None:
    """Pending rows do not keep a large parent batch in memory."""
    sink = _sink(TableSink("append"))
    run(sink, [pa.record_batch({"x": pa.array(range(100_000), pa.int64())}).slice(7, 3)])
    (batch,) = sink.take_pending(force=True) or []
    assert batch.to_pydict() == {"x": [7, 8, 9]}
    assert batch.get_total_buffer_size() < 1000


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (pa.record_batch({"x": [1]}), "key column 'k' is not in the batch"),
        (pa.record_batch({"k": [[1]]}), "cannot be a key"),
        (pa.record_batch({"k": [1], VERSION_COLUMN: [1]}), "rename the column"),
    ],
)
def test_wrong_batches_are_refused(batch: pa.RecordBatch, said: str) -> None:
    """Missing keys, types that are no keys, and tidegate's own column name are found on arrival."""
    with pytest.raises(OperatorError, match=said):
        run(_sink(TableSink("upsert", ("k",))), [batch])


@pytest.mark.parametrize(
    ("kind", "nest"),
    [
        (pa.timestamp("s"), lambda seconds: seconds),
        (pa.list_(pa.timestamp("s", "UTC")), lambda seconds: [None, seconds]),
        (pa.struct([("a", pa.list_(pa.struct([("b", pa.timestamp("s"))])))]), lambda seconds: {"a": [{"b": seconds}]}),
        (pa.map_(pa.string(), pa.timestamp("s")), lambda seconds: [("a", 0), ("b", seconds)]),
    ],
)
def test_seconds_that_parquet_cannot_hold_are_refused(kind: pa.DataType, nest: Callable[[int], Any]) -> None:
    """The error names column and value. Parquet has milliseconds, so later seconds would fail while a file is
    written.
    """
    sink = _sink(TableSink())
    last = (2**63 - 1) // 1_000
    for seconds in (last, -last):
        run(sink, [pa.record_batch({"at": pa.array([None, nest(seconds)], kind)})])
    for seconds in (last + 1, -last - 1):
        with pytest.raises(OperatorError, match=rf"column 'at' .* time .{seconds}., .* out of range in a Parquet file"):
            run(sink, [pa.record_batch({"at": pa.array([None, nest(seconds)], kind)})])


def test_schema_must_not_change() -> None:
    """A file has one schema; the error names the column and both types."""
    sink = _sink(TableSink("append"))
    run(sink, [pa.record_batch({"x": [1]})])
    with pytest.raises(OperatorError, match="column 'x' was int64 before and is string"):
        run(sink, [pa.record_batch({"x": ["text"]})])


@pytest.mark.parametrize(("mode", "keys"), [("upsert", ()), ("append", ("k",)), ("merge", ("k",))])
def test_wrong_arguments(mode: str, keys: tuple[str, ...]) -> None:
    """Modes and keys that contradict are refused when the sink is made."""
    with pytest.raises(ConfigurationError):
        TableSink(mode, keys)  # type: ignore[arg-type]
