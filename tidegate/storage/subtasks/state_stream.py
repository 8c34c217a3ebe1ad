"""Streams one state of one operator out of one subtask of a checkpoint, a bounded number of rows at a time.

Rules: state that was written whole is passed on as it lies in its file; files of a backend are fetched and scanned.
Layers are applied one run of key groups after the other: a run is as many groups as have, in all layers together,
`RUN_ROWS_MAX` rows and `RUN_BYTES_MAX` bytes at most, or a single group that has more. So memory does not grow with
the state, but with a run. Every byte is verified before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.checkpoints.metadata import NativeState, SectionRef, StateHandle, StateKind, SubtaskState
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.directory import ChunkRef, read_directory
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.state_file import iter_state, section_schema
from tidegate.storage.subtasks.backend_files import read_native, tables_of_fetched
from tidegate.storage.subtasks.layers import newest_rows

RUN_ROWS_MAX = 1_000_000
RUN_BYTES_MAX = 128 * 1024 * 1024

Adapt = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Brings stored rows into the schema that a reader was promised."""


@dataclass(frozen=True, slots=True)
class StoredSchemas:
    """The columns of the stored rows of a state, oldest first, and those of keys that are gone, where there are any."""

    rows: tuple[pa.Schema, ...]
    removed: pa.Schema | None


@dataclass(frozen=True, slots=True)
class SubtaskStream:
    """One state of one operator in one subtask."""

    store: Store
    subtask: SubtaskState
    uid: OperatorUid
    state: str

    def schemas(self) -> StoredSchemas:
        """What the stored columns are; reads one chunk of each file. CorruptionError, NotFoundError, CodecError."""
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
        """Whether the subtask tells anything of the state."""
        if any(self._is_wanted(section) for handle in self.subtask.state_handles for section in handle.sections):
            return True
        return any(t.state == self.state for native in self._natives() for t in tables_of_fetched(native))

    @property
    def is_layered(self) -> bool:
        """Whether a key may be told of more than once."""
        sections = [(h, s) for h in self.subtask.state_handles for s in h.sections if self._is_wanted(s)]
        holders = {id(handle) for handle, _ in sections}
        return any(s.removed for _, s in sections) or len(holders) + len(list(self._natives())) > 1

    def batches(
        self, schema: pa.Schema, adapt: Adapt, keys: Sequence[str] | None, key_groups: range | None
    ) -> Iterator[pa.RecordBatch]:
        """The rows, each key once, in `schema`; of keyed state those of `key_groups`.

        `keys` are the columns that tell rows of the state apart. ConfigurationError if they are needed and not known;
        errors of storage as of `read_subtask_state`.
        """
        if not (self._is_keyed and self.is_layered):
            for table in self._tables(key_groups):
                yield adapt(table.rows)
            return
        if keys is None:
            raise ConfigurationError(
                f"state {self.state!r} of operator {self.uid!r} lies in layers, and the checkpoint does not say which "
                f"of its columns {schema.names} are its key: an older version wrote it. Name them with keys=[...]"
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
        """The key groups that have rows, in runs that are read at once."""
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
        """How many rows each key group has in all files together, and how many bytes a row has in them."""
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
            # How many rows they have nobody knows; all groups of the files are looked at.
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
