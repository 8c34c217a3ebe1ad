"""`StateTtl` is the time to live of keyed state, in processing time (Flink's `StateTtlConfig`).

A state with a time to live accesses its backend through `TtlValues`, `TtlLists` or `TtlMaps`. Rules:

- Values are stored as `struct<value, updated_ms>`: each value, each element of a list, each entry of a map. The update
  time therefore survives restores and rescaling.
- A value has expired when `updated_ms + time to live <= now`, in the processing time of the task, as in Flink. A time
  to live of 10 ms ends after exactly 10 ms.
- Expired state is removed when a function reads it, and in small steps after each batch (`KeyedBackend.sweep`). Full
  snapshots skip it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.operator import ProcessingTime
from tidegate.state.common.backend import InternalListState, InternalMapState, InternalValueState, KeyRef, KeyRefs
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.snapshot import FrozenChanged, StateChunk
from tidegate.storage.units import parse_duration_ms

TtlUpdate: TypeAlias = Literal["on_create_and_write", "on_read_and_write"]
TtlVisibility: TypeAlias = Literal["never_return_expired", "return_expired_if_not_cleaned_up"]

VALUE, UPDATED_MS = "value", "updated_ms"


@dataclass(frozen=True, slots=True)
class StateTtl:
    """Time to live of state, in processing time: `tg.StateTtl("1h")` counts from the last write (or, with
    `update="on_read_and_write"`, read).

    `visibility` decides whether an expired value that was not removed yet is returned one last time. Raises
    ConfigurationError for a duration that is not positive, or for an unknown option.
    """

    time_to_live: str | timedelta | int
    update: TtlUpdate = "on_create_and_write"
    visibility: TtlVisibility = "never_return_expired"

    def __post_init__(self) -> None:
        if parse_duration_ms(self.time_to_live, setting="StateTtl") == 0:
            raise ConfigurationError(
                f'StateTtl: a time to live must be greater than 0, such as tg.StateTtl("1h"), not {self.time_to_live!r}'
            )
        for setting, given, known in (
            ("update", self.update, get_args(TtlUpdate)),
            ("visibility", self.visibility, get_args(TtlVisibility)),
        ):
            if given not in known:
                raise ConfigurationError(f"StateTtl: {setting}={given!r} is unknown; give one of {', '.join(known)}")

    @property
    def ttl_ms(self) -> int:
        """Returns the time to live in milliseconds."""
        return parse_duration_ms(self.time_to_live, setting="StateTtl")


def timed_type(value: pa.Field) -> pa.DataType:
    """Returns the stored type of a value with a time to live: a struct of the value and the time of its last update."""
    return pa.struct([value.with_name(VALUE), pa.field(UPDATED_MS, pa.int64())])


def is_timed(data_type: pa.DataType) -> bool:
    """Returns whether a stored type has the fields of a value with a time to live."""
    return (
        pa.types.is_struct(data_type)
        and [field.name for field in data_type] == [VALUE, UPDATED_MS]
        and data_type.field(UPDATED_MS).type == pa.int64()
    )


def has_time(stored: pa.DataType, declared: pa.DataType) -> bool:
    """Returns whether stored values have a time to live. `declared` is the type that the program declares for them.

    A user's dataclass may have the same two fields as the struct around values with a time to live. So the result is
    True if the stored type has one such struct more than the declared type.
    """
    return _structs_around(stored) > _structs_around(declared)


def _structs_around(data_type: pa.DataType) -> int:
    return 1 + _structs_around(data_type.field(VALUE).type) if is_timed(data_type) else 0


class Clock:
    """Determines whether the values of one state have expired. The time is the processing time of the task."""

    __slots__ = ("_time", "_ttl_ms", "read_updates", "returns_expired")

    def __init__(self, ttl: StateTtl, time: ProcessingTime) -> None:
        self._time = time
        self._ttl_ms = ttl.ttl_ms
        self.read_updates = ttl.update == "on_read_and_write"
        self.returns_expired = ttl.visibility == "return_expired_if_not_cleaned_up"

    @property
    def expired_ms(self) -> int:
        """Returns the time in ms since 1970 at which values expire: a value has expired if its last update was then or
        earlier.
        """
        return self._time.now_ms - self._ttl_ms

    def has_expired(self, stored: Any) -> bool:
        """Returns whether a stored value, a dict with its update time, has expired."""
        expired: bool = stored[UPDATED_MS] <= self._time.now_ms - self._ttl_ms
        return expired

    def timed(self, value: Any) -> dict[str, Any]:
        """Returns a value in stored form: a dict with the value and the current time as its update time."""
        return {VALUE: value, UPDATED_MS: self._time.now_ms}

    def timed_column(self, values: pa.Array) -> pa.Array:
        """Returns an array of values in stored form, with the current time as their update time. Null stays null."""
        fields = [pa.field(VALUE, values.type), pa.field(UPDATED_MS, pa.int64())]
        moments = pa.array(np.full(len(values), self._time.now_ms, dtype=np.int64))
        mask = values.is_null() if values.null_count else None
        return pa.StructArray.from_arrays([values, moments], fields=fields, mask=mask)


class TtlValues:
    """Value state of keys with a time to live (an `InternalValueState`). Reading an expired value removes it."""

    def __init__(self, internal: InternalValueState, clock: Clock) -> None:
        self._internal = internal
        self._clock = clock

    def get(self, ref: KeyRef) -> Any:
        """Returns the value of a key. None if there is none, or if it has expired and `visibility` hides it."""
        stored, clock = self._internal.get(ref), self._clock
        if stored is None:
            return None
        if clock.has_expired(stored):
            self._internal.remove(ref)
            return stored[VALUE] if clock.returns_expired else None
        if clock.read_updates:
            self._internal.put(ref, clock.timed(stored[VALUE]))
        return stored[VALUE]

    def put(self, ref: KeyRef, value: Any) -> None:
        """Stores the value of a key, with the current time as its update time."""
        self._internal.put(ref, self._clock.timed(value))

    def remove(self, ref: KeyRef) -> None:
        """Removes the value of a key."""
        self._internal.remove(ref)

    def get_many(self, refs: KeyRefs) -> pa.Array:
        """Returns the value of each key, null if there is none, or if it has expired and `visibility` hides it."""
        stored, clock = self._internal.get_many(refs), self._clock
        values = pc.struct_field(stored, VALUE)
        if stored.null_count == len(stored):
            return values
        expired = pc.fill_null(pc.less_equal(pc.struct_field(stored, UPDATED_MS), clock.expired_ms), False)
        over: NDArray[np.bool_] = expired.to_numpy(zero_copy_only=False)
        if over.any():
            self._internal.remove_many(refs[over])
        if clock.read_updates:
            kept = stored.is_valid().to_numpy(zero_copy_only=False) & ~over
            self.put_many(refs[kept], values.filter(pa.array(kept)))
        if over.any() and not clock.returns_expired:
            values = pc.if_else(expired, pa.scalar(None, values.type), values)
        return values

    def put_many(self, refs: KeyRefs, values: pa.Array) -> None:
        """Stores a value for each key, with the current time as the update time."""
        self._internal.put_many(refs, self._clock.timed_column(values))

    def remove_many(self, refs: KeyRefs) -> None:
        """Removes the values of these keys, if they have any."""
        self._internal.remove_many(refs)


class TtlLists:
    """List state of keys with a time to live for each element (an `InternalListState`). Reading a list removes its
    expired elements.
    """

    def __init__(self, internal: InternalListState, clock: Clock) -> None:
        self._internal = internal
        self._clock = clock

    def get(self, ref: KeyRef) -> Collection[Any]:
        """Returns the elements of a key that have not expired, or that `visibility` still shows."""
        stored, clock = self._internal.get(ref), self._clock
        if not stored:
            return ()
        kept = [element for element in stored if not clock.has_expired(element)]
        returned = stored if clock.returns_expired else kept
        values = [element[VALUE] for element in returned]
        if clock.read_updates:
            self._replace(ref, [clock.timed(element[VALUE]) for element in kept])
        elif len(kept) < len(stored):
            self._replace(ref, kept)
        return values

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Appends elements to the list of a key, with the current time as their update time."""
        self._internal.extend(ref, [self._clock.timed(value) for value in values])

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Replaces the list of a key. The current time is the update time of its elements."""
        self._internal.put(ref, [self._clock.timed(value) for value in values])

    def remove(self, ref: KeyRef) -> None:
        """Removes the list of a key."""
        self._internal.remove(ref)

    def _replace(self, ref: KeyRef, elements: list[Any]) -> None:
        if elements:
            self._internal.put(ref, elements)
        else:
            self._internal.remove(ref)


class TtlMaps:
    """Map state of keys with a time to live for each entry (an `InternalMapState`). Reading an expired entry removes
    it.
    """

    def __init__(self, internal: InternalMapState, clock: Clock) -> None:
        self._internal = internal
        self._clock = clock

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        """Returns the value at a map key, or None if there is none, or if it has expired and `visibility` hides it."""
        stored = self._internal.get(ref, map_key)
        return None if stored is None else self._seen(ref, map_key, stored)

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        """Stores one entry in the map of a key, with the current time as its update time."""
        self._internal.put(ref, map_key, self._clock.timed(value))

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        """Removes one entry from the map of a key."""
        self._internal.discard(ref, map_key)

    def items(self, ref: KeyRef) -> Iterable[tuple[Any, Any]]:
        """Returns the entries of a key that have not expired, or that `visibility` still shows."""
        found = self._internal.items(ref)
        pairs = list(found.items() if isinstance(found, Mapping) else found)
        seen = [(map_key, self._seen(ref, map_key, stored)) for map_key, stored in pairs]
        return [(map_key, value) for map_key, value in seen if value is not None]

    def remove(self, ref: KeyRef) -> None:
        """Removes the map of a key."""
        self._internal.remove(ref)

    def _seen(self, ref: KeyRef, map_key: Any, stored: Any) -> Any:
        """Returns the value of an entry to the user's function, or None if it has expired and `visibility` hides it.

        Removes an expired entry from the state.
        """
        clock = self._clock
        if clock.has_expired(stored):
            self._internal.discard(ref, map_key)
            return stored[VALUE] if clock.returns_expired else None
        if clock.read_updates:
            self._internal.put(ref, map_key, clock.timed(stored[VALUE]))
        return stored[VALUE]


@dataclass(frozen=True, slots=True)
class FrozenUnexpired(FrozenChanged):
    """A snapshot of a state without the values whose last update was at `expired_ms` or earlier."""

    expired_ms: int

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the chunks of the snapshot without expired values. The values are in the last column."""
        for chunk in self.frozen.chunks():
            kept = _unexpired(chunk, self.expired_ms)
            if kept.rows.num_rows:
                yield kept


def timed_now(column: pa.Array, expected: pa.DataType, now_ms: int) -> pa.Array:
    """Converts the stored column of a state without a time to live to the type `expected`, which has one.

    `now_ms` becomes the update time of all values. The values must have the right type already.
    """
    if is_timed(expected):
        return _timed(column, now_ms)
    if pa.types.is_map(expected):
        items = _timed(column.items, now_ms)
        entries = pa.map_(column.type.key_field, pa.field("value", items.type))
        return pa.MapArray.from_arrays(_offsets(column), column.keys, items, type=entries)
    return pa.ListArray.from_arrays(_offsets(column), _timed(column.values, now_ms))


def _timed(values: pa.Array, now_ms: int) -> pa.Array:
    moments = pa.array(np.full(len(values), now_ms, dtype=np.int64))
    return pa.StructArray.from_arrays([values, moments], names=[VALUE, UPDATED_MS])


def _unexpired(chunk: StateChunk, expired_ms: int) -> StateChunk:
    rows = chunk.rows
    column = rows.column(rows.num_columns - 1)
    if is_timed(column.type):
        kept = _is_fresh(column, expired_ms)
    else:
        is_map = pa.types.is_map(column.type)
        elements = column.items if is_map else column.values
        fresh = _is_fresh(elements, expired_ms)
        ends = np.concatenate(([0], np.cumsum(fresh)))
        offsets = ends[_offsets(column).to_numpy()].astype(np.int32)
        mask = pa.array(fresh)
        if is_map:
            column = pa.MapArray.from_arrays(offsets, column.keys.filter(mask), elements.filter(mask), type=column.type)
        else:
            column = pa.ListArray.from_arrays(offsets, elements.filter(mask), type=column.type)
        kept = np.diff(offsets) > 0
        rows = rows.set_column(rows.num_columns - 1, rows.schema.field(rows.num_columns - 1), column)
    if kept.all():
        return StateChunk(rows, chunk.first_group, chunk.group_rows)
    before = np.concatenate(([0], np.cumsum(kept)))
    return StateChunk(
        rows.filter(pa.array(kept)),
        chunk.first_group,
        tuple(before[np.asarray(chunk.group_rows, dtype=np.int64)].tolist()),
    )


def _is_fresh(timed: pa.Array, expired_ms: int) -> NDArray[np.bool_]:
    fresh = pc.greater(pc.struct_field(timed, UPDATED_MS), expired_ms)
    result: NDArray[np.bool_] = np.asarray(fresh.to_numpy(zero_copy_only=False), dtype=bool)
    return result


def _offsets(column: pa.Array) -> pa.Array:
    """Returns a copy of the offsets of lists or maps, because Arrow does not accept the offsets of a sliced array."""
    return pa.array(column.offsets.to_numpy(), pa.int32())
