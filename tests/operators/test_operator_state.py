"""Operator state of process functions: what it keeps, what a snapshot holds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from operator_harness import context

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.state.keyed_state import ListState, MapState, ValueState
from tidegate.operators.state.operator_state import BroadcastState, OperatorListState
from tidegate.operators.state.state_types import Pickled
from tidegate.operators.state.ttl import StateTtl
from tidegate.protocol.failures import OperatorError
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.state_file import read_state, verify_state, write_state

NUMBERS = pa.schema([("numbers", pa.int64())])
POINT = pa.struct({"x": pa.int64()})


class Opens(ProcessFunction):
    """Does in `open` what a test says."""

    def __init__(self, opens: Callable[[ProcessContext], Any]) -> None:
        self._opens = opens
        self.bound: Any = None

    def open(self, context: ProcessContext) -> None:
        self.bound = self._opens(context)

    def process(self, row: dict[str, Any], context: ProcessContext) -> None:
        """Nothing."""


class Opened:
    """A function that is open in the only subtask; `bound` is what its `open` made."""

    def __init__(
        self,
        opens: Callable[[ProcessContext], Any],
        restored: Sequence[StateTable] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        self._operator = ProcessOperator(Opens(opens), (keys,))
        self._operator.open(context(), restored)
        function = self._operator.function
        assert isinstance(function, Opens)
        self.bound = function.bound

    def freeze(self) -> tuple[FrozenState, ...] | None:
        """What a snapshot takes."""
        snapshot = self._operator.snapshot(Cut(CheckpointId(1)))
        return None if snapshot is None else snapshot.states


def tables(frozen: Iterable[FrozenState] | None) -> list[StateTable]:
    """What is written of a snapshot."""
    assert frozen is not None
    return [StateTable(state.state, state.kind, chunk.rows) for state in frozen for chunk in state.chunks()]


def numbers(*values: int, kind: StateKind = StateKind.LIST, state: str = "numbers") -> StateTable:
    """A stored list."""
    return StateTable(state, kind, pa.record_batch({state: pa.array(values, pa.int64())}))


def bind_list(context: ProcessContext) -> OperatorListState:
    """A list called numbers."""
    return context.list_state(ListState("numbers", pa.int64()))


def bind_union(context: ProcessContext) -> OperatorListState:
    """A union list called numbers."""
    return context.union_list_state(ListState("numbers", pa.int64()))


def bind_broadcast(context: ProcessContext) -> BroadcastState:
    """A broadcast map called rules."""
    return context.broadcast_state(MapState("rules", pa.string(), POINT))


@pytest.mark.parametrize(("bind", "kind"), [(bind_list, StateKind.LIST), (bind_union, StateKind.UNION)])
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["no keys", "keyed"])
def test_a_list_is_stored_as_a_column_with_its_name(
    bind: Callable[[ProcessContext], OperatorListState], kind: StateKind, keys: tuple[str, ...]
) -> None:
    """A row an element, in order; with keys and without."""
    opened = Opened(bind, keys=keys)
    opened.bound.add(3)
    opened.bound.add_all([1, 2])
    assert len(opened.bound) == 3

    (table,) = tables(opened.freeze())
    assert ("numbers", kind) == (table.state, table.kind)
    assert pa.record_batch({"numbers": pa.array([3, 1, 2], pa.int64())}) == table.rows
    assert Opened(bind, [table], keys).bound.get() == [3, 1, 2]


def test_a_broadcast_map_is_stored_as_keys_and_values() -> None:
    """A row an entry; what is restored has the same entries in the same order."""
    opened = Opened(bind_broadcast)
    opened.bound.put_all({"b": {"x": 1}, "a": {"x": 2}, "c": {"x": 3}})
    opened.bound.put("c", None)

    (table,) = tables(opened.freeze())
    assert (table.state, table.kind) == ("rules", StateKind.BROADCAST)
    assert pa.schema([("key", pa.string()), ("value", POINT)]) == table.rows.schema
    restored = Opened(bind_broadcast, [table]).bound
    assert list(restored.items()) == [("b", {"x": 1}), ("a", {"x": 2})]
    assert (list(restored.keys()), list(restored.values())) == (["b", "a"], [{"x": 1}, {"x": 2}])
    assert (restored.get("a"), restored.get("c"), "b" in restored, "c" in restored) == ({"x": 2}, None, True, False)


@dataclass
class Limit:
    """A type of the program's own."""

    name: str
    amounts: list[float]


def test_values_of_python_types_come_back_as_such() -> None:
    """Dataclasses rest as structs; what is pickled is marked, and not taken for anything else."""

    def opens(context: ProcessContext) -> tuple[OperatorListState, BroadcastState]:
        return context.list_state(ListState("limits", Limit)), context.broadcast_state(MapState("any", str, Pickled))

    opened = Opened(opens)
    opened.bound[0].add(Limit("a", [1.5]))
    opened.bound[1].put("s", {1, 2})
    stored = tables(opened.freeze())

    assert stored[0].rows.schema.field(0).type == pa.struct({"name": pa.string(), "amounts": pa.list_(pa.float64())})
    limits, anything = Opened(opens, stored).bound
    assert (limits.get(), anything.get("s")) == ([Limit("a", [1.5])], {1, 2})
    with pytest.raises(ConfigurationError, match=r"state 'any'.*pickled"):
        Opened(lambda c: c.broadcast_state(MapState("any", str, bytes)), stored[1:])


def test_stored_values_become_those_of_a_wider_type() -> None:
    """In lists and in both columns of a map, also within structs."""
    narrow = pa.struct({"x": pa.int16()})
    stored = [
        StateTable("numbers", StateKind.LIST, pa.record_batch({"numbers": pa.array([1, 2], pa.int32())})),
        StateTable(
            "rules", StateKind.BROADCAST, pa.record_batch({"key": ["a"], "value": pa.array([{"x": 7}], narrow)})
        ),
    ]
    found, rules = Opened(lambda context: (bind_list(context), bind_broadcast(context)), stored).bound

    assert (found.get(), dict(rules.items())) == ([1, 2], {"a": {"x": 7}})


def test_what_changes_after_the_freeze_does_not_show() -> None:
    """Lists that grow, are replaced or cleared; maps in which entries are set and removed."""
    changes: list[Callable[[OperatorListState], object]] = [
        lambda state: state.add(9),
        lambda state: state.update([9]),
        lambda state: state.clear(),
    ]
    for change in changes:
        opened = Opened(bind_list, [numbers(1, 2)])
        before, _ = opened.freeze(), change(opened.bound)
        assert [numbers(1, 2)] == tables(before)
        assert opened.bound.get() in ([1, 2, 9], [9], [])

    of_map: list[Callable[[BroadcastState], object]] = [
        lambda state: state.put("a", {"x": 9}),
        lambda state: state.put("z", {"x": 9}),
        lambda state: state.remove("a"),
        lambda state: state.clear(),
    ]
    for alter in of_map:
        rules = Opened(bind_broadcast)
        rules.bound.put("a", {"x": 1})
        first = rules.freeze()
        alter(rules.bound)
        altered = dict(rules.bound.items())
        second = rules.freeze()
        rules.bound.put("later", {"x": 0})
        assert [table.rows.to_pylist() for table in tables(first)] == [[{"key": "a", "value": {"x": 1}}]]
        assert altered == {row["key"]: row["value"] for table in tables(second) for row in table.rows.to_pylist()}


def test_a_long_list_is_written_in_pieces() -> None:
    """No piece is large, and all are restored as one list."""
    opened = Opened(bind_list)
    opened.bound.add_all(range(150_000))

    pieces = tables(opened.freeze())
    assert len(pieces) > 1
    assert max(piece.rows.num_rows for piece in pieces) <= 65_536
    assert list(range(150_000)) == Opened(bind_list, pieces).bound.get()


def test_open_sees_what_was_restored() -> None:
    """So that a function can build on it there, and keep of a union what is its part."""

    def opens(context: ProcessContext) -> tuple[list[int], OperatorListState]:
        state = bind_union(context)
        seen = state.get()
        state.update(seen[:1])
        return seen, state

    opened = Opened(opens, [numbers(5, 6, kind=StateKind.UNION), numbers(7, kind=StateKind.UNION)])

    assert opened.bound[0] == [5, 6, 7]
    assert [numbers(5, kind=StateKind.UNION)] == tables(opened.freeze())


def test_an_empty_union_list_is_stored_all_the_same(tmp_path: Path) -> None:
    """The coordinator has to know of it; of the other kinds nothing is stored where there is nothing."""
    store = open_store(str(tmp_path))
    for bind, kinds in [(bind_union, [StateKind.UNION]), (bind_list, []), (bind_broadcast, [])]:
        frozen = Opened(bind).freeze()
        assert frozen is not None
        handle = write_state(store, "state", [(OperatorUid("op"), state) for state in frozen])
        assert kinds == ([] if handle is None else [section.kind for section in handle.sections])
        if handle is not None:
            verify_state(store, handle)
            assert read_state(store, handle, OperatorUid("op")) == []


def test_a_function_without_state_takes_no_part_in_snapshots() -> None:
    """As before there was operator state."""
    assert Opened(lambda context: None).freeze() is None


def test_nested_values_are_handed_out_as_copies() -> None:
    """Who changes what was handed out changes nothing that is kept."""
    points = Opened(lambda context: context.list_state(ListState("points", POINT))).bound
    points.add({"x": 1})
    points.get()[0]["x"] = 2
    rules = Opened(bind_broadcast).bound
    rules.put("a", {"x": 1})
    rules.get("a")["x"] = 2
    next(rules.values())["x"] = 2

    assert (points.get(), rules.get("a")) == ([{"x": 1}], {"x": 1})


@pytest.mark.parametrize("wrong", [None, "a", 1.5, 2**63])
def test_values_of_another_type_are_refused(wrong: object) -> None:
    """There and then, and nothing of what came with them is kept."""
    state = Opened(bind_list).bound
    for add in (lambda: state.add_all([1, wrong]), lambda: state.update([1, wrong])):
        with pytest.raises(TypeError, match="state 'numbers' keeps int64"):
            add()
    assert state.get() == []


@pytest.mark.parametrize(
    ("opens", "message"),
    [
        (lambda c: (bind_list(c), bind_union(c)), "two states of the operator are named 'numbers'"),
        (
            lambda c: (bind_list(c), c.state(ValueState("numbers", pa.int64()))),
            "two states of the operator are named 'numbers'",
        ),
        (
            lambda c: (c.state(ValueState("numbers", pa.int64())), bind_list(c)),
            "two states of the operator are named 'numbers'",
        ),
        (
            lambda c: c.list_state(ListState("_tidegate_timers", pa.int64())),
            "'_tidegate_timers': names that begin with '_tidegate_' are reserved",
        ),
        (lambda c: c.list_state(ListState("x", int, ttl=StateTtl("1h"))), "only keyed state has a time to live"),
        (lambda c: c.list_state(ValueState("x", pa.int64())), r"list_state takes a tg\.ListState"),
        (lambda c: c.broadcast_state(ListState("x", pa.int64())), r"broadcast_state takes a tg\.MapState"),
    ],
)
def test_states_that_cannot_be_bound_are_refused(opens: Callable[[ProcessContext], Any], message: str) -> None:
    """Names are unique among all states of an operator, and the declaration must fit."""
    with pytest.raises(ConfigurationError, match=message):
        Opened(opens, keys=("k",))


def test_a_state_is_bound_in_open_only() -> None:
    """Later it would be too late for what was restored."""
    kept: list[ProcessContext] = []
    Opened(kept.append)
    with pytest.raises(ConfigurationError, match=r"state 'numbers' is bound too late: call context.list_state"):
        bind_list(kept[0])


@pytest.mark.parametrize(
    ("bind", "table", "error", "message"),
    [
        (lambda c: None, numbers(1), ConfigurationError, r"has a list state 'numbers' that the function does not bind"),
        (bind_union, numbers(1), ConfigurationError, r"was stored as list state and is bound with .*union_list_state"),
        (
            lambda c: c.list_state(ListState("numbers", pa.string())),
            numbers(1),
            ConfigurationError,
            r"state 'numbers' of operator 'op-uid'.*int64.*string",
        ),
        (
            bind_broadcast,
            StateTable(
                "rules",
                StateKind.BROADCAST,
                pa.record_batch({"key": ["a", "a"], "value": pa.array([{"x": 1}, {"x": 2}], POINT)}),
            ),
            CorruptionError,
            "broadcast state 'rules' holds the key .'a'. twice",
        ),
    ],
)
def test_stored_states_that_do_not_fit_are_refused(
    bind: Callable[[ProcessContext], Any],
    table: StateTable,
    error: type[Exception],
    message: str,
) -> None:
    """With the name of the state, and what to do."""
    with pytest.raises(error, match=message) as raised:
        Opened(bind, [table])
    assert not isinstance(raised.value, OperatorError)
