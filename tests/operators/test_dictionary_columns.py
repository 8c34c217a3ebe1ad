"""Operators that keep rows of many batches take dictionary columns whose indexes are too small for all their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from operator_harness import Subtasks, opened, run
from process_harness import Driven, Row

from tidegate.operators.aggregates import aggregate as aggregates
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.sinks.table_sink import TableSink
from tidegate.operators.state.keyed_state import KeyedState, ListState, MapState, ValueState
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.snapshot import StateTable

_SMALL = pa.dictionary(pa.int8(), pa.string())
_WIDE = pa.dictionary(pa.int32(), pa.string())


def _batches(*prefixes: str) -> list[pa.RecordBatch]:
    """For each prefix a batch of 100 keys of its own; `x` is a dictionary of numbers."""
    return [
        pa.record_batch(
            {
                "k": pa.array([f"{prefix}{n}" for n in range(100)], _SMALL),
                "x": pa.array([number * 100 + n for n in range(100)], pa.dictionary(pa.int8(), pa.int64())),
            }
        )
        for number, prefix in enumerate(prefixes)
    ]


def test_an_appending_sink_stages_batches_of_one_schema() -> None:
    """Rows are as they came; indexes are wide, whatever the batches had: pandas takes int8 or int16 as it needs."""
    small, other = _batches("a", "b")
    wider = other.set_column(0, "k", other.column("k").cast(pa.dictionary(pa.int16(), pa.string())))
    untyped = pa.record_batch({"k": pa.nulls(1), "x": pa.array([1])})
    sink = TableSink("append")
    opened(sink)
    run(sink, [untyped, small, wider])

    staged = sink.take_pending(force=True) or []

    assert [pa.schema({"k": _WIDE, "x": pa.int64()})] * 3 == [batch.schema for batch in staged]
    rows = [row for batch in (untyped, small, wider) for row in batch.to_pylist()]
    assert rows == [row for batch in staged for row in batch.to_pylist()]


def test_an_upserting_sink_keeps_the_last_rows() -> None:
    """Of 200 keys, of which each batch had 100."""
    batches = _batches("a", "b", "a")
    sink = TableSink("upsert", ("k",))
    opened(sink)
    run(sink, batches)

    (staged,) = sink.take_pending(force=True) or []

    expected = [(row["k"], row["x"]) for batch in batches[1:] for row in batch.to_pylist()]
    assert expected == [(row["k"], row["x"]) for row in staged.to_pylist()]


def test_aggregates_of_dictionary_columns_are_restored() -> None:
    """Keys and values of dictionaries are aggregated over all batches, before and after a restore."""
    first, second, third = _batches("a", "b", "a")

    def make() -> KeyedAggregate:
        return KeyedAggregate(("k",), {"least": aggregates.min("x"), "most": aggregates.max("x")}, "final")

    before = Subtasks(make, ("k",), 2)
    before.process([first, second])
    after = Subtasks(make, ("k",), 3, restored=before.snapshot())
    after.process([third])
    after.finish()

    expected = {f"a{n}": (n, 200 + n) for n in range(100)} | {f"b{n}": (100 + n, 100 + n) for n in range(100)}
    found = [row for batch in after.emitted for row in batch.to_pylist()]
    assert expected == {row["k"]: (row["least"], row["most"]) for row in found}
    assert len(found) == 200


class _Keeps(ProcessFunction):
    """Keeps the text of each key in a state of a kind, and tells what was there."""

    def __init__(self, state: KeyedState) -> None:
        self.declared = state

    def open(self, context: ProcessContext) -> None:
        self.state: Any = context.state(self.declared)

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        text = row["k"]
        if isinstance(self.declared, ValueState):
            yield {"was": self.state.value()}
            self.state.update(text)
        elif isinstance(self.declared, ListState):
            yield {"was": next(iter(self.state.get()), None)}
            self.state.add(text)
        else:
            yield {"was": self.state.get(text)}
            self.state.put(text, text)


_STATES = (ValueState("s", _SMALL), ListState("s", _SMALL), MapState("s", _SMALL, _SMALL))


@pytest.mark.parametrize("state", _STATES, ids=lambda state: type(state).__name__)
def test_state_of_a_dictionary_type_is_restored(state: KeyedState) -> None:
    """Each batch, and each key, has few values; the column of a checkpoint has those of all keys."""
    before = Driven(_Keeps(state), parallelism=1)
    for batch in _batches("a", "b"):
        before.batch(batch)

    after = Driven(_Keeps(state), parallelism=2, restored=before.snapshot())

    for batch in _batches("a", "b"):
        assert sorted(batch.column("k").to_pylist()) == sorted(row["was"] for row in after.batch(batch))


@pytest.mark.parametrize("index_type", [pa.int8(), pa.int16()], ids=str)
def test_older_state_of_a_dictionary_type_is_restored(index_type: pa.DataType) -> None:
    """Checkpoints were written with the declared type, or with what Arrow made of it when it was too small."""
    column = pa.array(["a"], pa.dictionary(index_type, pa.string()))
    rows = pa.record_batch({"k": ["a"], "s": column})

    after = Driven(_Keeps(ValueState("s", _SMALL)), restored=[StateTable("s", StateKind.KEYED, rows)])

    assert after.batch(pa.record_batch({"k": ["a"]})) == [{"was": "a"}]
