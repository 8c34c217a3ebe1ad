"""Operator state, which belongs to a subtask and not to a key: lists, union lists, and broadcast maps.

`ProcessContext` binds them. Rules:

- A state is declared like a keyed state (`ListState`, `MapState`) and bound in `open`. It contains its restored
  elements as soon as it is bound.
- The kind of a list decides which elements a subtask gets at a restore. With LIST it gets its own elements if the
  parallelism is unchanged, and else a share of all elements. With UNION it gets the elements of all subtasks.
- A broadcast map is equal in every subtask, because all subtasks change it in the same way. At a restore all subtasks
  start with the stored map of one subtask.
- A state is written completely with every checkpoint, with its types: a list as one column with its name, a map as the
  columns `key` and `value`.
- A snapshot only takes references. Lists only grow in place, so elements in a snapshot do not change. A map is copied
  before its first change after a snapshot.
- A union list is in the snapshot even when it is empty, so that the coordinator sees it. The coordinator takes no
  checkpoint while only some of the subtasks have finished, because their elements would be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tidegate.operators.state.keyed_state import KeyedState, ListState, MapEntries, MapState, StateNames
from tidegate.operators.state.state_types import check_serializers, one_nan
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.arrow_types import widened
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.snapshot import FrozenState, StateChunk, StateTable
from tidegate.storage.user_values import value_text

KEY, VALUE = "key", "value"
"""Names of the columns of a stored broadcast map."""

_CHUNK_ROWS = 65_536

_BOUND_BY = {
    StateKind.KEYED: "state",
    StateKind.LIST: "list_state",
    StateKind.UNION: "union_list_state",
    StateKind.BROADCAST: "broadcast_state",
}


@dataclass(frozen=True, slots=True)
class FrozenOperatorState:
    """A snapshot of an operator state: the first `rows` entries of `columns`, which do not change any more."""

    state: str
    kind: StateKind
    schema: pa.Schema
    columns: tuple[Sequence[Any], ...] | Mapping[Any, Any]
    rows: int
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows of the snapshot in batches of bounded size."""
        held = self.columns
        columns = (list(held), list(held.values())) if isinstance(held, Mapping) else held
        for start in range(0, self.rows, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, self.rows)
            arrays = [
                pa.array(column[start:stop], type=field.type)
                for column, field in zip(columns, self.schema, strict=True)
            ]
            yield StateChunk(pa.RecordBatch.from_arrays(arrays, schema=self.schema))


class OperatorListState:
    """A list that belongs to one subtask. Made by `context.list_state` and `context.union_list_state`."""

    def __init__(self, declared: ListState, kind: StateKind) -> None:
        self.name = declared.name
        self._kind = kind
        self._typed = declared._typed
        self._values: list[Any] = []

    def get(self) -> list[Any]:
        """Returns a copy of the list."""
        return list(self._values) if self._typed.plain else [self._typed.handed_out(value) for value in self._values]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any) -> None:
        """Appends a value to the list. Raises TypeError if it is None or not of the declared type."""
        self.add_all((value,))

    def add_all(self, values: Iterable[Any]) -> None:
        """Appends values to the list.

        Raises TypeError, and appends nothing, if a value is None or not of the declared type.
        """
        self._values.extend([self._typed.taken(value) for value in values])

    def update(self, values: Iterable[Any]) -> None:
        """Replaces all values of the list."""
        self._values = [self._typed.taken(value) for value in values]

    def clear(self) -> None:
        """Removes all values from the list."""
        self._values = []

    def mark(self) -> tuple[list[Any], int]:
        """Returns a copy of the current values, to which `back_to` can return."""
        return self._values, len(self._values)

    def back_to(self, mark: tuple[list[Any], int]) -> None:
        """Undoes the changes that were made after the call of `mark` that returned `mark`."""
        self._values, count = mark
        del self._values[count:]

    def load(self, table: StateTable) -> None:
        """Appends the elements of a stored table, which already has the declared type."""
        self._values.extend(one_nan(value) for value in table.rows.column(0).to_pylist())

    def freeze(self) -> FrozenState | None:
        """Returns a snapshot of the list. None if a list that is not a union list is empty."""
        if not self._values and self._kind is not StateKind.UNION:
            return None
        return FrozenOperatorState(self.name, self._kind, self.schema, (self._values,), len(self._values))

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of the stored table: one column with the elements."""
        return pa.schema([self._typed.field(self.name)])


class WriteGate:
    """Decides whether broadcast states may be changed now.

    `refusal` is the text of the error for a change, or None while changes are allowed.
    """

    __slots__ = ("refusal",)

    def __init__(self) -> None:
        self.refusal: str | None = None


class BroadcastState(MapEntries):
    """A map that is equal in every subtask. Made by `context.broadcast_state`."""

    def __init__(self, declared: MapState, gate: WriteGate) -> None:
        self.name = declared.name
        self._gate = gate
        self._key_typed, self._typed = declared._key_typed, declared._typed
        self._entries: dict[Any, Any] = {}
        self._frozen = False
        """True if a snapshot may refer to the entries, so that they must be copied before a change."""

    def get(self, key: Any) -> Any:
        """Returns the value under `key`, or None if there is none."""
        return self._typed.handed_out(self._entries.get(self._key_typed.taken(key)))

    def put(self, key: Any, value: Any) -> None:
        """Stores `value` under `key`. The value None removes the entry.

        Raises TypeError if the key or the value is not of its declared type, and ConfigurationError if the map is
        read-only at present.
        """
        if value is None:
            self.remove(key)
        else:
            taken = self._key_typed.taken(key), self._typed.taken(value)
            self._own()[taken[0]] = taken[1]

    def remove(self, key: Any) -> None:
        """Removes the entry of `key`, if there is one. Raises ConfigurationError if the map is read-only at present."""
        self._own().pop(self._key_typed.taken(key), None)

    def clear(self) -> None:
        """Removes all entries. Raises ConfigurationError if the map is read-only at present."""
        self._own().clear()

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Returns an iterator over a copy of the current entries, in the order in which their keys were first added."""
        if self._typed.plain:
            return iter(list(self._entries.items()))
        return iter([(key, self._typed.handed_out(value)) for key, value in self._entries.items()])

    def keys(self) -> Iterator[Any]:
        """Returns an iterator over the keys of the map, in the order of `items`."""
        return iter(list(self._entries))

    def __contains__(self, key: Any) -> bool:
        return self._key_typed.taken(key) in self._entries

    def mark(self) -> dict[Any, Any]:
        """Returns the current entries, to which `back_to` can return.

        The map is copied before its next change, as after a snapshot.
        """
        self._frozen = True
        return self._entries

    def back_to(self, mark: dict[Any, Any]) -> None:
        """Undoes the changes that were made after the call of `mark` that returned `mark`."""
        self._entries, self._frozen = mark, True

    def load(self, table: StateTable) -> None:
        """Adds the entries of a stored table, which already has the declared types.

        Raises CorruptionError if a key occurs twice.
        """
        for key, value in zip(*(column.to_pylist() for column in table.rows.columns), strict=True):
            found = one_nan(key)
            if found in self._entries:
                raise CorruptionError(
                    f"broadcast state {self.name!r} holds the key {value_text(key)} twice"
                    "; restore another checkpoint or a savepoint"
                )
            self._entries[found] = one_nan(value)

    def freeze(self) -> FrozenState | None:
        """Returns a snapshot of the map, or None if it is empty."""
        if not self._entries:
            return None
        self._frozen = True
        return FrozenOperatorState(self.name, StateKind.BROADCAST, self.schema, self._entries, len(self._entries))

    def _own(self) -> dict[Any, Any]:
        if self._gate.refusal is not None:
            raise ConfigurationError(f"broadcast state {self.name!r} is read-only here: {self._gate.refusal}")
        if self._frozen:
            self._entries, self._frozen = dict(self._entries), False
        return self._entries

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of the stored table: the columns `key` and `value`."""
        return pa.schema([self._key_typed.field(KEY), self._typed.field(VALUE)])


class OperatorStates:
    """The operator states of one function in one subtask, and the restored states that the function has not bound
    yet.
    """

    def __init__(self, uid: OperatorUid, restored: Iterable[StateTable], gate: WriteGate, names: StateNames) -> None:
        self._uid = uid
        self._where = f"operator with uid {uid!r}"
        self._gate = gate
        self._names = names
        """Names of all states of the operator, including keyed states."""
        self._restored: dict[str, list[StateTable]] = {}
        for table in restored:
            self._restored.setdefault(table.state, []).append(table)
        self._states: dict[str, OperatorListState | BroadcastState] = {}
        self._complete = False

    def list_state(self, declared: ListState, kind: StateKind) -> OperatorListState:
        """Binds a list of this subtask, with its restored elements. `kind` is LIST or UNION.

        Raises ConfigurationError after `open`, and for a name that is in use.
        """
        self._check(declared, ListState, kind)
        state = OperatorListState(declared, kind)
        self._load(state, kind)
        return state

    def broadcast_state(self, declared: MapState) -> BroadcastState:
        """Binds a broadcast map, with its restored entries.

        Raises ConfigurationError after `open`, and for a name that is in use.
        """
        self._check(declared, MapState, StateKind.BROADCAST)
        state = BroadcastState(declared, self._gate)
        self._load(state, StateKind.BROADCAST)
        return state

    def complete(self) -> None:
        """Ends the binding of states.

        Raises UndeclaredStateError for a restored state that the function did not bind.
        """
        self._complete = True
        for name, (table, *_) in self._restored.items():
            raise self._names.not_bound(
                name,
                f"{self._where}: the checkpoint has a {table.kind.value} state {name!r} that the function does "
                f"not bind (it binds {sorted(self._names)}): call self.context.{_BOUND_BY[table.kind]}(...) for "
                "it in open, or change the operator's uid",
            )

    @property
    def stored_fields(self) -> dict[str, pa.Field]:
        """Returns the field of the stored column with the values of each bound state, by state name."""
        return {name: state.schema.field(len(state.schema) - 1) for name, state in self._states.items()}

    def state(self, name: str) -> OperatorListState | BroadcastState:
        """Returns the bound state with this name. Raises KeyError if there is none."""
        return self._states[name]

    def mark(self) -> list[Any]:
        """Returns the current content of each state, to which `back_to` can return."""
        return [state.mark() for state in self._states.values()]

    def back_to(self, marks: Sequence[Any]) -> None:
        """Undoes the changes of all states that were made after the call of `mark` that returned `marks`."""
        for state, mark in zip(self._states.values(), marks, strict=True):
            state.back_to(mark)

    def freeze(self) -> tuple[FrozenState, ...]:
        """Returns snapshots of all states. Empty states have none, except union lists."""
        frozen = (state.freeze() for state in self._states.values())
        return tuple(state for state in frozen if state is not None)

    def __bool__(self) -> bool:
        return bool(self._states)

    def _check(self, declared: KeyedState, wanted: type[KeyedState], kind: StateKind) -> None:
        method = _BOUND_BY[kind]
        if not isinstance(declared, wanted):
            raise ConfigurationError(f"{self._where}: {method} takes a tg.{wanted.__name__}, not {declared!r}")
        if self._complete:
            raise ConfigurationError(
                f"{self._where}: state {declared.name!r} is bound too late: call context.{method}(...) in open"
            )
        if declared.ttl is not None:
            raise ConfigurationError(
                f"{self._where}: state {declared.name!r}: only keyed state has a time to live; remove ttl="
            )
        self._names.take(declared.name)

    def _load(self, state: OperatorListState | BroadcastState, kind: StateKind) -> None:
        self._states[state.name] = state
        for table in self._restored.pop(state.name, ()):
            if table.kind is not kind:
                raise ConfigurationError(
                    f"{self._where}: state {state.name!r} was stored as {table.kind.value} state and is bound with "
                    f"context.{_BOUND_BY[kind]}(...): bind it with {_BOUND_BY[table.kind]}, or give it a new name"
                )
            state.load(replace(table, rows=self._declared(table, state.schema)))

    def _declared(self, table: StateTable, declared: pa.Schema) -> pa.RecordBatch:
        """Returns stored rows, converted to the declared types.

        Raises ConfigurationError for types that cannot be converted.
        """
        rows = widened(table.rows)
        for stored, field in zip(rows.schema, declared, strict=False):
            check_serializers(stored, field, table.state, self._where)
        return migrated(rows, declared, table.state, self._uid)
