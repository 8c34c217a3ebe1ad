"""A row, timer or batch for which a process function fails leaves nothing behind but a dead letter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import kept_in
from process_harness import Driven, Row

from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.functions.process_functions import (
    CoProcessFunction,
    ProcessBatchContext,
    ProcessContext,
    ProcessFunction,
)
from tidegate.operators.state.keyed_state import ListState, MapState, ReducingState, ValueState
from tidegate.operators.state.state_types import Pickled
from tidegate.operators.state.ttl import StateTtl
from tidegate.protocol.edges import OutputTag
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError, StorageError

IN = pa.schema([("k", pa.string()), ("ops", pa.list_(pa.int64())), ("fails", pa.bool_())])
OUT = pa.schema([("k", pa.string()), ("seen", pa.string())])
SIDE = OutputTag("side", pa.schema([("op", pa.int64())]))
BAD = error_tag("bad", IN, "process", ("k",))
TTL = StateTtl("1s")


class AllStates(ProcessFunction):
    """Does to all kinds of state what a row lists, shows them all, and then fails if the row says so."""

    def open(self, context: ProcessContext) -> None:
        self.value = context.state(ValueState("value", int))
        self.aging = context.state(ValueState("aging", int, ttl=TTL))
        self.items = context.state(ListState("items", int))
        self.aging_items = context.state(ListState("aging_items", int, ttl=TTL))
        self.entries = context.state(MapState("entries", int, str))
        self.total = context.state(ReducingState("total", lambda a, b: a + b, int))
        self.pickled = context.state(ValueState("pickled", Pickled))
        self.own = context.list_state(ListState("own", int))
        self.rules = context.broadcast_state(MapState("rules", int, int))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        yield self.shown(context)
        for op in row["ops"]:
            self.do(op, context)
            yield self.shown(context)
        if row["fails"]:
            raise ValueError(f"a row of {row['k']}")

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        self.do(timestamp % 97, context)
        yield self.shown(context)

    def do(self, op: int, context: ProcessContext) -> None:
        """One change."""
        kind, number = divmod(op, 4)
        timers = context.timer_service
        changes: list[Any] = [
            lambda: self.value.update(number),
            lambda: self.value.clear(),
            lambda: self.aging.update(number),
            lambda: self.items.add(number),
            lambda: self.items.update([number, number]),
            lambda: self.items.clear(),
            lambda: self.aging_items.add(number),
            lambda: self.entries.put(number, f"{op}"),
            lambda: self.entries.remove(number),
            lambda: self.entries.clear(),
            lambda: self.total.add(number),
            lambda: self.pickled.update({"n": number}),
            lambda: self.own.add(number),
            lambda: self.own.update([number]),
            lambda: self.rules.put(number, op),
            lambda: self.rules.remove(number),
            lambda: context.emit(SIDE, {"op": op}),
            lambda: timers.register_event_time_timer(100 * (number + 1) + op % 3),
            lambda: timers.delete_event_time_timer(100 * (number + 1) + op % 3),
            lambda: timers.register_event_time_timer(10 * number),
        ]
        changes[kind % len(changes)]()

    def shown(self, context: ProcessContext) -> Row:
        """All states as a row."""
        seen = [
            self.value.value(),
            self.aging.value(),
            self.items.get(),
            self.aging_items.get(),
            list(self.entries.items()),
            self.total.get(),
            self.pickled.value(),
            self.own.get(),
            list(self.rules.items()),
        ]
        return {"k": context.current_key["k"], "seen": repr(seen)}


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.sampled_from("ab"),
            "ops": st.lists(st.integers(0, 79), max_size=4),
            "fails": st.booleans(),
        }
    ),
    max_size=12,
)
BACKENDS = ("columnar", "rocksdb", "crowded")


def tables(driven: Driven) -> list[tuple[str, list[Row]]]:
    """All that would be in a checkpoint."""
    from frozen_tables import tables_of
    from operator_harness import CUT

    (operator,) = driven.operators
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    found = [table for state in snapshot.states for table in tables_of(state)]
    return sorted((table.state, sorted(table.rows.to_pylist(), key=repr)) for table in found)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(batches=st.lists(ROWS.filter(bool), min_size=1, max_size=3))
def test_a_row_that_fails_has_never_been(
    tmp_path_factory: pytest.TempPathFactory, backend: str, batches: list[list[Row]]
) -> None:
    """States, order of entries, timers, results and side outputs are those of a run without the rows that fail."""
    folder = tmp_path_factory.mktemp("states")
    full = Driven(
        AllStates(),
        schema=OUT,
        side_outputs=[SIDE],
        errors_to=[BAD],
        backend=kept_in(backend, str(folder / "full")),
    )
    reference = Driven(AllStates(), schema=OUT, side_outputs=[SIDE], backend=kept_in(backend, str(folder / "good")))
    for batch in batches:
        full.rows(*batch, schema=IN)
        if good := [row for row in batch if not row["fails"]]:
            reference.rows(*good, schema=IN)
    assert full.out == reference.out
    assert [row for tag, row in full.aside if tag == "side"] == [row for _, row in reference.aside]
    failed = [row for batch in batches for row in batch if row["fails"]]
    assert [row for tag, row in full.aside if tag == "bad"] == [
        {**row, "error": f"ValueError: a row of {row['k']}"} for row in failed
    ]
    if backend == "columnar" and reference.operators[0]._codec is not None:
        assert tables(full) == tables(reference)
    shown = [{"k": key, "ops": [], "fails": False} for key in "ab"]
    assert full.rows(*shown, schema=IN) == reference.rows(*shown, schema=IN)
    assert full.end() == reference.end()


class OneTimer(AllStates):
    """Does what rows list as timers: each row registers one, and timers that fail are those of rows that fail."""

    def process(self, row: Row, context: ProcessContext) -> None:
        context.timer_service.register_event_time_timer(row["at"])

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        for op in range(timestamp % 80, timestamp % 80 + 9, 4):
            self.do(op, context)
            yield self.shown(context)
        if timestamp % 1_000 >= 500:
            raise ValueError("a timer")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "crowded"])
@settings(max_examples=25, deadline=None)
@given(moments=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1_000, 1_999)), min_size=1, max_size=12))
def test_a_timer_that_fails_has_never_been(
    tmp_path_factory: pytest.TempPathFactory, backend: str, moments: list[tuple[str, int]]
) -> None:
    """It leaves a row with its key and its moment. Timers that it has registered or deleted are as they were."""
    folder = tmp_path_factory.mktemp("timers")
    schema = pa.schema([("k", pa.string()), ("at", pa.int64()), ("more", pa.int64())])
    bad = error_tag("bad", schema, "process", ("k",))
    every = [{"k": key, "at": at, "more": 1} for key, at in moments]
    full = Driven(
        OneTimer(), schema=OUT, side_outputs=[SIDE], errors_to=[bad], backend=kept_in(backend, str(folder / "full"))
    )
    reference = Driven(OneTimer(), schema=OUT, side_outputs=[SIDE], backend=kept_in(backend, str(folder / "good")))
    full.rows(*every, schema=schema)
    if good := [row for row in every if row["at"] % 1_000 < 500]:
        reference.rows(*good, schema=schema)
    for at in (1_300, 1_700, 2_000):
        full.watermark(at)
        reference.watermark(at)
    assert full.out == reference.out
    assert [row for tag, row in full.aside if tag == "side"] == [row for _, row in reference.aside]
    failed = sorted({(at, key) for key, at in moments if at % 1_000 >= 500})
    assert sorted((row["error"], row["k"], row["at"], row["more"]) for tag, row in full.aside if tag == "bad") == [
        (f"timer at {at}: ValueError: a timer", key, None, None) for at, key in failed
    ]


class Sums(ProcessFunction):
    """Adds up by the batch, registers a timer for each key, and fails for a batch with a bad row or timer."""

    def open(self, context: ProcessContext) -> None:
        self.total = context.state(ValueState("total", int))
        self.aging = context.state(ValueState("aging", int, ttl=TTL))
        self.items = context.state(ListState("items", int))

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> pa.RecordBatch:
        for row, x in enumerate(batch["x"].to_pylist()):
            context.choose_key(row)
            self.total.update((self.total.value() or 0) + x)
            self.items.add(x)
        groups = context.groups()
        self.aging.put_many(self.total.get_many(groups), groups)
        context.timer_service.register_many(1_000, groups)
        if 13 in batch["x"].to_pylist():
            raise ValueError("13")
        return batch.select(["k", "x"])

    def on_timer_batch(self, keys: pa.RecordBatch, context: ProcessBatchContext) -> pa.RecordBatch:
        totals = self.total.get_many()
        self.total.clear_many()
        if "b" in keys["k"].to_pylist():
            raise ValueError("b")
        return pa.record_batch([keys["k"], totals], names=["k", "x"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_that_fails_is_halved(tmp_path: Path, backend: str) -> None:
    """Its good rows count once; a timer that fails by the batch leaves its state as it was."""
    schema = pa.schema([("k", pa.string()), ("x", pa.int64())])
    driven = Driven(
        Sums(), schema=schema, errors_to=[error_tag("bad", schema, "process", ("k",))],
        backend=kept_in(backend, str(tmp_path)),
    )  # fmt: skip
    rows = [("a", 1), ("b", 2), ("a", 13), ("c", 4), ("b", 5), ("c", 13), ("a", 7)]
    driven.rows(*[{"k": k, "x": x} for k, x in rows], schema=schema)
    assert [(row["k"], row["x"]) for row in driven.out] == [(k, x) for k, x in rows if x != 13]
    assert [(row["k"], row["x"], row["error"]) for _, row in driven.aside] == [
        ("a", 13, "ValueError: 13"),
        ("c", 13, "ValueError: 13"),
    ]
    assert driven.watermark(1_000) == [{"k": "a", "x": 8}, {"k": "c", "x": 4}]
    assert driven.aside[2:] == [("bad", {"k": "b", "x": None, "error": "timer at 1000: ValueError: b"})]
    if backend != "columnar":
        return  # The tables of the others are files.
    left = {table.state: table.rows.to_pylist() for table in driven.snapshot()}
    assert left["total"] == [{"k": "b", "total": 7}]
    assert sorted((row["k"], row["items"]) for row in left["items"]) == [("a", [1, 7]), ("b", [2, 5]), ("c", [4])]


def test_results_that_do_not_fit_fail_their_row_alone() -> None:
    """Also rows that are emitted aside."""

    class Wrong(ProcessFunction):
        def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
            context.emit(SIDE, {"op": "x" if "aside" in row["ops"] else 1})
            yield {"k": row["k"], "seen": 1 if "result" in row["ops"] else "s"}

    schema = pa.schema([("k", pa.string()), ("ops", pa.list_(pa.string()))])
    driven = Driven(Wrong(), schema=OUT, side_outputs=[SIDE], errors_to=[error_tag("bad", schema, "process", ("k",))])
    driven.rows(*[{"k": "a", "ops": [op]} for op in ("good", "aside", "result", "good")], schema=schema)
    assert len(driven.out) == 2
    assert [row["op"] for tag, row in driven.aside if tag == "side"] == [1, 1]
    failed = [row["error"] for tag, row in driven.aside if tag == "bad"]
    assert ["column 'op'" in failed[0], "column 'seen'" in failed[1]] == [True, True]


class Joined(CoProcessFunction):
    """Fails for rows of either side."""

    def process1(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        yield {"k": row["k"], "seen": str(1 // row["x"])}

    def process2(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        yield {"k": row["id"], "seen": str(1 // row["y"])}


def test_each_of_two_streams_has_its_own() -> None:
    """Or none: then its rows fail the job."""
    first, second = (pa.schema([(k, pa.string()), (v, pa.int64())]) for k, v in (("k", "x"), ("id", "y")))
    tags = error_tag("one", first, "p", ("k",)), error_tag("two", second, "p", ("id",))
    driven = Driven(Joined(), (("k",), ("id",)), schema=OUT, errors_to=tags)
    driven.rows({"k": "a", "x": 0}, {"k": "a", "x": 1}, schema=first)
    driven.rows({"id": "a", "y": 1}, {"id": "a", "y": 0}, schema=second, input_index=1)
    assert len(driven.out) == 2
    assert [(tag, row) for tag, row in driven.aside] == [
        ("one", {"k": "a", "x": 0, "error": "ZeroDivisionError: integer division or modulo by zero"}),
        ("two", {"id": "a", "y": 0, "error": "ZeroDivisionError: integer division or modulo by zero"}),
    ]
    half = Driven(Joined(), (("k",), ("id",)), schema=OUT, errors_to=(tags[0], None))
    with pytest.raises(OperatorError, match="ZeroDivisionError"):
        half.rows({"id": "a", "y": 0}, schema=second, input_index=1)


def test_a_fault_that_is_not_the_rows_fails_the_job() -> None:
    """What storage raises is no dead letter."""

    class Broken(AllStates):
        def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
            raise StorageError("the disk is gone")

    driven = Driven(Broken(), schema=OUT, errors_to=[BAD])
    with pytest.raises(OperatorError, match="the disk is gone"):
        driven.rows({"k": "a", "ops": [], "fails": False}, schema=IN)

    driven = Driven(AllStates(), schema=OUT, side_outputs=[SIDE], errors_to=[BAD])

    def gone(ref: object) -> object:
        raise OSError("no such database")

    driven.operators[0].function.value._internal._internal.get = gone  # type: ignore[attr-defined]
    with pytest.raises(OperatorError, match="no such database"):
        driven.rows({"k": "a", "ops": [], "fails": False}, schema=IN)


def test_what_is_refused() -> None:
    """Without a schema it is not known which results fit."""
    with pytest.raises(ConfigurationError, match="errors_to= needs schema="):
        Driven(AllStates(), errors_to=[BAD])
    with pytest.raises(ConfigurationError, match="two side outputs are called 'bad'"):
        Driven(AllStates(), schema=OUT, side_outputs=[OutputTag("bad", OUT)], errors_to=[BAD])
