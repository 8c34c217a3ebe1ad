"""References in plain Python for each kernel of `tidegate.state.kernels`: tests compare the kernels to it.

Nothing here is fast, and nothing here shares code with the kernels: the hash comes from the xxHash library,
values are read through `to_pylist`.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from tidegate.storage.state.key_groups import subtask_of_key_group

_NULL_SEED = 0x6E756C6C6E756C6C


def hash_columns_reference(batch: pa.RecordBatch, columns: Sequence[str]) -> NDArray[np.uint64]:
    """Reference of `hashing.hash_columns`."""
    hashes = [0] * batch.num_rows
    for name in columns:
        for i, value in enumerate(canonical_bytes(batch.column(name))):
            if value is None:
                hashes[i] = xxhash.xxh64_intdigest(b"", seed=hashes[i] ^ _NULL_SEED)
            else:
                hashes[i] = xxhash.xxh64_intdigest(value, seed=hashes[i])
    return np.array(hashes, dtype=np.uint64)


def canonical_bytes(column: pa.Array) -> list[bytes | None]:
    """Canonical bytes of each value, None for null."""
    data_type = column.type
    if pa.types.is_dictionary(data_type):
        column = column.dictionary_decode()
        data_type = column.type
    if pa.types.is_temporal(data_type):
        column = column.view(pa.int32() if data_type.bit_width == 32 else pa.int64())
    return [None if value is None else _bytes_of(value) for value in column.to_pylist()]


def _bytes_of(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return struct.pack("<d", float("nan") if value != value else value + 0.0)
    assert isinstance(value, int)
    return (value % (1 << 64)).to_bytes(8, "little")


def owner_reference(hash64: int, max_parallelism: int, parallelism: int) -> int:
    """Reference of the subtask that owns a key, by the key's hash."""
    return subtask_of_key_group(hash64 % max_parallelism, max_parallelism, parallelism)


def partition_reference(hashes: NDArray[np.uint64], max_parallelism: int, parallelism: int) -> list[NDArray[np.int64]]:
    """Reference of `partition.partition`: the rows of each subtask, in order."""
    subtasks = [owner_reference(int(value), max_parallelism, parallelism) for value in hashes]
    return [np.array([i for i, s in enumerate(subtasks) if s == t], dtype=np.int64) for t in range(parallelism)]


def by_group_reference(groups: Sequence[int]) -> tuple[int, list[list[int]]]:
    """Reference of `partition.places_by_group`: the first group, and the rows of it and of each after it, in order."""
    first, last = min(groups), max(groups)
    return first, [[i for i, g in enumerate(groups) if g == group] for group in range(first, last + 1)]


def upsert_reference(index: dict[Hashable, int], keys: Sequence[Hashable]) -> tuple[list[int], list[int], list[int]]:
    """Reference of `key_index.KeyIndex.upsert`: slots, first rows, new rows."""
    slots: list[int] = []
    first_rows: list[int] = []
    new_rows: list[int] = []
    seen: set[Hashable] = set()
    for row, key in enumerate(keys):
        if key not in index:
            index[key] = len(index)
            new_rows.append(row)
        if key not in seen:
            seen.add(key)
            first_rows.append(row)
        slots.append(index[key])
    return slots, first_rows, new_rows


def accumulate_reference(kind: str, values: Sequence[Any], slots: Sequence[int], rows: int) -> list[Any]:
    """Reference of `accumulate`.

    One result a slot. Nulls (None) are skipped; NaN is greater than any number.
    """
    grouped: list[list[Any]] = [[] for _ in range(rows)]
    for value, slot in zip(values, slots, strict=True):
        if value is not None:
            grouped[slot].append(value)
    if kind == "count":
        return [len(group) for group in grouped]
    if kind == "sum":
        return [sum(group) if group else None for group in grouped]
    choose = min if kind == "min" else max
    return [choose(group, key=_nan_last) if group else None for group in grouped]


def _nan_last(value: Any) -> tuple[bool, Any]:
    return (True, 0) if value != value else (False, value)
