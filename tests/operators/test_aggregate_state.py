"""State of keyed aggregates: on every backend, in layers, and when the types of a program have become wider."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import context, run

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.protocol.failures import OperatorError
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, write_native
from tidegate.storage.state.snapshot import Cut, StateTable

_COLUMNAR = StateBackendOptions()
_INCREMENTAL = StateBackendOptions(incremental=True)


def _opened(
    options: StateBackendOptions, restored: list[StateTable] | None = None, /, **what: Aggregate
) -> KeyedAggregate:
    operator = KeyedAggregate(("k",), what, "final")
    operator.open(dataclasses.replace(context(), backend=options), restored or [])
    return operator


def _stored(operator: KeyedAggregate, number: int = 1, base: int | None = None, layer: int = 0) -> list[StateTable]:
    """The rows of a snapshot, in whatever part of it they are."""
    as_rows = operator.context.backend.kind == "rocksdb"
    cut = Cut(CheckpointId(number), None if base is None else CheckpointId(base), canonical=as_rows)
    snapshot = operator.snapshot(cut)
    return [table for state in (*snapshot.states, *snapshot.layer) for table in tables_of(state, layer)]


def _results(operator: KeyedAggregate) -> dict[Any, dict[str, Any]]:
    rows = [row for batch in run(operator, []) for row in batch.to_pylist()]
    return {row.pop("k"): row for row in rows}


def _batch(values: list[Any], data_type: pa.DataType) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(range(len(values)), pa.int64()), "x": pa.array(values, data_type)})


@pytest.fixture(params=["columnar", "incremental", "rocksdb"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> StateBackendOptions:
    """Each way to keep state, for one operator."""
    if request.param == "rocksdb":
        return StateBackendOptions("rocksdb", directory=str(tmp_path), memory_bytes=4 * 1024 * 1024)
    return _INCREMENTAL if request.param == "incremental" else _COLUMNAR


@pytest.mark.parametrize(
    ("before", "after", "values", "more"),
    [
        (pa.int32(), pa.int64(), [1, None, -5], [2**40, 7, None]),
        (pa.uint8(), pa.int64(), [1, None, 255], [-1, 7, None]),
        (pa.float32(), pa.float64(), [1.5, None, -5.0], [0.1, 7.0, None]),
        (pa.int32(), pa.float64(), [1, None, -5], [0.5, 7.25, None]),
    ],
)
def test_wider_columns_go_on_with_what_is_stored(
    options: StateBackendOptions, before: pa.DataType, after: pa.DataType, values: list[Any], more: list[Any]
) -> None:
    """When the input has become wider, sums, extremes and means go on exactly, on every backend; nulls stay nulls."""
    what = {"s": tg.sum("x"), "least": tg.min("x"), "most": tg.max("x"), "n": tg.count("x"), "m": tg.mean("x")}
    first = _opened(_COLUMNAR, **what)
    run(first, [_batch(values, before)], finish=False)
    second = _opened(options, _stored(first), **what)
    run(second, [_batch(more, after)], finish=False)
    expected = {}
    for key, pair in enumerate(zip(values, more, strict=True)):
        known = [value for value in pair if value is not None]
        expected[key] = {
            "s": sum(known) if known else None,
            "least": min(known, default=None),
            "most": max(known, default=None),
            "n": len(known),
            "m": sum(known) / len(known) if known else None,
        }
    assert expected == _results(second)
    (table,) = _stored(second, 2)
    assert after == table.rows.schema.field("least").type
    second.close()


@pytest.mark.parametrize("after", [pa.int32(), pa.int64()])
def test_files_of_a_backend_are_gone_on_with(tmp_path: Path, after: pa.DataType) -> None:
    """Files that RocksDB left are the state at once: also of a snapshot before any batch, and for wider columns."""
    store = open_store(str(tmp_path / "store"))
    what = {"n": tg.count(), "least": tg.min("x")}
    places = [StateBackendOptions("rocksdb", directory=str(tmp_path / f"work-{n}")) for n in range(3)]
    operator = _opened(places[0], **what)
    run(operator, [_batch([1, None, 3], pa.int32())], finish=False)
    for number, place in enumerate(places[1:], start=1):
        native = operator.snapshot(Cut(CheckpointId(number))).native
        assert native is not None
        operator.close()
        kept = write_native(store, f"chk-{number}", native, None)
        assert place.directory is not None
        fetch_native(store, kept, str(Path(place.directory) / "op-uid"))
        operator = _opened(place, **what)
    run(operator, [_batch([-1, 5], after)], finish=False)
    expected = {0: {"n": 2, "least": -1}, 1: {"n": 2, "least": 5}, 2: {"n": 1, "least": 3}}
    assert expected == _results(operator)
    operator.close()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(pa.float64(), pa.int64(), r"s=sum\('x'\): double cannot become int64"), (pa.int64(), pa.int32(), "least")],
)
def test_narrower_columns_are_refused(before: pa.DataType, after: pa.DataType, said: str) -> None:
    """What was stored would not fit: the error names the state, the operator and both types."""
    what = {"s": tg.sum("x"), "least": tg.min("x")}
    first = _opened(_COLUMNAR, **what)
    run(first, [_batch([1, 2], before)], finish=False)
    second = _opened(_COLUMNAR, _stored(first), **what)
    with pytest.raises(OperatorError, match=f"state 'aggregate' of operator 'op-uid'.*{said}"):
        run(second, [_batch([1, 2], after)])


def test_a_sum_that_floats_cannot_hold_is_refused() -> None:
    """An integer sum becomes a float only as long as that is exact."""
    first = _opened(_COLUMNAR, s=tg.sum("x"))
    run(first, [_batch([2**53 + 1], pa.int64())], finish=False)
    second = _opened(_COLUMNAR, _stored(first), s=tg.sum("x"))
    with pytest.raises(OperatorError, match=r"s=sum\('x'\): Integer value \d+ not in range"):
        run(second, [_batch([0.5], pa.float64())])


def test_types_do_not_change_between_two_batches() -> None:
    """Once a batch has come, another type is an error also after a restore: two parts of a program disagree."""
    first = _opened(_COLUMNAR, least=tg.min("x"))
    run(first, [_batch([1], pa.int32())], finish=False)
    second = _opened(_COLUMNAR, _stored(first), least=tg.min("x"))
    run(second, [_batch([1], pa.int32())], finish=False)
    with pytest.raises(OperatorError, match=r"least: int32.*least: int64"):
        run(second, [_batch([1], pa.int64())])


def test_layers_of_before_and_after_a_change_meet() -> None:
    """A base of int32 and a layer of int64 on it, written after the change, are restored as int64."""
    first = _opened(_INCREMENTAL, least=tg.min("x"))
    run(first, [_batch([1, 2, 3], pa.int32())], finish=False)
    base = _stored(first)
    second = _opened(_INCREMENTAL, base, least=tg.min("x"))
    run(second, [_batch([-(2**40)], pa.int64())], finish=False)
    layer = _stored(second, 2, 1, layer=1)
    assert [table.rows.num_rows for table in layer] == [1]
    third = _opened(_INCREMENTAL, [*base, *layer], least=tg.min("x"))
    assert _results(third) == {0: {"least": -(2**40)}, 1: {"least": 2}, 2: {"least": 3}}
    (table,) = _stored(third, 3)
    assert pa.int64() == table.rows.schema.field("least").type


def test_tables_that_cannot_meet_are_refused() -> None:
    """Tables of two former subtasks with types of which none is wider."""
    tables: list[StateTable] = []
    for data_type in (pa.int64(), pa.float32()):
        operator = _opened(_COLUMNAR, least=tg.min("x"))
        run(operator, [pa.record_batch({"k": [len(tables)], "x": pa.array([1], data_type)})], finish=False)
        tables += _stored(operator)
    with pytest.raises(ConfigurationError, match="state 'aggregate' of operator 'op-uid'"):
        _opened(_COLUMNAR, tables, least=tg.min("x"))


_BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(-5, 5)), min_size=1, max_size=8), max_size=6
)


@settings(max_examples=60)
@given(_BATCHES)
def test_layers_add_up(batches: list[list[tuple[int, int | None]]]) -> None:
    """A base and a layer for each batch, each on the one before, restore to what the operator itself has."""
    what = {"n": tg.count(), "s": tg.sum("x"), "most": tg.max("x")}
    operator = _opened(_INCREMENTAL, **what)
    tables: list[StateTable] = []
    for number, rows in enumerate(batches, start=1):
        keys, values = zip(*rows, strict=True)
        batch = pa.record_batch({"k": pa.array(keys, pa.int64()), "x": pa.array(values, pa.int64())})
        run(operator, [batch], finish=False)
        changed = _stored(operator, number, number - 1 or None, layer=number - 1)
        assert set(keys) == {key for table in changed for key in table.rows.column("k").to_pylist()}
        tables += changed
    restored = _opened(_INCREMENTAL, tables, **what)
    assert _results(operator) == _results(restored)
