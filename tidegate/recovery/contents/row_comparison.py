"""Compares two tables of one state, column by column: which keys were added, removed and changed. `diff` asks.

Rules: a key has one row in each table. Null equals null, and NaN equals NaN. The order of a map's entries does not
count, because each backend has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.plain_types import comparable

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """How many keys of a state are only in the newer checkpoint (`added`), only in the older one (`removed`), in both
    with another value (`changed`), and in both with the same (`same`)."""

    added: int
    removed: int
    changed: int
    same: int

    def __add__(self, other: KeyChanges) -> KeyChanges:
        return KeyChanges(
            self.added + other.added,
            self.removed + other.removed,
            self.changed + other.changed,
            self.same + other.same,
        )


NO_CHANGES = KeyChanges(0, 0, 0, 0)


def compare_rows(old: pa.Table, new: pa.Table, keys: Sequence[str], what: str) -> KeyChanges:
    """Compare the keys of two tables of one state, which `what` names in errors.

    ConfigurationError if the tables have other columns, or types that cannot be made the same.
    """
    if old.schema.names != new.schema.names:
        raise ConfigurationError(
            f"{what} has the columns {old.schema.names} in one and {new.schema.names} in the other"
        )
    try:
        old = old.cast(new.schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigurationError(f"{what} has other types in one checkpoint than in the other: {error}") from error
    names = [str(number) for number in range(len(keys))]
    both = pa.concat_tables([old.select(list(keys)), new.select(list(keys))]).rename_columns(names)
    both = pa.table([comparable(column) for column in both.columns], names=names)
    numbered = both.append_column("row", pa.array(np.arange(both.num_rows, dtype=np.int64)))
    if both.num_rows == 0:
        return NO_CHANGES
    found = numbered.group_by(names).aggregate([("row", "min"), ("row", "max")])
    first, last = found.column("row_min").to_numpy(), found.column("row_max").to_numpy()
    in_both = (first < old.num_rows) & (last >= old.num_rows)
    added = int(np.count_nonzero(first >= old.num_rows))
    common = int(np.count_nonzero(in_both))
    values = [name for name in new.schema.names if name not in keys]
    same = np.ones(common, dtype=np.bool_)
    before, now = pa.array(first[in_both]), pa.array(last[in_both] - old.num_rows)
    for name in values:
        same &= _equal(_taken(old.column(name), before), _taken(new.column(name), now))
    kept = int(np.count_nonzero(same))
    return KeyChanges(added, len(first) - added - common, common - kept, kept)


def _taken(column: pa.ChunkedArray, rows: pa.Array) -> pa.Array:
    taken = column.combine_chunks().take(rows)
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


def _equal(one: pa.Array, other: pa.Array) -> Flags:
    """Whether the values of two columns of one type are equal, row by row."""
    valid, other_valid = _flags(one.is_valid()), _flags(other.is_valid())
    result: Flags = valid == other_valid
    both = np.flatnonzero(valid & other_valid)
    if len(both):
        rows = pa.array(both)
        result[both] = _equal_values(one.take(rows), other.take(rows))
    return result


def _equal_values(one: pa.Array, other: pa.Array) -> Flags:
    """As `_equal`, for columns without nulls and without an offset."""
    data_type = one.type
    types = pa.types
    if types.is_dictionary(data_type):
        return _equal_values(one.cast(data_type.value_type), other.cast(data_type.value_type))
    if types.is_fixed_size_list(data_type):
        as_list = pa.list_(data_type.value_field)
        return _equal_values(one.cast(as_list), other.cast(as_list))
    if types.is_map(data_type):
        return _equal_lists(*(_lengths_and_entries(column) for column in (one, other)))
    if types.is_list(data_type) or types.is_large_list(data_type):
        return _equal_lists(*((_lengths(column), column.flatten()) for column in (one, other)))
    if types.is_struct(data_type):
        fields = np.ones(len(one), dtype=np.bool_)
        for position in range(data_type.num_fields):
            fields &= _equal(pc.struct_field(one, [position]), pc.struct_field(other, [position]))
        return fields
    one, other = comparable(one), comparable(other)
    result: Flags = _flags(pc.equal(one, other))
    if types.is_floating(one.type):
        result |= _flags(pc.is_nan(one)) & _flags(pc.is_nan(other))
    return result


def _equal_lists(one: tuple[NDArray[np.int64], pa.Array], other: tuple[NDArray[np.int64], pa.Array]) -> Flags:
    """Whether lists are equal, row by row. A list is given by its length and its part of all values."""
    result: Flags = one[0] == other[0]
    parts = []
    for lengths, values in (one, other):
        wanted = np.repeat(result, lengths)
        parts.append(values.take(pa.array(np.flatnonzero(wanted))))
    lengths = one[0][result]
    rows = np.repeat(np.flatnonzero(result), lengths)
    result[rows[~_equal(*parts)]] = False
    return result


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return lengths


def _lengths_and_entries(column: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """The sizes of maps, and all their entries as structs; those of one map are sorted by key."""
    lengths = _lengths(column)
    rows = pa.array(np.repeat(np.arange(len(column)), lengths))
    first = int(column.offsets[0].as_py()) if len(column) else 0
    keys, items = (part.slice(first, len(rows)) for part in (column.keys, column.items))
    order = pc.sort_indices(
        pa.table([rows, keys], names=["row", "key"]), sort_keys=[("row", "ascending"), ("key", "ascending")]
    )
    return lengths, pa.StructArray.from_arrays([keys.take(order), items.take(order)], names=["key", "value"])


def _flags(column: pa.Array) -> Flags:
    result: Flags = np.array(column.to_numpy(zero_copy_only=False), dtype=np.bool_)
    return result
