"""State of row-wise functions, one value, list or map for each key, typed with Arrow types.

Rules: a state is declared (`ValueState("n", pa.int64())`) and bound in `open` (`context.state(...)`); what is bound
always speaks of the key of the row or timer that is being processed. What is put in is converted to the declared type
at once, so that a restored job computes with the very same values; a nested value is handed out as a copy, so that
nothing changes unless it is put in. Null, or an empty list or map, is no state: the key is forgotten.

Freezing copies the dictionary of keys, never what it holds: lists and maps are copied when they are first changed
after that. In a checkpoint a state is one table: the key columns, then one column with the name of the state.
"""

from __future__ import annotations

import copy
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import pyarrow as pa

from tidegate.actors.operators.keys import Key, KeyCodec, keyed_chunk
from tidegate.storage.dictionaries import widened, widened_type
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.metadata import StateKind
from tidegate.storage.state import StateChunk, StateTable

TIMERS_STATE = "timers"
"""Name of the table of timers, which lies beside those of the states."""

_INT64_END = 2**63


class KeyScope:
    """Which key a function works on now; None outside of rows and timers."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Key | None = None

    def current(self, what: str) -> Key:
        """The key. ConfigurationError, naming `what` was asked for, where there is none."""
        if self.key is None:
            raise ConfigurationError(
                f"{what} is kept per key: it can be used in process and on_timer on a keyed stream, but not in open or "
                "finish, nor in process_broadcast"
            )
        return self.key


class KeyedState(ABC):
    """What the kinds of keyed state share. `name` is unique in an operator."""

    def __init__(self, name: str) -> None:
        if not name:
            raise ConfigurationError("a state needs a name: checkpoints know it by that")
        self.name = name
        self._scope: KeyScope | None = None
        self._entries: dict[Key, Any] = {}
        self._fresh: set[Key] = set()
        """Keys whose list or map was made after the last snapshot, and so may be changed in place."""

    @property
    @abstractmethod
    def column_type(self) -> pa.DataType:
        """Arrow type of the column that holds it in a checkpoint."""

    def clear(self) -> None:
        """Forget what is kept for the current key."""
        key = self._key()
        self._entries.pop(key, None)
        self._fresh.discard(key)

    def bound(self, scope: KeyScope) -> Self:
        """An empty state of this declaration, for the keys of one operator of one subtask."""
        state = copy.copy(self)
        state._scope, state._entries, state._fresh = scope, {}, set()
        return state

    def load(self, codec: KeyCodec, rows: pa.RecordBatch) -> None:
        """Add the rows of a stored table. CorruptionError if they are of another type, or a key comes twice."""
        rows = widened(rows)
        expected = pa.schema([*codec.schema, pa.field(self.name, self.column_type)])
        if not rows.schema.equals(expected):
            raise CorruptionError(
                f"stored rows of state {self.name!r} have columns {_columns(rows.schema)}, but the program expects "
                f"{_columns(expected)}; restore with the program that wrote them, or give the operator a new uid"
            )
        keys = codec.encode(rows.select(codec.schema.names))
        for key, value in zip(keys, rows.column(self.name).to_pylist(), strict=True):
            if key in self._entries:
                raise CorruptionError(f"state {self.name!r} holds the key {codec.as_row(key)} twice")
            self._entries[key] = self._loaded(value)

    def freeze(self, codec: KeyCodec, max_parallelism: int) -> FrozenKeyedState | None:
        """The state as it is now. None where nothing is kept."""
        self._fresh = set()
        if not self._entries:
            return None
        return FrozenKeyedState(self.name, codec, dict(self._entries), self.column_type, max_parallelism)

    def _key(self) -> Key:
        if self._scope is None:
            raise ConfigurationError(
                f"state {self.name!r} is only declared; use what self.context.state(...) returns in open"
            )
        return self._scope.current(f"state {self.name!r}")

    def _loaded(self, stored: Any) -> Any:
        """What is kept for a value of a stored column."""
        return stored


class ValueState(KeyedState):
    """One value for each key."""

    def __init__(self, name: str, dtype: pa.DataType) -> None:
        super().__init__(name)
        self._typed = _Typed(name, dtype)

    @property
    def column_type(self) -> pa.DataType:
        """The declared type."""
        return self._typed.dtype

    def value(self) -> Any:
        """The value of the current key; None where there is none."""
        return self._typed.handed_out(self._entries.get(self._key()))

    def update(self, value: Any) -> None:
        """Keep a value for the current key; None is `clear`. TypeError if it is not of the declared type."""
        if value is None:
            self.clear()
        else:
            self._entries[self._key()] = self._typed.taken(value)


class ListState(KeyedState):
    """A list of values for each key."""

    def __init__(self, name: str, dtype: pa.DataType) -> None:
        super().__init__(name)
        self._typed = _Typed(name, dtype)

    @property
    def column_type(self) -> pa.DataType:
        """A list of the declared type."""
        return pa.list_(self._typed.dtype)

    def get(self) -> list[Any]:
        """A copy of the list of the current key; empty where there is none."""
        return [self._typed.handed_out(value) for value in self._entries.get(self._key(), ())]

    def add(self, value: Any) -> None:
        """Append a value. TypeError if it is None or not of the declared type."""
        self.add_all((value,))

    def add_all(self, values: Iterable[Any]) -> None:
        """Append values. TypeError if one is None or not of the declared type: then none is."""
        added = [self._typed.taken(value) for value in values]
        if added:
            key = self._key()
            if key not in self._fresh:
                self._entries[key] = list(self._entries.get(key, ()))
                self._fresh.add(key)
            self._entries[key].extend(added)

    def update(self, values: Iterable[Any]) -> None:
        """Replace the list; an empty one is `clear`."""
        added = [self._typed.taken(value) for value in values]
        self.clear()
        if added:
            self._entries[self._key()] = added
            self._fresh.add(self._key())


class MapState(KeyedState):
    """A map for each key. Its own keys are of a plain type; a value of None is no entry."""

    def __init__(self, name: str, key_dtype: pa.DataType, value_dtype: pa.DataType) -> None:
        super().__init__(name)
        if pa.types.is_nested(key_dtype):
            raise ConfigurationError(f"state {name!r}: keys of a map must be of a plain type, not {key_dtype}")
        self._key_typed = _Typed(name, key_dtype)
        self._typed = _Typed(name, value_dtype)

    @property
    def column_type(self) -> pa.DataType:
        """A map of the declared types."""
        return pa.map_(self._key_typed.dtype, self._typed.dtype)

    def get(self, key: Any) -> Any:
        """The value at `key` of the current key's map; None where there is none."""
        return self._typed.handed_out(self._map().get(self._key_typed.taken(key)))

    def put(self, key: Any, value: Any) -> None:
        """Set an entry; a value of None is `remove`. TypeError if either is not of its declared type."""
        if value is None:
            self.remove(key)
        else:
            taken = self._key_typed.taken(key), self._typed.taken(value)
            self._own_map()[taken[0]] = taken[1]

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        """Set several entries."""
        for key, value in entries.items():
            self.put(key, value)

    def remove(self, key: Any) -> None:
        """Remove an entry, if there is one."""
        taken = self._key_typed.taken(key)
        if taken in self._map():
            entries = self._own_map()
            del entries[taken]
            if not entries:
                self.clear()

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Entries in the order in which their keys first came, as they are now."""
        return iter([(key, self._typed.handed_out(value)) for key, value in self._map().items()])

    def keys(self) -> Iterator[Any]:
        """Keys, in the order of `items`."""
        return iter(list(self._map()))

    def values(self) -> Iterator[Any]:
        """Values, in the order of `items`."""
        return (value for _, value in self.items())

    def __contains__(self, key: Any) -> bool:
        return self._key_typed.taken(key) in self._map()

    def _map(self) -> Mapping[Any, Any]:
        entries: Mapping[Any, Any] = self._entries.get(self._key(), {})
        return entries

    def _own_map(self) -> dict[Any, Any]:
        key = self._key()
        if key not in self._fresh:
            self._entries[key] = dict(self._entries.get(key, {}))
            self._fresh.add(key)
        entries: dict[Any, Any] = self._entries[key]
        return entries

    def _loaded(self, stored: Any) -> Any:
        return {self._key_typed.one_nan(key): value for key, value in stored}


S = TypeVar("S", bound=KeyedState)


@dataclass(frozen=True, slots=True)
class FrozenKeyedState:
    """A `FrozenState`: the entries of all keys as they were."""

    state: str
    codec: KeyCodec
    entries: dict[Key, Any]
    column_type: pa.DataType
    max_parallelism: int
    kind: StateKind = StateKind.KEYED
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Rows sorted by key group. O(keys)."""
        values = list(self.entries.values())
        if pa.types.is_map(self.column_type):
            values = [list(entries.items()) for entries in values]
        column = pa.RecordBatch.from_arrays([pa.array(values, type=self.column_type)], names=[self.state])
        yield keyed_chunk(self.codec, list(self.entries), column, self.max_parallelism)


class _Typed:
    """Python values of one Arrow type: what goes in comes out of a checkpoint as the same value."""

    __slots__ = ("_exact", "_name", "_nested", "dtype")

    def __init__(self, name: str, dtype: pa.DataType) -> None:
        if not isinstance(dtype, pa.DataType):
            raise ConfigurationError(f"state {name!r} needs an Arrow type such as pa.int64(), not {dtype!r}")
        self.dtype = widened_type(dtype)  # the values of all keys meet in one column
        self._name = name
        self._nested = pa.types.is_nested(self.dtype)
        self._exact = {pa.int64(): int, pa.float64(): float, pa.string(): str, pa.bool_(): bool}.get(self.dtype)

    def taken(self, value: Any) -> Any:
        """The value as a checkpoint would give it back. TypeError if it is None or not of the type."""
        if type(value) is self._exact and not (isinstance(value, int) and not -_INT64_END <= value < _INT64_END):
            return self.one_nan(value)
        try:
            if pa.types.is_integer(self.dtype):
                operator.index(value)  # Arrow would cut a float off
            taken = pa.scalar(value, type=self.dtype).as_py()
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"state {self._name!r} keeps {self.dtype}, and was given {value!r}: {error}") from error
        if taken is None:
            raise TypeError(f"state {self._name!r} keeps {self.dtype}, and was given a null")
        return self.one_nan(taken)

    def one_nan(self, value: Any) -> Any:
        """NaN as one object, so that a map finds it again; anything else as it is."""
        return math.nan if isinstance(value, float) and value != value else value

    def handed_out(self, value: Any) -> Any:
        """The value, copied where it could be changed in place."""
        return copy.deepcopy(value) if self._nested else value


class KeyedStates:
    """The states of one operator, and those that a checkpoint has for it."""

    def __init__(self, key_names: tuple[str, ...], scope: KeyScope) -> None:
        self._key_names = key_names
        self._scope = scope
        self._states: dict[str, KeyedState] = {}
        self._complete = False

    def complete(self) -> None:
        """No state is bound from now on."""
        self._complete = True

    def bind(self, declared: S) -> S:
        """Bind a declared state. ConfigurationError if it is too late, or for a name that is taken."""
        if self._complete:
            raise ConfigurationError(f"state {declared.name!r} is bound too late: call context.state(...) in open")
        if declared.name in self._states or declared.name == TIMERS_STATE:
            raise ConfigurationError(f"two states are named {declared.name!r} ({TIMERS_STATE!r} is tidegate's own)")
        if declared.name in self._key_names:
            raise ConfigurationError(f"a state has the name of the key column {declared.name!r}; choose another one")
        state = declared.bound(self._scope)
        self._states[declared.name] = state
        return state

    def each_key(self, state: KeyedState) -> Iterator[None]:
        """Make every key that has this state the current one, one after the other. The state may be changed meanwhile.

        ConfigurationError for a state that `bind` has not returned.
        """
        if self._states.get(state.name) is not state:
            raise ConfigurationError(
                f"state {state.name!r} is only declared; go through what context.state(...) returned in open"
            )
        try:
            for self._scope.key in list(state._entries):
                yield
        finally:
            self._scope.key = None

    def load(self, codec: KeyCodec, table: StateTable) -> None:
        """Take a stored table back. ConfigurationError if no state of its name is bound; CorruptionError as above."""
        state = self._states.get(table.state)
        if state is None:
            raise ConfigurationError(
                f"the checkpoint has a state {table.state!r} that the function does not bind (it binds "
                f"{sorted(self._states)}): call self.context.state(...) for it in open, or change the operator's uid"
            )
        state.load(codec, table.rows)

    def freeze(self, codec: KeyCodec, max_parallelism: int) -> tuple[FrozenKeyedState, ...]:
        """All states as they are now, but for empty ones."""
        frozen = (state.freeze(codec, max_parallelism) for state in self._states.values())
        return tuple(state for state in frozen if state is not None)


def _columns(schema: pa.Schema) -> str:
    return "(" + ", ".join(f"{field.name}: {field.type}" for field in schema) + ")"
