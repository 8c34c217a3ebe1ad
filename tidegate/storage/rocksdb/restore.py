"""Reads stored RocksDB files as rows, from which any backend can be restored."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import NativeState, StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.rocksdb.database import open_files, reported
from tidegate.storage.rocksdb.scan import scan_state
from tidegate.storage.rocksdb.value_layout import describe
from tidegate.storage.state.snapshot import StateTable

_MEMORY_BYTES = 16 * 1024 * 1024


def clipped(native: NativeState, key_groups: range | None) -> range:
    """The key groups of some files that are asked for, None for all of them.

    Raises CodecError, CorruptionError, or ConfigurationError for groups beyond the max parallelism of the job.
    """
    first, end = native.key_groups
    if key_groups is None:
        return range(first, end)
    max_parallelism = describe(native).max_parallelism
    if key_groups.start < 0 or key_groups.stop > max_parallelism:
        raise ConfigurationError(
            f"operator {native.uid!r} was written with max parallelism {max_parallelism}; key groups "
            f"{key_groups.start}..{key_groups.stop - 1} were asked for. "
            "Keep the max parallelism of the job that wrote the checkpoint"
        )
    return range(max(first, key_groups.start), min(end, key_groups.stop))


def empty_tables(native: NativeState) -> list[StateTable]:
    """A table without rows for each state. CodecError, CorruptionError."""
    description = describe(native)
    schemas = (
        (state.name, pa.schema([*description.stored_keys(state), *state.values])) for state in description.states
    )
    return [StateTable(name, StateKind.KEYED, pa.RecordBatch.from_pylist([], schema)) for name, schema in schemas]


def stored_tables(native: NativeState, key_groups: range, folder: str, only: str | None = None) -> Iterator[StateTable]:
    """The rows of some key groups out of a folder with the files that are needed for them, state by state.

    With `only` those of the state of that name.
    """
    description = describe(native)
    database = open_files(folder, _MEMORY_BYTES)
    try:
        for state in description.states:
            if only not in (None, state.name):
                continue
            with reported("read RocksDB", folder):
                cursor = database.iter()
            for chunk in scan_state(cursor, description, state, key_groups, folder):
                yield StateTable(state.name, StateKind.KEYED, chunk.rows)
            del cursor
    finally:
        database.close()
