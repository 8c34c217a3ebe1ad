"""The broadcast pattern in one or several subtasks: who may change what, and which keys are gone through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from operator_harness import context

from tidegate.operators.functions.process_functions import (
    BaseProcessFunction,
    BroadcastContext,
    BroadcastProcessFunction,
    KeyedBroadcastProcessFunction,
    ProcessContext,
)
from tidegate.operators.functions.process_operator import BroadcastProcessOperator
from tidegate.operators.state.keyed_state import ListState, MapState, ValueState
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

Row = dict[str, Any]
COLUMNAR = StateBackendOptions()
KEYED_SIDE, BROADCAST_SIDE = 0, 1


class Driven:
    """A function of the broadcast pattern in the only subtask."""

    def __init__(
        self,
        function: BaseProcessFunction,
        keys: tuple[str, ...] = ("k",),
        restored: Sequence[StateTable] = (),
        backend: StateBackendOptions = COLUMNAR,
    ) -> None:
        self._operator = BroadcastProcessOperator(function, (keys, ()), ("t", "t"))
        self._operator.open(replace(context(), backend=backend), restored)

    def rows(self, side: int, *rows: Row) -> list[Row]:
        """Process rows of one side; what came of it."""
        found: list[pa.RecordBatch] = []
        self._operator.process_input(side, pa.RecordBatch.from_pylist(list(rows)), found.append)
        return [row for batch in found for row in batch.to_pylist()]

    def watermark(self, watermark_ms: int = MAX_WATERMARK_MS) -> list[Row]:
        """Event time advances."""
        found: list[pa.RecordBatch] = []
        list(self._operator.advance_watermark(watermark_ms, found.append))
        return [row for batch in found for row in batch.to_pylist()]

    def finish(self) -> None:
        """The input ends."""
        list(self._operator.finish(lambda batch: None))

    def close(self) -> None:
        """It is over."""
        self._operator.close()

    def snapshot(self) -> list[StateTable]:
        """What is stored."""
        snapshot = self._operator.snapshot(Cut(CheckpointId(1)))
        assert snapshot is not None
        return [
            StateTable(state.state, state.kind, chunk.rows)
            for state in (*snapshot.states, *snapshot.layer)
            for chunk in state.chunks()
        ]


class Limits(KeyedBroadcastProcessFunction):
    """Tells the rows of a key that are over the limit, and how many there were; limits come by broadcast."""

    def open(self, context: ProcessContext) -> None:
        self.limits = context.broadcast_state(MapState("limits", pa.string(), pa.int64()))
        self.seen = context.state(ValueState("seen", pa.int64()))
        self.over = context.state(ValueState("over", pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        self.seen.update((self.seen.value() or 0) + 1)
        over = [name for name, limit in self.limits.items() if row["x"] > limit]
        if over:
            self.over.update((self.over.value() or 0) + 1)
            context.timer_service.register_event_time_timer(100)
            yield {**context.current_key, "over": ",".join(over)}

    def process_broadcast(self, row: Row, context: BroadcastContext) -> Iterator[Row]:
        self.limits.put(row["name"], row["limit"])
        if row["limit"] is None:
            counts: list[Row] = []

            def forget(key: Row, state: ValueState) -> None:
                counts.append({**key, "over": f"{state.value()} of {self.seen.value()}"})
                state.clear()

            context.apply_to_keyed_state(self.over, forget)
            yield from counts

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        yield {**context.current_key, "over": f"{self.over.value()} at {sorted(self.limits.keys())}"}


def test_rows_meet_what_was_broadcast_before_them() -> None:
    """Rules come, change and go; rows and timers of every key see those that are there."""
    driven = Driven(Limits())

    assert driven.rows(KEYED_SIDE, {"k": 1, "x": 50}) == []
    assert driven.rows(BROADCAST_SIDE, {"name": "a", "limit": 10}, {"name": "b", "limit": 40}) == []
    assert driven.rows(KEYED_SIDE, {"k": 1, "x": 50}, {"k": 2, "x": 20}, {"k": 3, "x": 5}) == [
        {"k": 1, "over": "a,b"},
        {"k": 2, "over": "a"},
    ]
    assert driven.rows(BROADCAST_SIDE, {"name": "b", "limit": 60}) == []
    assert driven.rows(KEYED_SIDE, {"k": 1, "x": 50}) == [{"k": 1, "over": "a"}]
    assert driven.watermark(100) == [{"k": 1, "over": "2 at ['a', 'b']"}, {"k": 2, "over": "1 at ['a', 'b']"}]


def test_the_broadcast_side_goes_through_all_keys_that_have_a_state() -> None:
    """Also after a restore; keys without that state are left out, and each is the current key in its turn."""
    driven = Driven(Limits())
    driven.rows(BROADCAST_SIDE, {"name": "a", "limit": 10})
    driven.rows(KEYED_SIDE, *({"k": k, "x": x} for k, x in [(1, 20), (1, 5), (2, 30), (3, 1)]))
    restored = Driven(Limits(), restored=driven.snapshot())

    for side in (driven, restored):
        told = side.rows(BROADCAST_SIDE, {"name": "a", "limit": None})
        assert sorted(told, key=lambda row: row["k"]) == [{"k": 1, "over": "1 of 2"}, {"k": 2, "over": "1 of 1"}]
        assert side.rows(BROADCAST_SIDE, {"name": "a", "limit": None}) == []
        assert side.rows(KEYED_SIDE, {"k": 1, "x": 20}) == []


class Doubles(KeyedBroadcastProcessFunction):
    """Changes the state of all keys, a part of them away, and gives each another state."""

    def open(self, context: ProcessContext) -> None:
        self.x = context.state(ValueState("x", pa.int64()))
        self.had = context.state(ListState("had", pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        if row["x"] is None:
            yield {"k": row["k"], "x": self.x.value(), "had": self.had.get()}
        else:
            self.x.update(row["x"])

    def process_broadcast(self, row: Row, context: BroadcastContext) -> None:
        def double(key: Row, state: ValueState) -> None:
            self.had.add(state.value())
            state.update(2 * state.value() if key["k"] % 3 else None)

        context.apply_to_keyed_state(self.x, double)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["columnar", "rocksdb"])
def test_many_keys_can_be_changed_while_they_are_gone_through(
    tmp_path: Path, kind: Literal["columnar", "rocksdb"]
) -> None:
    """Every key comes once, whatever is done to it and however many batches of keys there are, on every backend."""
    backend = StateBackendOptions(kind=kind, directory=str(tmp_path))
    driven = Driven(Doubles(), backend=backend)
    keys = range(10_000)
    driven.rows(KEYED_SIDE, *({"k": k, "x": k} for k in keys))
    driven.rows(BROADCAST_SIDE, {"name": "double"}, {"name": "double"})
    told = driven.rows(KEYED_SIDE, *({"k": k, "x": None} for k in keys))
    driven.close()

    assert told == [{"k": k, "x": 4 * k, "had": [k, 2 * k]} if k % 3 else {"k": k, "x": None, "had": [k]} for k in keys]


def test_both_kinds_of_state_are_in_a_snapshot_even_before_the_first_key() -> None:
    """Broadcast state is not keyed: it is stored as such, and does not wait for a key."""
    driven = Driven(Limits())
    driven.rows(BROADCAST_SIDE, {"name": "a", "limit": 10})
    assert [(table.state, table.kind) for table in driven.snapshot()] == [("limits", StateKind.BROADCAST)]

    driven.rows(KEYED_SIDE, {"k": 1, "x": 50})
    assert {
        ("limits", StateKind.BROADCAST),
        ("seen", StateKind.KEYED),
        ("over", StateKind.KEYED),
        ("_tidegate_timers", StateKind.KEYED),
    } == {(table.state, table.kind) for table in driven.snapshot()}


class Does(KeyedBroadcastProcessFunction):
    """Calls what a test says in one of its methods."""

    def __init__(self, method: str, does: Callable[[Does, ProcessContext], Any]) -> None:
        self._method, self._does = method, does

    def open(self, context: ProcessContext) -> None:
        self.rules = context.broadcast_state(MapState("rules", pa.string(), pa.int64()))
        self.count = context.state(ValueState("count", pa.int64()))
        self._do("open", context)

    def process(self, row: Row, context: ProcessContext) -> None:
        self.count.update(1)
        context.timer_service.register_event_time_timer(1)
        self._do("process", context)

    def process_broadcast(self, row: Row, context: BroadcastContext) -> None:
        self._do("process_broadcast", context)

    def on_timer(self, timestamp: int, context: ProcessContext) -> None:
        self._do("on_timer", context)

    def finish(self, context: ProcessContext) -> None:
        self._do("finish", context)

    def _do(self, method: str, context: ProcessContext) -> None:
        if method == self._method:
            self._does(self, context)


def run(function: Does) -> list[StateTable]:
    """Everything that happens to a function."""
    driven = Driven(function)
    driven.rows(BROADCAST_SIDE, {"name": "a"})
    driven.rows(KEYED_SIDE, {"k": 1})
    driven.rows(BROADCAST_SIDE, {"name": "b"})
    driven.watermark()
    driven.finish()
    return driven.snapshot()


WRITES: dict[str, Callable[[Does, ProcessContext], Any]] = {
    "put": lambda f, c: f.rules.put("a", 1),
    "put_all": lambda f, c: f.rules.put_all({"a": 1}),
    "put nothing": lambda f, c: f.rules.put("a", None),
    "remove": lambda f, c: f.rules.remove("a"),
    "clear": lambda f, c: f.rules.clear(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("method", ["process", "on_timer", "finish"])
def test_broadcast_state_is_read_only_where_subtasks_differ(method: str, write: str) -> None:
    """Every way to change it raises, also where it would change nothing."""
    with pytest.raises(TidegateError, match="broadcast state 'rules' is read-only here: only process_broadcast"):
        run(Does(method, WRITES[write]))


@pytest.mark.parametrize("method", ["open", "process_broadcast"])
def test_broadcast_state_is_changed_where_subtasks_do_the_same(method: str) -> None:
    """In what every subtask is called with."""
    (rules,) = (table for table in run(Does(method, WRITES["put"])) if table.state == "rules")
    assert rules.rows.to_pylist() == [{"key": "a", "value": 1}]


@pytest.mark.parametrize(
    "does",
    [
        lambda f, c: f.count.value(),
        lambda f, c: c.timer_service.register_event_time_timer(1),
        lambda f, c: c.current_key,
    ],
    ids=["state", "timer", "key"],
)
def test_the_broadcast_side_has_no_key(does: Callable[[Does, ProcessContext], Any]) -> None:
    """Keyed state, timers and the key itself are refused there."""
    with pytest.raises(OperatorError, match=r"is kept per key: .* nor in process_broadcast"):
        run(Does("process_broadcast", does))


@pytest.mark.parametrize("method", ["open", "process", "on_timer", "finish"])
def test_only_the_broadcast_side_goes_through_all_keys(method: str) -> None:
    """Elsewhere it would be too much for a row of one key."""
    with pytest.raises(TidegateError, match="call it only in process_broadcast"):
        run(Does(method, lambda f, c: c.apply_to_keyed_state(f.count, lambda key, state: None)))  # type: ignore[attr-defined]


def test_a_state_that_is_only_declared_cannot_be_gone_through() -> None:
    """It must be what `context.state` returned."""
    declared = ValueState("count", pa.int64())
    with pytest.raises(OperatorError, match="state 'count' is declared but not bound"):
        run(Does("process_broadcast", lambda f, c: c.apply_to_keyed_state(declared, lambda key, state: None)))  # type: ignore[attr-defined]


def test_keys_can_be_given_timers_while_they_are_gone_through() -> None:
    """Each is the current key in its turn, for everything; after that there is none."""
    fired: list[Row] = []

    class Wakes(Does):
        """Wakes all keys."""

        def on_timer(self, timestamp: int, context: ProcessContext) -> None:
            fired.append({**context.current_key, "at": timestamp})

    def wake(f: Does, c: ProcessContext) -> None:
        assert isinstance(c, BroadcastContext)
        c.apply_to_keyed_state(f.count, lambda key, state: c.timer_service.register_event_time_timer(500 + key["k"]))
        with pytest.raises(TidegateError, match="the current key is kept per key"):
            _ = c.current_key

    driven = Driven(Wakes("process_broadcast", wake))
    driven.rows(KEYED_SIDE, {"k": 2}, {"k": 1})
    driven.rows(BROADCAST_SIDE, {"name": "a"})
    driven.watermark(499)
    driven.watermark(600)

    assert fired == [{"k": 1, "at": 1}, {"k": 2, "at": 1}, {"k": 1, "at": 501}, {"k": 2, "at": 502}]


class Tags(BroadcastProcessFunction):
    """Adds the newest tag to rows without a key."""

    def open(self, context: ProcessContext) -> None:
        self.tags = context.broadcast_state(MapState("tags", pa.int8(), pa.string()))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        yield {**row, "tag": self.tags.get(0)}
        if row["x"] < 0:
            self.tags.clear()

    def process_broadcast(self, row: Row, context: BroadcastContext) -> None:
        self.tags.put(0, row["tag"])
        if row["tag"] == "all":
            context.apply_to_keyed_state(ValueState("x", pa.int64()), lambda key, state: None)


def test_a_stream_without_keys_meets_what_was_broadcast() -> None:
    """The same rules, but for those that speak of keys."""
    driven = Driven(Tags(), keys=())
    driven.rows(BROADCAST_SIDE, {"tag": "old"})
    restored = Driven(Tags(), keys=(), restored=driven.snapshot())

    assert restored.rows(KEYED_SIDE, {"x": 1}) == [{"x": 1, "tag": "old"}]
    restored.rows(BROADCAST_SIDE, {"tag": "new"})
    assert restored.rows(KEYED_SIDE, {"x": 2}) == [{"x": 2, "tag": "new"}]
    with pytest.raises(OperatorError, match="broadcast state 'tags' is read-only here"):
        restored.rows(KEYED_SIDE, {"x": -1})
    with pytest.raises(
        OperatorError, match=r"call it only in process_broadcast of a tg\.KeyedBroadcastProcessFunction"
    ):
        restored.rows(BROADCAST_SIDE, {"tag": "all"})
