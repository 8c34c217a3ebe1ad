"""Finds the columns of all states of an operator in a checkpoint, without reading the rows.

Rules:

- The columns of a state stand in each of its chunks, and in the description of a backend that writes files of its own.
- One file of each folder is read for a state: the subtasks of one checkpoint write the same columns. Bytes that lie in
  `_metadata` are always looked at, because that costs no read.
- Subtasks that had finished are left out, as a restore leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from posixpath import dirname

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import SectionRef, SubtaskState
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.state_file import section_schema
from tidegate.storage.subtasks.backend_files import tables_of_fetched


def stored_columns(store: Store, subtasks: Sequence[SubtaskState], uid: OperatorUid) -> list[StateTable]:
    """A table without rows for each state and form of its columns, oldest layers first.

    `subtasks`: those that ran the operator. Raises CorruptionError, NotFoundError, CodecError and StorageError.
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
