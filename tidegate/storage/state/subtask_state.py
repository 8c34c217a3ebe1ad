"""Reads the state of one operator in one subtask of a checkpoint, from all the files that contain it.

- `read_subtask_state` and `iter_subtask_state` return tables as an operator is restored from them: layers from the base
  up, each with its number, then state that was written completely, then the files of a backend. Applying the tables in
  this order restores the state.
- `SubtaskStream` streams the current rows of a state: for each key the row of its newest layer. Only the rows of a few
  key groups are in memory.
- `stored_columns` finds the columns of all states of an operator without reading the rows. The columns of a state are
  in each of its chunks, and in the description of a backend with files of its own. One file of each folder is read for
  a state, because the subtasks of one checkpoint write the same columns. Bytes in `_metadata` are always read, because
  that costs no request. Finished subtasks are skipped, as a restore skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from posixpath import dirname

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.checkpoints.metadata import NativeState, SectionRef, StateHandle, StateKind, SubtaskState
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.arrow_types import comparable
from tidegate.storage.state.backend_files import read_native, tables_of_fetched
from tidegate.storage.state.key_groups import key_groups_meet
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.state_file import ChunkRef, Wanted, iter_state, read_directory, read_state, section_schema


def _any(_: SectionRef) -> bool:
    return True


def read_subtask_state(
    store: Store,
    subtask: SubtaskState,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Wanted = _any,
    readers: int = 1,
) -> list[StateTable]:
    """Returns the verified tables of one operator's state that `wanted` selects.

    With `key_groups`, keyed state is limited to the rows of these groups. Up to `readers` threads read at a time.

    Raises CorruptionError, NotFoundError, CodecError if a newer tidegate wrote the state, or StorageError if files of a
    backend cannot be stored on this machine while they are read.
    """
    tables: list[StateTable] = []
    for layer, handle in subtask.marked_handles:
        tables += read_state(store, handle, uid, key_groups, wanted=wanted, layer=layer, readers=readers)
    for native in _native_states(subtask, uid, key_groups):
        tables += read_native(store, native, key_groups)
    return tables


def iter_subtask_state(
    store: Store,
    subtask: SubtaskState,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Wanted = _any,
    scratch_dir: str | None = None,
    readers: int = 1,
) -> Iterator[StateTable]:
    """Yields the tables of `read_subtask_state`. At most one read of a file for each reader is in memory.

    Files of a backend are downloaded to `scratch_dir` meanwhile.
    """
    for layer, handle in subtask.marked_handles:
        yield from iter_state(store, handle, uid, key_groups, wanted=wanted, layer=layer, readers=readers)
    for native in _native_states(subtask, uid, key_groups):
        yield from read_native(store, native, key_groups, scratch_dir)


def _native_states(subtask: SubtaskState, uid: OperatorUid, key_groups: range | None) -> Iterator[NativeState]:
    for native in subtask.native:
        if native.uid == uid and (key_groups is None or key_groups_meet(range(*native.key_groups), key_groups)):
            yield native


def operators_with_state(subtask: SubtaskState) -> frozenset[OperatorUid]:
    """Returns the uids of the operators that have state in a subtask."""
    sections = (section for handle in subtask.state_handles for section in handle.sections)
    return frozenset(section.uid for section in sections) | {native.uid for native in subtask.native}


RUN_ROWS_MAX = 1_000_000
RUN_BYTES_MAX = 128 * 1024 * 1024

Adapt = Callable[[pa.RecordBatch], pa.RecordBatch]
"""A function that converts stored rows to the schema that the reader expects."""


@dataclass(frozen=True, slots=True)
class StoredSchemas:
    """Schemas of a state's stored rows, oldest first, and the schema of deleted keys (None if there are none)."""

    rows: tuple[pa.Schema, ...]
    removed: pa.Schema | None


@dataclass(frozen=True, slots=True)
class SubtaskStream:
    """Streams the rows of one state of one operator in one subtask."""

    store: Store
    subtask: SubtaskState
    uid: OperatorUid
    state: str

    def schemas(self) -> StoredSchemas:
        """Returns the schemas of the stored rows. Reads a chunk of each file.

        Raises CorruptionError, NotFoundError, CodecError.
        """
        rows: list[pa.Schema] = []
        removed: pa.Schema | None = None
        for handle in self.subtask.state_handles:
            for section in filter(self._is_wanted, handle.sections):
                schema = section_schema(self.store, handle, section)
                if schema is not None and section.removed:
                    removed = schema
                elif schema is not None:
                    rows.append(schema)
        for native in self._natives():
            rows += [table.rows.schema for table in tables_of_fetched(native) if table.state == self.state]
        return StoredSchemas(tuple(rows), removed)

    @property
    def has_any(self) -> bool:
        """Returns True if the subtask has rows or deleted keys of the state."""
        if any(self._is_wanted(section) for handle in self.subtask.state_handles for section in handle.sections):
            return True
        return any(t.state == self.state for native in self._natives() for t in tables_of_fetched(native))

    @property
    def is_layered(self) -> bool:
        """Returns True if several layers may have the same key."""
        sections = [(h, s) for h in self.subtask.state_handles for s in h.sections if self._is_wanted(s)]
        holders = {id(handle) for handle, _ in sections}
        return any(s.removed for _, s in sections) or len(holders) + len(list(self._natives())) > 1

    def batches(
        self, schema: pa.Schema, adapt: Adapt, keys: Sequence[str] | None, key_groups: range | None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the current rows of the state, each key once, converted by `adapt` to `schema`.

        With `key_groups`, keyed state is limited to the rows of these groups. `keys` are the columns that identify a
        row of the state, or None if unknown. Raises ConfigurationError if they are needed and unknown, and storage
        errors as `read_subtask_state` does.
        """
        if not (self._is_keyed and self.is_layered):
            for table in self._tables(key_groups):
                yield adapt(table.rows)
            return
        if keys is None:
            raise ConfigurationError(
                f"state {self.state!r} of operator {self.uid!r} is stored in layers, and the checkpoint does not name "
                f"its key columns among {schema.names}, because an older version wrote it. Name them with keys=[...]"
            )
        for run in self._runs(key_groups):
            tables = sorted(self._tables(run), key=lambda table: table.layer)
            fitting = [table if table.removed else replace(table, rows=adapt(table.rows)) for table in tables]
            yield from newest_rows(fitting, keys, schema).to_batches()

    @property
    def _is_keyed(self) -> bool:
        sections = (s for h in self.subtask.state_handles for s in h.sections if self._is_wanted(s))
        return all(section.kind is StateKind.KEYED for section in sections)

    def _is_wanted(self, section: SectionRef) -> bool:
        return section.uid == self.uid and section.state == self.state

    def _natives(self) -> Iterator[NativeState]:
        return (native for native in self.subtask.native if native.uid == self.uid)

    def _tables(self, key_groups: range | None) -> Iterator[StateTable]:
        for layer, handle in self.subtask.marked_handles:
            yield from iter_state(self.store, handle, self.uid, key_groups, wanted=self._is_wanted, layer=layer)
        for native in self._natives():
            yield from read_native(self.store, native, key_groups, only=self.state)

    def _runs(self, key_groups: range | None) -> Iterator[range]:
        """Yields ranges of key groups that are read at once, each with a bounded number of rows.

        Skips empty key groups.
        """
        rows, row_bytes = self._group_rows()
        limit = max(1, min(RUN_ROWS_MAX, int(RUN_BYTES_MAX / max(row_bytes, 1.0))))
        groups = range(len(rows)) if key_groups is None else range(key_groups.start, min(key_groups.stop, len(rows)))
        start, held = groups.start, 0
        for group in groups:
            if held and held + rows[group] > limit:
                yield range(start, group)
                start, held = group, 0
            held += int(rows[group])
        if held:
            yield range(start, groups.stop)

    def _group_rows(self) -> tuple[NDArray[np.int64], float]:
        """Returns the number of rows of each key group in all files, and the mean size of a row in bytes."""
        rows = np.zeros(0, dtype=np.int64)
        size_bytes = 0
        for handle in self.subtask.state_handles:
            for chunk in self._chunks(handle):
                stop = chunk.first_group + len(chunk.group_rows) - 1
                if stop > len(rows):
                    rows = np.concatenate((rows, np.zeros(stop - len(rows), dtype=np.int64)))
                ends = np.asarray(chunk.group_rows, dtype=np.int64)
                rows[chunk.first_group : stop] += ends[1:] - ends[:-1]
                size_bytes += chunk.length_bytes
        for native in self._natives():
            # The number of their rows is unknown: one row for each key group, so that every group is read.
            first, stop = native.key_groups
            if stop > len(rows):
                rows = np.concatenate((rows, np.zeros(stop - len(rows), dtype=np.int64)))
            rows[first:stop] += 1
        return rows, size_bytes / max(int(rows.sum()), 1)

    def _chunks(self, handle: StateHandle) -> Iterator[ChunkRef]:
        if any(map(self._is_wanted, handle.sections)):
            for stored in read_directory(self.store, handle):
                if self._is_wanted(stored.section):
                    yield from stored.chunks


def newest_rows(tables: Sequence[StateTable], keys: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Returns the current rows of a state, from its tables in the order of their layers.

    `schema` is the schema of all tables with rows; `removed` tables have only the columns `keys`. Rows keep the order
    of the tables. The function needs memory for all rows once more.
    """
    put = pa.Table.from_batches([table.rows for table in tables if not table.removed], schema)
    parts = [table.rows.select(list(keys)) for table in tables]
    rows = sum(part.num_rows for part in parts)
    if rows == 0:
        return put
    names = [str(number) for number in range(len(keys))]
    columns = pa.Table.from_batches(parts).rename_columns(names)
    columns = pa.table([comparable(column) for column in columns.columns], names=names)
    numbered = columns.append_column("row", pa.array(np.arange(rows, dtype=np.int64)))
    newest = np.sort(numbered.group_by(names).aggregate([("row", "max")]).column("row_max").to_numpy())
    is_put = np.repeat([not table.removed for table in tables], [part.num_rows for part in parts])
    place = np.cumsum(is_put) - 1
    return put.take(pa.array(place[newest[is_put[newest]]]))


def stored_columns(store: Store, subtasks: Sequence[SubtaskState], uid: OperatorUid) -> list[StateTable]:
    """Returns an empty table for each state and each schema of its stored rows, oldest layers first.

    `subtasks` are the subtasks that ran the operator. Raises CorruptionError, NotFoundError, CodecError and
    StorageError.
    """
    read: set[tuple[str, str, bool, str]] = set()
    found: list[StateTable] = []

    def add(table: StateTable) -> None:
        known = any(
            each.state == table.state
            and each.kind is table.kind
            and each.removed == table.removed
            and each.layer == table.layer
            and each.rows.schema.equals(table.rows.schema, check_metadata=True)
            for each in found
        )
        if not known:
            found.append(table)

    def is_new(section: SectionRef, path: str | None) -> bool:
        if section.uid != uid:
            return False
        if path is None:
            return True
        place = section.state, section.kind.value, section.removed, dirname(path)
        fresh = place not in read
        read.add(place)
        return fresh

    for subtask in subtasks:
        if subtask.finished:
            continue
        for layer, handle in subtask.marked_handles:
            for section in handle.sections:
                if not is_new(section, handle.path):
                    continue
                schema = section_schema(store, handle, section)
                if schema is not None:
                    rows = pa.RecordBatch.from_pylist([], schema)
                    add(StateTable(section.state, section.kind, rows, section.removed, layer))
        for native in subtask.native:
            if native.uid == uid:
                for table in tables_of_fetched(native):
                    add(table)
    return sorted(found, key=lambda table: table.layer)
