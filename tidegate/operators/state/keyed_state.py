"""Keyed state of functions: `ValueState`, `ListState`, `MapState`, `ReducingState` and `AggregatingState`. Each has a
declared type of values.

Rules:

- A state is declared (`ValueState("n", int)`) and bound in `open` (`context.state(...)`). A bound state reads and
  writes the state backend, for the key of the row or timer that is being processed.
- A value is converted to the declared type when it is stored, so a restored job computes with the same values.
- A mutable value is returned as a copy.
- Storing None, or an empty list or map, removes the state of the key.
- A function over batches (`process_batch`) reads and writes value states for many rows at once.
- In a checkpoint a state is one table: the key columns, then one column with the name of the state.
- `ReducingState` combines added values by a function, and `AggregatingState` by an aggregate function. Only the
  combined value is stored, in the declared type. The functions are part of the program and never of a checkpoint. Their
  results must depend only on their arguments.
- `StateNames` holds the names of all states of one operator, keyed or not. A checkpoint identifies a state by its name
  alone.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

import pyarrow as pa

from tidegate.operators.state.keys import KeyScope, Places
from tidegate.operators.state.state_types import NO_FAST_PATH, StateType, check_map_key
from tidegate.operators.state.ttl import Clock, StateTtl, TtlLists, TtlMaps, TtlValues, has_time, timed_type
from tidegate.state.common.backend import (
    InternalListState,
    InternalMapState,
    InternalValueState,
    KeyedBackend,
    KeyRef,
    Migrate,
    StateDescriptor,
)
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.schemas.column_names import RESERVED_PREFIX, is_reserved


class KeyedState(ABC):
    """Base class of the kinds of keyed state.

    `name` is unique in an operator. `ttl` is the time to live of values, or None.
    """

    _scope: KeyScope
    _internal: InternalValueState | InternalListState | InternalMapState | TtlValues | TtlLists | TtlMaps

    def __init__(self, name: str, ttl: StateTtl | None) -> None:
        if not name:
            raise ConfigurationError("a state needs a name, because checkpoints find it by name")
        if ttl is not None and not isinstance(ttl, StateTtl):
            raise ConfigurationError(f'state {name!r}: ttl is a tg.StateTtl("1h"), not {ttl!r}')
        self.name = name
        self.ttl = ttl

    @property
    @abstractmethod
    def stored_field(self) -> pa.Field:
        """The field of the checkpoint column that stores the state, with its type."""

    @property
    def column_type(self) -> pa.DataType:
        """Arrow type of the checkpoint column that stores the state."""
        return self.stored_field.type

    def clear(self) -> None:
        """Removes the state of the current key."""
        self._internal.remove(self._ref())

    def bound(
        self, scope: KeyScope, backend: KeyedBackend, clock: Clock | None, migrate: Migrate, by_batch: bool = False
    ) -> Self:
        """Returns a copy of this declaration that is bound to a backend.

        `scope` has the current key. `clock` determines which values have expired, and is None without a time to live.
        `migrate` converts stored rows of older types. `by_batch` is True if the function reads and writes state for
        whole batches.
        """
        state, field = copy.copy(self), self.stored_field
        state._scope = scope
        spec = StateDescriptor(self.name, field.type, metadata=field.metadata, migrate=migrate, by_batch=by_batch)
        if clock is not None:
            spec = replace(spec, has_expired=clock.has_expired, expired_ms=lambda: clock.expired_ms)
        state._bind(backend, spec, clock)
        return state

    @abstractmethod
    def expires(self, column_type: pa.DataType) -> bool:
        """Returns whether values in a checkpoint have a time to live, according to the type of their column."""

    @abstractmethod
    def _bind(self, backend: KeyedBackend, spec: StateDescriptor, clock: Clock | None) -> None: ...

    def _element(self, field: pa.Field) -> pa.Field:
        """Returns the field of one stored value, element or entry.

        With a time to live, its type includes the time of the last update.
        """
        return field if self.ttl is None else field.with_type(timed_type(field)).remove_metadata()

    def _ref(self) -> KeyRef:
        ref = self._scope.ref
        if ref is None:
            self._scope.current(f"state {self.name!r}")
        return ref

    def __getattr__(self, name: str) -> Any:
        if name in ("_internal", "_scope"):
            raise ConfigurationError(
                f"state {self.name!r} is declared but not bound; use the object that self.context.state(...) "
                "returns in open"
            )
        kind = type(self)
        methods = [each for each in dir(kind) if not each.startswith("_") and each not in vars(KeyedState)]
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {name!r}; use one of clear, {', '.join(methods)}"
        )


class ValueState(KeyedState):
    """Keyed state with one value for each key. The time to live `ttl` of a value starts when the value is written."""

    _internal: InternalValueState | TtlValues

    def __init__(self, name: str, dtype: Any, *, ttl: StateTtl | None = None) -> None:
        super().__init__(name, ttl)
        self._typed = StateType(name, dtype)
        self._plain, self._fast = self._typed.plain, self._typed.fast

    @property
    def stored_field(self) -> pa.Field:
        """The field of the checkpoint column: the declared type, with the time of the last update if the state has a
        time to live.
        """
        return self._element(self._typed.field(self.name))

    def expires(self, column_type: pa.DataType) -> bool:
        """Returns whether values in a checkpoint have a time to live, according to the type of their column."""
        return has_time(column_type, self._typed.dtype)

    def value(self) -> Any:
        """Returns the value of the current key, or None if it has none."""
        ref = self._scope.ref
        stored = self._internal.get(self._ref() if ref is None else ref)
        return stored if stored is None or self._plain else self._typed.handed_out(stored)

    def update(self, value: Any) -> None:
        """Stores a value for the current key. None clears the state. Raises TypeError if the value is not of the
        declared type.
        """
        if value is None:
            self.clear()
        else:
            ref, stored = self._scope.ref, self._fast(value)
            if stored is NO_FAST_PATH:
                stored = self._typed.taken(value)
            self._internal.put(self._ref() if ref is None else ref, stored)

    def get_many(self, at: Places = None) -> pa.Array:
        """Returns the value of each row's key, in `process_batch`: an Arrow array, null for keys without a value.

        `at` selects rows: `context.groups()` selects one row for each key. Row numbers, a boolean mask, or None for all
        rows are also allowed.
        """
        self._typed.check_columns()
        found = self._internal.get_many(self._scope.refs(at, f"state {self.name!r}"))
        if found.null_count and pa.types.is_struct(found.type):
            # Null in the fields too, because `field` of an Arrow struct ignores nulls of the struct itself.
            return pa.StructArray.from_arrays(found.flatten(), fields=list(found.type), mask=found.is_null())
        return found

    def put_many(self, values: Any, at: Places = None) -> None:
        """Stores a value for the key of each row, in `process_batch`. If a key has several rows, the last value is
        stored. Null clears the state.

        `values` is an Arrow array, or can be converted to one. `at` selects rows, as in `get_many`. Raises TypeError
        for values of another type, and ValueError if there are more or fewer values than rows.
        """
        refs = self._scope.refs(at, f"state {self.name!r}")
        column = self._typed.taken_column(values)
        if len(column) != len(refs):
            raise ValueError(
                f"state {self.name!r} was given {len(column)} values for {len(refs)} rows; give one value for each row"
            )
        self._internal.put_many(refs, column)

    def clear_many(self, at: Places = None) -> None:
        """Removes the state of the keys of the selected rows, in `process_batch`.

        `at` selects rows, as in `get_many`.
        """
        self._internal.remove_many(self._scope.refs(at, f"state {self.name!r}"))

    def _bind(self, backend: KeyedBackend, spec: StateDescriptor, clock: Clock | None) -> None:
        internal = backend.values(spec)
        self._internal = internal if clock is None else TtlValues(internal, clock)


class ListState(KeyedState):
    """Keyed state with a list of values for each key.

    The time to live `ttl` of an element starts when the element is written.
    """

    _internal: InternalListState | TtlLists

    def __init__(self, name: str, dtype: Any, *, ttl: StateTtl | None = None) -> None:
        super().__init__(name, ttl)
        self._typed = StateType(name, dtype)
        self._plain, self._fast = self._typed.plain, self._typed.fast

    @property
    def stored_field(self) -> pa.Field:
        """The field of the checkpoint column: a list of the declared type."""
        return pa.field(self.name, pa.list_(self._element(self._typed.field("item"))))

    def expires(self, column_type: pa.DataType) -> bool:
        """Returns whether stored elements have a time to live, according to the type of their column in a
        checkpoint.
        """
        return pa.types.is_list(column_type) and has_time(column_type.value_type, self._typed.dtype)

    def get(self) -> list[Any]:
        """Returns a copy of the list of the current key. Empty if the key has no values."""
        stored = self._internal.get(self._ref())
        return list(stored) if self._plain else [self._typed.handed_out(value) for value in stored]

    def __iter__(self) -> Iterator[Any]:
        """Yields the values of the list of the current key, without copying the list.

        During the iteration, the list may only be changed by adding values, and these are not yielded.
        """
        stored = self._internal.get(self._ref())
        values = itertools.islice(stored, len(stored))
        return values if self._plain else map(self._typed.handed_out, values)

    def add(self, value: Any) -> None:
        """Appends a value to the list of the current key.

        Raises TypeError if it is None or not of the declared type.
        """
        ref, stored = self._scope.ref, self._fast(value)
        if stored is NO_FAST_PATH:
            stored = self._typed.taken(value)
        self._internal.extend(self._ref() if ref is None else ref, (stored,))

    def add_all(self, values: Iterable[Any]) -> None:
        """Appends values to the list of the current key.

        Raises TypeError, and appends nothing, if a value is None or not of the declared type.
        """
        added = [self._typed.taken(value) for value in values]
        if added:
            self._internal.extend(self._ref(), added)

    def update(self, values: Iterable[Any]) -> None:
        """Replaces the list of the current key by `values`. An empty list clears the state. Raises TypeError, and
        changes nothing, if a value is None or not of the declared type.
        """
        replaced = [self._typed.taken(value) for value in values]
        if replaced:
            self._internal.put(self._ref(), replaced)
        else:
            self.clear()

    def _bind(self, backend: KeyedBackend, spec: StateDescriptor, clock: Clock | None) -> None:
        internal = backend.lists(spec)
        self._internal = internal if clock is None else TtlLists(internal, clock)


class MapEntries(ABC):
    """Base class of keyed map states and broadcast states."""

    @abstractmethod
    def put(self, key: Any, value: Any) -> None:
        """Stores `value` under `key` in the map."""

    @abstractmethod
    def items(self) -> Iterator[tuple[Any, Any]]:
        """Returns an iterator over a copy of the current entries, as pairs of key and value."""

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        """Stores several entries in the map."""
        for key, value in entries.items():
            self.put(key, value)

    def values(self) -> Iterator[Any]:
        """Returns an iterator over the values of the map, in the order of `items`."""
        return (value for _, value in self.items())


class MapState(KeyedState, MapEntries):
    """Keyed state with a map for each key. The time to live `ttl` of an entry starts when the entry is written.

    Map keys must have a scalar type. Storing the value None removes the entry.
    """

    _internal: InternalMapState | TtlMaps

    def __init__(self, name: str, key_dtype: Any, value_dtype: Any, *, ttl: StateTtl | None = None) -> None:
        super().__init__(name, ttl)
        self._key_typed = StateType(name, key_dtype)
        self._typed = StateType(name, value_dtype)
        if not self._key_typed.plain:
            raise ConfigurationError(
                f"state {name!r}: keys of a map cannot be {key_dtype}; declare a plain type, such as str or int"
            )
        try:
            check_map_key(self._key_typed.dtype)
        except ConfigurationError as error:
            raise ConfigurationError(f"state {name!r}: {error}") from None

    @property
    def stored_field(self) -> pa.Field:
        """The field of the checkpoint column: a map of the declared types."""
        key = pa.field("key", self._key_typed.dtype, nullable=False)
        return pa.field(self.name, pa.map_(key, self._element(self._typed.field("value"))))

    def expires(self, column_type: pa.DataType) -> bool:
        """Returns whether stored entries have a time to live, according to the type of their column in a checkpoint."""
        return pa.types.is_map(column_type) and has_time(column_type.item_type, self._typed.dtype)

    def get(self, key: Any) -> Any:
        """Returns the value at `key` in the map of the current key, or None if there is none."""
        return self._typed.handed_out(self._internal.get(self._ref(), self._key_typed.taken(key)))

    def put(self, key: Any, value: Any) -> None:
        """Stores `value` under `key` in the map of the current key.

        The value None removes the entry. Raises TypeError if the key or the value is not of its declared type.
        """
        if value is None:
            self.remove(key)
        else:
            self._internal.put(self._ref(), self._key_typed.taken(key), self._typed.taken(value))

    def remove(self, key: Any) -> None:
        """Removes the entry of a map key from the map of the current key, if there is one."""
        self._internal.discard(self._ref(), self._key_typed.taken(key))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Returns an iterator over the current entries, as pairs of key and value.

        Their order depends on the backend, and is equal in every run.
        """
        return iter([(key, self._typed.handed_out(value)) for key, value in self._pairs()])

    def keys(self) -> Iterator[Any]:
        """Returns an iterator over the keys of the map of the current key, in the order of `items`."""
        return iter([key for key, _ in self._pairs()])

    def __contains__(self, key: Any) -> bool:
        return self._internal.get(self._ref(), self._key_typed.taken(key)) is not None

    def _pairs(self) -> Iterable[tuple[Any, Any]]:
        found = self._internal.items(self._ref())
        return found.items() if isinstance(found, Mapping) else found

    def _bind(self, backend: KeyedBackend, spec: StateDescriptor, clock: Clock | None) -> None:
        internal = backend.maps(spec)
        self._internal = internal if clock is None else TtlMaps(internal, clock)


S = TypeVar("S", bound=KeyedState)


class AggregateFunction(Protocol):
    """Defines how an `AggregatingState` combines values (Flink's `AggregateFunction`)."""

    def create_accumulator(self) -> Any:
        """Returns the initial accumulator of a key. Accumulators have the type of the state."""
        ...

    def add(self, value: Any, accumulator: Any) -> Any:
        """Returns the accumulator that results from adding `value` to `accumulator`."""
        ...

    def get_result(self, accumulator: Any) -> Any:
        """Returns the result of an accumulator."""
        ...


class ReducingState(ValueState):
    """Keyed state with one value for each key.

    The first added value is stored, and each later value is combined with it by `reduce(stored, added)`.
    """

    def __init__(
        self, name: str, reduce: Callable[[Any, Any], Any], dtype: Any, *, ttl: StateTtl | None = None
    ) -> None:
        super().__init__(name, dtype, ttl=ttl)
        self._reduce = reduce

    def add(self, value: Any) -> None:
        """Combines a value with the stored value of the current key.

        Raises TypeError if the value or the result is None or not of the declared type.
        """
        kept, added = self.value(), self._typed.taken(value)
        if kept is not None:
            added = self._typed.taken(self._reduce(kept, self._typed.handed_out(added)))
        self._internal.put(self._ref(), added)

    def get(self) -> Any:
        """Returns the combined value of the current key, or None if no value was added."""
        return self.value()


class AggregatingState(ValueState):
    """Keyed state with one accumulator of type `dtype` for each key, to which an aggregate function adds values."""

    def __init__(self, name: str, function: AggregateFunction, dtype: Any, *, ttl: StateTtl | None = None) -> None:
        super().__init__(name, dtype, ttl=ttl)
        self._function = function

    def add(self, value: Any) -> None:
        """Adds a value to the accumulator of the current key.

        Raises TypeError if the accumulator becomes None, or is not of the declared type.
        """
        kept = self.value()
        accumulator = self._function.create_accumulator() if kept is None else kept
        self._internal.put(self._ref(), self._typed.taken(self._function.add(value, accumulator)))

    def get(self) -> Any:
        """Returns the result for the current key, or None if no value was added."""
        kept = self.value()
        return None if kept is None else self._function.get_result(kept)


class UndeclaredStateError(IncompatibleStateError):
    """Raised when a checkpoint has the state `state` of a function that no longer declares it.

    If the user agrees, such a state is dropped at submission (`restore/meaning_checks.py`).
    """

    def __init__(self, text: str, state: str = "") -> None:
        super().__init__(text)
        self.state = state


class StateNames:
    """The names of the states of one operator that are already in use.

    State names of users and of tidegate itself are in different namespaces (`own_name`).
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._taken)

    def take(self, name: str) -> None:
        """Reserves a name for a state of the user.

        Raises ConfigurationError if the name is in use, or reserved for tidegate.
        """
        if is_reserved(name):
            raise ConfigurationError(
                f"state {name!r}: names that begin with {RESERVED_PREFIX!r} are reserved; give the state another name"
            )
        if name in self._taken:
            raise ConfigurationError(f"two states of the operator are named {name!r}; give one of them another name")
        self._taken.add(name)

    def take_own(self, name: str) -> None:
        """Reserves a name for a state of tidegate itself."""
        assert is_reserved(name) and name not in self._taken, f"the state {name!r}"
        self._taken.add(name)

    def not_bound(self, name: str, text: str) -> IncompatibleStateError:
        """Returns the error, with the message `text`, for a stored state `name` that the function does not bind.

        The error is an UndeclaredStateError, unless a state of another kind, or of tidegate itself, uses the name.
        """
        return IncompatibleStateError(text) if name in self._taken else UndeclaredStateError(text, name)
