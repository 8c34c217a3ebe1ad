"""`relocate`: copies a savepoint, with everything that it needs, to another place, possibly in another kind of storage.

    <target>/savepoint-<job>-17/...                     the savepoint's own files, under the same names
    <target>/savepoint-<job>-17/<job>/taskowned/...     data staged and collected for the job, or an earlier one
    <target>/savepoint-<job>-17/<job>/chk-<n>/_metadata earlier checkpoints whose sink files may not be committed yet
    <target>/savepoint-<job>-17/_metadata               created last: before that the savepoint does not exist

Rules:

- Every byte is verified while it is copied. Memory contains only a limited part of a file.
- Nothing at the old place is changed. Files in output tables are not copied.
- An interrupted copy can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.api.submission.restoring import check_not_given_up, checkpoints_up_to
from tidegate.api.tables.output_tables import CollectedRows
from tidegate.connectors.staged_parquet import MANIFEST_PATH, read_manifest
from tidegate.recovery.restore_chain import COLLECT, SOURCE, restore_chain, taskowned_path, taskowned_url
from tidegate.recovery.savepoints import complete_savepoint, copy_subtask
from tidegate.storage.checkpoints.layout import (
    METADATA_NAME,
    CheckpointLayout,
    parse_pointer,
    savepoint_name,
)
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    DataFile,
    NativeFile,
    SubtaskState,
    encode_metadata,
    read_pointed,
)
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, NotFoundError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import JobId, OperatorUid
from tidegate.storage.tables.table_copy import copy_file, copy_table
from tidegate.storage.tables.table_log import TableLog


def relocate(savepoint: str, target: str, *, open_store: OpenStore = open_store) -> str:
    """Copies a savepoint into its own folder under `target`, and returns its path there.

    The copy no longer needs the old place. Raises ConfigurationError for a path that is not a savepoint, or one that
    its job has aborted, NotFoundError if something that it needs is missing, CorruptionError for damage,
    AlreadyExistsError if `target` already has a savepoint with its name, StorageError.
    """
    at = parse_pointer(savepoint)
    if not at.savepoint:
        raise ConfigurationError(
            f"{savepoint!r} is a checkpoint, which belongs to its job: take a savepoint with job.savepoint(...), or "
            "make one of it with recovery.SavepointWriter(base=...)"
        )
    source = open_store(at.root)
    metadata = read_pointed(source, at)
    check_not_given_up(metadata, repr(savepoint), open_store)
    place = open_store(join_url(open_store(target).url, savepoint_name(at.job_id, at.checkpoint_id)))
    if METADATA_NAME in place.list(""):
        raise AlreadyExistsError(
            f"{place.url} is a savepoint already, and is not overwritten: choose another folder, or delete it"
        )
    restore = RestorePoint(at.root, at.job_id, at.checkpoint_id, metadata.final, savepoint=True)
    covering = checkpoints_up_to(restore, metadata, open_store)
    line = list(restore_chain(at, metadata, at.root, open_store))
    move = _Move(at.job_id, place, covering, line, open_store)
    subtasks = tuple(copy_subtask(source, place, subtask, lambda path: path) for subtask in metadata.subtasks)
    uids = [info.uid for info in metadata.operators]
    carried = [file for uid in uids for file in move.source(uid)]
    carried += [file for uid in uids for file in move.collected(uid)]
    tables = move.tables
    covered = [older for older in covering[:-1] if any(subtask.committables for subtask in older.subtasks)]
    carried += [move.earlier(older, tables) for older in covered]
    moved = replace(
        metadata,
        subtasks=tuple(_placed(subtask, tables) for subtask in subtasks),
        origin_root=None,
        carried=tuple(carried),
    )
    complete_savepoint(place, moved)
    return place.url


@dataclass(slots=True)
class _Move:
    """Copies the data of earlier jobs that a savepoint needs.

    `line` lists these jobs, beginning with the job that took the savepoint.
    """

    job_id: JobId
    place: Store
    covering: list[CheckpointMetadata]
    line: list[tuple[str, JobId]]
    open_store: OpenStore

    @property
    def tables(self) -> Mapping[str, str]:
        """Returns, for each table of collected rows, its old URL, and the placeholder that replaces the URL in the
        copy.
        """
        uids = {info.uid for metadata in self.covering for info in metadata.operators}
        return {
            self.open_store(taskowned_url(root, job_id, COLLECT, uid)).url: f"{CollectedRows.PREFIX}{uid}"
            for root, job_id in self.line
            for uid in uids
        }

    def source(self, uid: OperatorUid) -> Iterator[NativeFile]:
        """Copies the data that was staged for a source, from the first job in `line` that has any.

        Yields the copied files.
        """
        folder = taskowned_path(self.job_id, SOURCE, uid)
        for root, job_id in self.line:
            store = self.open_store(taskowned_url(root, job_id, SOURCE, uid))
            try:
                manifest = read_manifest(store)
            except NotFoundError:
                continue
            target = self.open_store(join_url(self.place.url, folder))
            for staged in manifest.files:
                file = NativeFile(staged.path, staged.path, staged.size_bytes, staged.checksum)
                yield _below(folder, copy_file(store, target, file))
            data = store.read(MANIFEST_PATH)
            target.write(MANIFEST_PATH, (data,))
            yield _below(folder, NativeFile(MANIFEST_PATH, MANIFEST_PATH, len(data), checksum_of(data)))
            return

    def collected(self, uid: OperatorUid) -> Iterator[NativeFile]:
        """Copies the rows of a `collect()` sink: the committed ones, and the ones that a checkpoint covers.

        Yields the copied files.
        """
        folder = taskowned_path(self.job_id, COLLECT, uid)
        for root, job_id in self.line:
            store = self.open_store(taskowned_url(root, job_id, COLLECT, uid))
            if TableLog(store).exists():
                target = self.open_store(join_url(self.place.url, folder))
                for file in copy_table(store, target, self._uncommitted(store.url, uid)):
                    yield _below(folder, file)
                return

    def earlier(self, older: CheckpointMetadata, tables: Mapping[str, str]) -> NativeFile:
        """Copies the part of an earlier checkpoint that a restore needs: the list of its sink files. Returns the copied
        file.
        """
        subtasks = (SubtaskState(s.vertex, s.subtask, None, s.committables, s.finished) for s in older.subtasks)
        stripped = replace(older, subtasks=tuple(_placed(subtask, tables) for subtask in subtasks), hooks=())
        path = CheckpointLayout(older.job_id).metadata(older.checkpoint_id)
        data = encode_metadata(stripped)
        self.place.write(path, (data,))
        return NativeFile(METADATA_NAME, path, len(data), checksum_of(data))

    def _uncommitted(self, url: str, uid: OperatorUid) -> Iterator[DataFile]:
        known = (url, f"{CollectedRows.PREFIX}{uid}")
        committables = (c for metadata in self.covering for s in metadata.subtasks for c in s.committables)
        return (file for c in committables if c.table in known for file in c.files)


def _placed(subtask: SubtaskState, tables: Mapping[str, str]) -> SubtaskState:
    committables = (replace(c, table=tables.get(c.table, c.table)) for c in subtask.committables)
    return replace(subtask, committables=tuple(committables))


def _below(folder: str, file: NativeFile) -> NativeFile:
    return replace(file, name=file.path.rpartition("/")[2], path=f"{folder}/{file.path}")
