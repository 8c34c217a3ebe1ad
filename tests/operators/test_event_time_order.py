"""Rows of a keyed stream in order of event time: none is lost, late rows leave aside, and restores change nothing."""

from __future__ import annotations

import struct
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_subtasks import JoinSubtasks
from operator_harness import context

from tidegate.operators.functions import event_time_order
from tidegate.operators.functions.event_time_order import EventTimeOrder
from tidegate.operators.joins.join_operator import JoinOperator
from tidegate.protocol.failures import ChangedTypeError, OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

ROWS = pa.schema({"k": pa.int64(), "t": pa.int64(), "n": pa.int64()})

_STEPS = st.lists(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=6)
    | st.integers(0, 30)
    | st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"])),
    max_size=14,
)


def subtasks(schema: pa.Schema = ROWS) -> JoinSubtasks:
    """Subtasks of the operator, which may be restored with another parallelism."""

    def make() -> JoinOperator:
        return cast("JoinOperator", EventTimeOrder(("k",), "t", schema))

    return JoinSubtasks(make, (("k",), ("k",)))


def rows_of(batches: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """All rows, in order."""
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@settings(max_examples=30, deadline=None)
@given(_STEPS, st.integers(1, 3))
def test_rows_leave_by_event_time(steps: list[Any], rows_max: int) -> None:
    """At each watermark those that it has passed, sorted; of a key as sorted by time and arrival over the whole run."""
    before, event_time_order.OUTPUT_ROWS_MAX = event_time_order.OUTPUT_ROWS_MAX, rows_max
    try:
        _check(steps)
    finally:
        event_time_order.OUTPUT_ROWS_MAX = before


def _check(steps: list[Any]) -> None:
    job = subtasks()
    watermark, number, parallelism = -1, 0, 1
    kept: list[tuple[Any, ...]] = []
    found: list[tuple[Any, ...]] = []
    for step in steps:
        if isinstance(step, int):
            passed, watermark = watermark, max(watermark, step)
            out = rows_of(job.advance(watermark))
            assert all(passed < time <= watermark for _, time, _ in out)
            if parallelism == 1:
                assert [time for _, time, _ in out] == sorted(time for _, time, _ in out)
            found += out
        elif isinstance(step, tuple):
            parallelism = step[0]
            job.restore(*step)
        else:
            batch = [{"k": key, "t": at, "n": number + i} for i, (key, at) in enumerate(step)]
            number += len(batch)
            kept += [tuple(row.values()) for row in batch if row["t"] > watermark]
            assert not job.process(0, pa.RecordBatch.from_pylist(batch, ROWS))
    found += rows_of(job.advance(MAX_WATERMARK_MS))
    assert job.stored_rows.get("waiting", 0) == 0
    job.close()
    for key in (None, 0, 1, 2, 3):
        of_key = [row for row in kept if row[0] == key]
        assert [row for row in found if row[0] == key] == sorted(of_key, key=lambda row: (row[1], row[2]))


def test_late_rows_leave_aside_and_are_counted() -> None:
    """A row is late when the watermark has reached its time; it leaves as it came."""
    aside: list[tuple[str, pa.RecordBatch]] = []
    operator = EventTimeOrder(("k",), "t", ROWS)
    of_task = context(0, 1, 16)
    object.__setattr__(of_task, "emit_aside", lambda tag, batch: aside.append((tag, batch)))
    operator.open(of_task, ())
    emitted: list[pa.RecordBatch] = []
    list(operator.advance_watermark(10, emitted.append))
    operator.process(pa.record_batch({"k": [1, 1, 2], "t": [10, 11, 3], "n": [0, 1, 2]}), emitted.append)
    assert emitted == []
    ((tag, late),) = aside
    assert (tag, rows_of([late])) == ("late", [(1, 10, 0), (2, 3, 2)])
    assert of_task.metrics.counter("numLateRecordsDropped").value == 2
    list(operator.advance_watermark(11, emitted.append))
    assert rows_of(emitted) == [(1, 11, 1)]
    operator.close()


def test_many_rows_leave_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of steps stays bounded, because each step scans all waiting rows."""
    monkeypatch.setattr(event_time_order, "OUTPUT_ROWS_MAX", 1_000)
    operator = EventTimeOrder(("k",), "t", ROWS)
    operator.open(context(0, 1, 16), ())
    count = 40 * event_time_order.OUTPUT_ROWS_MAX
    times = list(range(count, 0, -1))
    emitted: list[pa.RecordBatch] = []
    operator.process(pa.record_batch({"k": [1] * count, "t": times, "n": times}), emitted.append)
    steps = len(list(operator.advance_watermark(MAX_WATERMARK_MS, emitted.append)))
    assert steps <= 32
    assert max(batch.num_rows for batch in emitted) <= event_time_order.OUTPUT_ROWS_MAX
    assert pa.Table.from_batches(emitted).column("t").to_pylist() == times[::-1]
    operator.close()


def test_keys_leave_as_they_came() -> None:
    """State compares -0.0 and 0.0 as one key, and the rows keep the one that they had; dictionaries are decoded."""
    schema = pa.schema({"k": pa.float64(), "t": pa.int64(), "d": pa.dictionary(pa.int32(), pa.string())})
    job = subtasks(schema)
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    job.process(0, pa.record_batch([pa.array([0.0, -0.0, 1.5]), pa.array([2, 1, 3]), words], schema=schema))
    job.restore(1, "rocksdb")
    (batch,) = job.advance(5)
    assert [struct.pack("d", key) for key in batch.column("k").to_pylist()] == [
        struct.pack("d", key) for key in (-0.0, 0.0, 1.5)
    ]
    assert batch.column("d").type == pa.string()
    assert batch.column("d").to_pylist() == ["b", "a", "a"]
    job.close()


def test_what_cannot_be_sorted_is_refused() -> None:
    """A row without a time, a batch of other types, and a column that is no time."""
    with pytest.raises(ConfigurationError, match="cannot be event time"):
        EventTimeOrder(("k",), "k", pa.schema({"k": pa.string()}))
    operator = EventTimeOrder(("k",), "t", ROWS)
    operator.open(context(0, 1, 16), ())
    with pytest.raises(OperatorError, match="1 rows have no event time in 't'; filter them out"):
        operator.process(pa.RecordBatch.from_pylist([{"k": 1, "t": None, "n": 1}], ROWS), lambda batch: None)
    with pytest.raises(ChangedTypeError, match="a batch has other types"):
        operator.process(pa.record_batch({"k": [1], "t": [1], "n": ["x"]}), lambda batch: None)
    operator.close()
