"""Reads the source positions in stored checkpoints, which show the rows of a source that a restore may still need.

The feed of a streaming DataFrame reads them before it deletes rows from its log. Rules:

- It reads the completed checkpoints of one job, and the savepoints of any job, in the job's checkpoint folder and in
  the configured savepoint folder. A savepoint belongs to the user, who may restore it at any time.
- A checkpoint never changes, so each is read once.
- A checkpoint that cannot be read may need any row. No row may be deleted until it is readable or deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tidegate.actors.restore.restore_task import subtasks_of
from tidegate.actors.task.split_positions import positions_from_tables
from tidegate.storage.checkpoints.layout import (
    CheckpointLayout,
    CheckpointPointer,
    parse_checkpoint_name,
    parse_savepoint_name,
)
from tidegate.storage.checkpoints.metadata import read_pointed
from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId, OperatorUid
from tidegate.storage.state.subtask_state import read_subtask_state

_logger = logging.getLogger(__name__)

Positions = Mapping[str, int]
"""The index of the first unprocessed row of each split, by the id of the split."""


@dataclass(frozen=True, slots=True)
class RestingPositions:
    """The positions of one source in the job's checkpoints, oldest first, and in savepoints that contain the source.

    `whole`: all checkpoints and savepoints could be read.
    """

    checkpoints: tuple[Positions, ...]
    savepoints: tuple[Positions, ...]
    whole: bool


class PositionsAtRest:
    """Reads the positions of one source in the stored checkpoints, repeatedly."""

    def __init__(
        self, open_store: OpenStore, root: str, job_id: JobId, uid: OperatorUid, savepoints: str | None = None
    ) -> None:
        self._open_store = open_store
        self._root = root
        self._job_id = job_id
        self._uid = uid
        self._folders = tuple(dict.fromkeys((root, savepoints or root)))
        self._known: dict[CheckpointPointer, Positions | None] = {}
        """The positions in each checkpoint or savepoint that was read. None if it cannot be read."""

    def look(self) -> RestingPositions:
        """Returns the positions in all checkpoints that exist now. Raises StorageError if storage does not
        answer.
        """
        checkpoints = list(self._checkpoints())
        savepoints = list(self._savepoints())
        found = {at: self._known[at] for at in (*checkpoints, *savepoints) if self._is_known(at)}
        self._known = found
        return RestingPositions(
            tuple(p for p in map(found.get, checkpoints) if p is not None),
            tuple(p for p in map(found.get, savepoints) if p),
            all(positions is not None for positions in found.values()),
        )

    def _checkpoints(self) -> Iterator[CheckpointPointer]:
        names = self._open_store(self._root).list(CheckpointLayout(self._job_id).job_dir())
        for number in sorted(filter(None, map(parse_checkpoint_name, names))):
            yield CheckpointPointer(self._root, self._job_id, number)

    def _savepoints(self) -> Iterator[CheckpointPointer]:
        for folder in self._folders:
            for name in self._open_store(folder).list(""):
                named = parse_savepoint_name(name)
                if named is not None:
                    yield CheckpointPointer(join_url(folder, name), *named, savepoint=True)

    def _is_known(self, at: CheckpointPointer) -> bool:
        """Returns whether the positions in a checkpoint are known, and reads them if needed.

        False if the checkpoint is incomplete, void, or deleted.
        """
        if self._known.get(at) is not None:
            return True
        told = at in self._known
        try:
            positions = self._read(at)
        except NotFoundError:
            return False
        except (CorruptionError, CodecError) as error:
            if not told:
                _logger.warning("%s cannot be read, so nothing is deleted that it may need: %s", at, error)
            self._known[at] = None
            return True
        if positions is not None:
            self._known[at] = positions
        return positions is not None

    def _read(self, at: CheckpointPointer) -> Positions | None:
        """Returns the positions in a checkpoint, or None if it is void.

        Raises NotFoundError, CorruptionError or CodecError.
        """
        store = self._open_store(at.root)
        metadata = read_pointed(store, at)
        if metadata.void:
            return None
        if all(info.uid != self._uid for info in metadata.operators):
            return {}
        tables = [
            table
            for subtask in subtasks_of(metadata, self._uid)
            for table in read_subtask_state(store, subtask, self._uid)
        ]
        return {position.split.split_id: position.next_offset for position in positions_from_tables(tables)}
