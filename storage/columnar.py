"""Keyed state as columns: the part that holds, freezes, stores and loads, without the index that finds a
key's slot.

A key has a slot, 0 for the first key that came, 1 for the next. Key columns are Arrow chunks in slot order,
each value column is one NumPy array with an entry a slot. Rules:

- keys are append-only and their chunks immutable, so freezing them takes references;
- values are changed in place by the owner (through `ValueColumn.values`), so freezing them copies: one
  memcpy, about 1 ms for a million 8-byte values. Nobody outside sees that: pages with copy-on-write can take
  its place;
- everything that costs more (hashing, sorting by key group) is done in `materialize`, beside processing;
- a stored table has the key columns in their own Arrow types, then the value columns: typed, and readable by
  people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError
from tidegate.storage.metadata import StateKind
from tidegate.storage.state import StateTable

HashKeys = Callable[[pa.RecordBatch], NDArray[np.uint64]]
"""Hashes of the keys of a batch that holds the key columns alone, one a row."""

_CAPACITY_MIN = 1024

_NUMBERS: dict[pa.DataType, np.dtype[Any]] = {
    pa.from_numpy_dtype(name): np.dtype(name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}


def storage_dtype(data_type: pa.DataType) -> np.dtype[Any] | None:
    """NumPy type of the values buffer of a fixed-width Arrow type of 1 to 8 bytes.

    None for any other type.
    """
    number = _NUMBERS.get(data_type)
    if number is not None:
        return number
    if pa.types.is_temporal(data_type) and not pa.types.is_interval(data_type):
        return np.dtype(np.int32 if data_type.bit_width == 32 else np.int64)
    return None


def array_of(values: NDArray[Any], valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """Arrow array over the memory of `values` (raw, in `storage_dtype`); entries with `valid` 0 are null."""
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(data_type, len(values), [bitmap, pa.py_buffer(values)])


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value column: its name, its Arrow type and what a new slot holds (also what lies beneath a null)."""

    name: str
    data_type: pa.DataType
    identity: int | float


class ValueColumn:
    """One value a slot, in place.

    `valid` is None until the first null was possible: then 1 where a value is.
    """

    __slots__ = ("_rows", "_spec", "valid", "values")

    def __init__(self, spec: ValueSpec) -> None:
        dtype = storage_dtype(spec.data_type)
        assert dtype is not None, f"{spec.data_type} has no fixed-width storage"
        self._spec = spec
        self._rows = 0
        self.values: NDArray[Any] = np.full(_CAPACITY_MIN, spec.identity, dtype=dtype)
        self.valid: NDArray[np.uint8] | None = None

    def grow(self, rows: int) -> None:
        """Make room for slots up to `rows`.

        New ones hold the identity (and are null if nulls are tracked).
        """
        capacity = len(self.values)
        if rows > capacity:
            while capacity < rows:
                capacity *= 2
            values = np.full(capacity, self._spec.identity, dtype=self.values.dtype)
            values[: self._rows] = self.values[: self._rows]
            self.values = values
            if self.valid is not None:
                valid = np.zeros(capacity, dtype=np.uint8)
                valid[: self._rows] = self.valid[: self._rows]
                self.valid = valid
        self._rows = rows

    def track_nulls(self, valid_rows: int) -> NDArray[np.uint8]:
        """Start to track nulls if that has not begun.

        Slots below `valid_rows` hold values, the others are null.
        """
        if self.valid is None:
            self.valid = np.zeros(len(self.values), dtype=np.uint8)
            self.valid[:valid_rows] = 1
        return self.valid

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Values of some slots (a copy)."""
        valid = None if self.valid is None else self.valid.take(slots)
        return array_of(self.values.take(slots), valid, self._spec.data_type)

    def copy(self) -> pa.Array:
        """Values of all slots (a copy, and no more than that)."""
        valid = None if self.valid is None else self.valid[: self._rows]
        return array_of(self.values[: self._rows].copy(), valid, self._spec.data_type)

    def store(self, start: int, values: pa.Array) -> None:
        """Set slots from `start` on from an Arrow array of this column's type."""
        stop = start + len(values)
        if values.null_count > 0:
            self.track_nulls(start)[start:stop] = values.is_valid().to_numpy(zero_copy_only=False)
        elif self.valid is not None:
            self.valid[start:stop] = 1
        raw = values.view(pa.from_numpy_dtype(self.values.dtype))
        self.values[start:stop] = raw.fill_null(self._spec.identity).to_numpy()


class KeyColumns:
    """Keys in slot order, append-only. Chunks are merged so that there are about log2(rows) of them."""

    __slots__ = ("_chunks", "rows", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        self._chunks: list[pa.RecordBatch] = []

    def append(self, keys: pa.RecordBatch) -> None:
        """Add keys.

        Their slots are the next ones. `keys` must own its buffers (be no slice of something large).
        """
        assert keys.schema.equals(self.schema), f"keys of {keys.schema} in a state of {self.schema}"
        self._chunks.append(keys)
        self.rows += keys.num_rows
        while len(self._chunks) > 1 and self._chunks[-2].num_rows < 2 * self._chunks[-1].num_rows:
            last = self._chunks.pop()
            self._chunks[-1] = pa.concat_batches([self._chunks[-1], last])

    def chunks(self) -> tuple[pa.RecordBatch, ...]:
        """All keys in slot order."""
        return tuple(self._chunks)


@dataclass(frozen=True, slots=True)
class KeyGroupOrder:
    """Slots sorted by key group: the sorted keys, the slot of each, and prefix sums of the groups."""

    keys: pa.RecordBatch
    slots: pa.Array
    starts: tuple[int, ...]


class LastOrder:
    """The order of the newest snapshot. Slots are only ever added, so it holds until a key is added.

    Several threads may use it: one that finds an order of another number of keys makes its own.
    """

    __slots__ = ("newest",)

    def __init__(self) -> None:
        self.newest: KeyGroupOrder | None = None


@dataclass(frozen=True, slots=True)
class FrozenColumnarState:
    """A `FrozenState`: references to keys, copies of values."""

    state: str
    key_schema: pa.Schema
    keys: tuple[pa.RecordBatch, ...]
    value_names: tuple[str, ...]
    values: tuple[pa.Array, ...]
    max_parallelism: int
    hash_keys: HashKeys
    last_order: LastOrder

    def materialize(self) -> StateTable:
        """Rows sorted by key group, in slot order within a group.

        O(rows); NumPy and Arrow release the GIL in it.
        """
        order = self._order()
        rows = pa.RecordBatch.from_arrays(
            [*order.keys.columns, *(column.take(order.slots) for column in self.values)],
            names=[*self.key_schema.names, *self.value_names],
        )
        return StateTable(self.state, StateKind.KEYED, rows, order.starts)

    def _order(self) -> KeyGroupOrder:
        known = self.last_order.newest
        if known is not None and known.keys.num_rows == sum(keys.num_rows for keys in self.keys):
            return known
        keys = pa.concat_batches(self.keys) if self.keys else pa.RecordBatch.from_pylist([], self.key_schema)
        groups = (self.hash_keys(keys) % np.uint64(self.max_parallelism)).astype(np.uint16)
        starts = np.zeros(self.max_parallelism + 1, dtype=np.int64)
        np.cumsum(np.bincount(groups, minlength=self.max_parallelism), out=starts[1:])
        # NumPy's stable sort of 16-bit integers is a radix sort.
        slots = pa.array(np.argsort(groups, kind="stable"))
        order = KeyGroupOrder(keys.take(slots), slots, tuple(starts.tolist()))
        self.last_order.newest = order
        return order


class ColumnarState:
    """The slots of one keyed state of one subtask."""

    __slots__ = ("_columns", "_hash_keys", "_keys", "_last_order", "_max_parallelism", "_specs", "name")

    def __init__(
        self,
        name: str,
        key_schema: pa.Schema,
        values: Sequence[ValueSpec],
        max_parallelism: int,
        hash_keys: HashKeys,
    ) -> None:
        assert 0 < max_parallelism <= 1 << 15, f"max_parallelism {max_parallelism} is not in 1..32768"
        names = [*key_schema.names, *(spec.name for spec in values)]
        assert len(set(names)) == len(names), f"columns of state {name!r} share a name: {names}"
        self.name = name
        self._keys = KeyColumns(key_schema)
        self._specs = tuple(values)
        self._columns = {spec.name: ValueColumn(spec) for spec in values}
        self._max_parallelism = max_parallelism
        self._hash_keys = hash_keys
        self._last_order = LastOrder()

    @property
    def rows(self) -> int:
        """Number of slots."""
        return self._keys.rows

    @property
    def key_schema(self) -> pa.Schema:
        """Names and types of the key columns."""
        return self._keys.schema

    def column(self, name: str) -> ValueColumn:
        """A value column, for the owner to change in place. Its arrays are replaced when slots are added."""
        return self._columns[name]

    def append(self, keys: pa.RecordBatch) -> None:
        """Add a slot for each row of `keys` (the key columns, no key twice); values hold the identity."""
        self._keys.append(keys)
        for column in self._columns.values():
            column.grow(self._keys.rows)

    def append_stored(self, rows: pa.RecordBatch) -> None:
        """Add slots with keys and values from a stored table. CorruptionError if its columns are others."""
        self.check_stored(rows.schema)
        start = self.rows
        self.append(rows.select(self._keys.schema.names))
        for name, column in self._columns.items():
            column.store(start, rows.column(name))

    def check_stored(self, schema: pa.Schema) -> None:
        """Raise CorruptionError unless a stored table of `schema` belongs to this state."""
        expected = [(field.name, field.type) for field in self._keys.schema]
        expected += [(spec.name, spec.data_type) for spec in self._specs]
        found = [(field.name, field.type) for field in schema]
        if found != expected:
            raise CorruptionError(
                f"stored rows of state {self.name!r} have columns {_columns_text(found)}, but the program "
                f"expects {_columns_text(expected)}; restore with the program that wrote them, or give the "
                f"operator a new uid"
            )

    def key_chunks(self, rows_max: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Keys in slot order in batches of up to `rows_max`, each with its first slot."""
        slot = 0
        for chunk in self._keys.chunks():
            for start in range(0, chunk.num_rows, rows_max):
                piece = chunk.slice(start, rows_max)
                yield slot + start, piece
            slot += chunk.num_rows

    def freeze(self) -> FrozenColumnarState:
        """The state as it is now.

        What is done to it later does not show there. Costs one copy of the values.
        """
        return FrozenColumnarState(
            state=self.name,
            key_schema=self._keys.schema,
            keys=self._keys.chunks(),
            value_names=tuple(spec.name for spec in self._specs),
            values=tuple(self._columns[spec.name].copy() for spec in self._specs),
            max_parallelism=self._max_parallelism,
            hash_keys=self._hash_keys,
            last_order=self._last_order,
        )


def _columns_text(columns: Sequence[tuple[str, pa.DataType]]) -> str:
    return "(" + ", ".join(f"{name}: {data_type}" for name, data_type in columns) + ")"
