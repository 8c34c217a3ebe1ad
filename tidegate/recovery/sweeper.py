"""Finds orphans, and deletes them on request: files in a job's folder that remain after crashes and are not needed.

`tidegate checkpoints sweep` calls it. Rules:

- These files are needed: all files of completed checkpoints under the root, of any job; data files of collected rows
  that the table's log, a checkpoint or a savepoint names; staged rows, while a checkpoint or savepoint exists whose
  chain of restores contains their job. If a checkpoint cannot be read, no file that it might need is an orphan.
- A file that was written within the grace period is not an orphan yet: a checkpoint may soon refer to it.
- Only folders and names that tidegate creates are examined, and only the folders of a job that has an event log.
- Tasks write changelogs earlier than checkpoints. A changelog file is an orphan only if a later attempt has completed a
  checkpoint, or the job is certainly dead.
- A job that may be running, according to its lease, is not swept.
- Before a file of an incomplete checkpoint is deleted, the checkpoint is voided, so that it cannot complete afterwards.
  Then everything is examined again.
- A sweep may stop at any point, and can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tidegate.recovery.deletion_permits import GRACE_MS_DEFAULT, WalkableStore, permit_orphans
from tidegate.recovery.restore_chain import COLLECT, SOURCE
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.layout import (
    CheckpointLayout,
    CheckpointPointer,
    parse_changelog_file_name,
    parse_checkpoint_name,
    parse_pointer,
    parse_savepoint_name,
    parse_sink_file_name,
)
from tidegate.storage.checkpoints.metadata import METADATA_VERSION, CheckpointMetadata, create_metadata, read_pointed
from tidegate.storage.checkpoints.permits import OrphanPermit
from tidegate.storage.errors import AlreadyExistsError, CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import FileSystemStore, join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, name_in
from tidegate.storage.tables.table_files import DATA_FOLDER
from tidegate.storage.tables.table_log import TableLog

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A file that is not needed. `path` is relative to the root."""

    path: str
    size_bytes: int
    modified_at_ms: int | None = None


def is_job(store: Store, job_id: JobId) -> bool:
    """Returns whether there is a job with this id: only a job has an event log."""
    return bool(EventLog(store, job_id).indices())


def find_orphans(
    store: WalkableStore,
    job_id: JobId,
    *,
    written_before_ms: int | None = None,
    dead: bool = False,
    savepoints: Iterable[Store] = (),
    open_store: OpenStore = open_store,
) -> list[Orphan]:
    """Returns the files of a job that are not needed, sorted by path. Empty if there is no such job.

    `written_before_ms` (ms since the epoch) selects older files. With `dead` it also returns files that the job might
    need if it were running. Savepoints are searched under the root, and under each of `savepoints`. Raises
    StorageError.
    """
    layout = CheckpointLayout(job_id)
    # List files first, so that files of a checkpoint that completes meanwhile count as referred to.
    files = [replace(file, path=f"{layout.job_dir()}/{file.path}") for file in store.walk(layout.job_dir())]
    candidates = [
        file
        for file in files
        if written_before_ms is None or (file.modified_at_ms is not None and file.modified_at_ms < written_before_ms)
    ]
    if not candidates or not is_job(store, job_id):
        return []
    known = _read_all(store, savepoints, open_store)
    sweep = _Sweep(store, job_id, known, open_store, dead)
    return [Orphan(f.path, f.size_bytes, f.modified_at_ms) for f in candidates if sweep.is_orphan(f.path)]


def sweep(
    store: WalkableStore,
    job_id: JobId,
    *,
    now_ms: int,
    grace_ms: int = GRACE_MS_DEFAULT,
    dry_run: bool = True,
    force: bool = False,
    savepoints: Sequence[Store] = (),
    open_store: OpenStore = open_store,
) -> list[Orphan]:
    """Returns the orphans of a job, and deletes them if `dry_run` is False.

    `now_ms` is in ms since the epoch. With `force` it sweeps a job whose lease has not expired: the caller guarantees
    that it is dead. Without `dry_run`, raises ConfigurationError for a job that may be running. Raises StorageError.
    """

    def found() -> list[Orphan]:
        return find_orphans(
            store,
            job_id,
            written_before_ms=now_ms - grace_ms,
            dead=force,
            savepoints=savepoints,
            open_store=open_store,
        )

    orphans = found()
    if dry_run:
        return orphans
    permit = permit_orphans(store, job_id, now_ms, grace_ms, force=force)
    _void_incomplete(store, permit, orphans, now_ms)
    still = set(found())
    orphans = [orphan for orphan in orphans if orphan in still]
    _delete_orphans(store, permit, orphans)
    return orphans


def _delete_orphans(store: Store, permit: OrphanPermit, orphans: Iterable[Orphan]) -> None:
    for orphan in orphans:
        store.delete(orphan.path)
    _delete_unfinished(store, permit.job_id)


def _delete_unfinished(store: Store, job_id: JobId) -> None:
    """Deletes temporary files of interrupted checkpoint writes, except below `taskowned`, where other jobs may
    write.
    """
    if not isinstance(store, FileSystemStore):
        return
    layout = CheckpointLayout(job_id)
    store.delete_temporary(layout.shared_dir())
    for number in filter(None, map(parse_checkpoint_name, store.list(layout.job_dir()))):
        store.delete_temporary(layout.checkpoint_dir(number))


def _void_incomplete(store: Store, permit: OrphanPermit, orphans: Iterable[Orphan], now_ms: int) -> None:
    """Voids the incomplete checkpoints whose files will be deleted, so that no coordinator completes them."""
    job_id = permit.job_id
    layout = CheckpointLayout(job_id)
    for number in sorted({n for n in (_checkpoint_of(orphan.path, job_id) for orphan in orphans) if n is not None}):
        if store.exists(layout.metadata(number)):
            continue
        tombstone = CheckpointMetadata(
            METADATA_VERSION,
            job_id,
            name_in(job_id),
            number,
            AttemptNumber(0),
            now_ms,
            operators=(),
            subtasks=(),
            void=True,
        )
        try:
            create_metadata(store, tombstone)
        except AlreadyExistsError:
            _logger.info("checkpoint %d of %s was decided meanwhile", number, job_id)


def _checkpoint_of(path: str, job_id: JobId) -> CheckpointId | None:
    """Returns the checkpoint for which a file in a job's folder was written, or None if it belongs to none."""
    layout = CheckpointLayout(job_id)
    folder = layout.shared_dir() if path.startswith(f"{layout.shared_dir()}/") else layout.job_dir()
    parts = path.removeprefix(f"{folder}/").split("/")
    return parse_checkpoint_name(parts[0]) if len(parts) > 1 else None


@dataclass(slots=True)
class _Known:
    """The metadata of all checkpoints and savepoints that may refer to files of the job, for finding orphans."""

    complete: dict[tuple[JobId, CheckpointId], CheckpointMetadata] = field(default_factory=dict)
    savepoints: list[CheckpointMetadata] = field(default_factory=list)
    unreadable: list[CheckpointPointer] = field(default_factory=list)

    @property
    def metadata(self) -> list[CheckpointMetadata]:
        """The metadata of all checkpoints and savepoints that can be restored."""
        return [*self.complete.values(), *self.savepoints]


def _read_all(store: Store, savepoint_stores: Iterable[Store], open_store: OpenStore) -> _Known:
    known = _Known()
    for place in (store, *savepoint_stores):
        for name in place.list(""):
            found = parse_savepoint_name(name)
            if found is not None:
                at = CheckpointPointer(join_url(place.url, name), *found, savepoint=True)
                metadata = _read(open_store(at.root), at, known)
                if metadata is not None:
                    known.savepoints.append(metadata)
    for job in map(JobId, store.list("")):
        for number in filter(None, map(parse_checkpoint_name, store.list(CheckpointLayout(job).job_dir()))):
            metadata = _read(store, CheckpointPointer(store.url, job, number), known)
            if metadata is not None:
                known.complete[job, number] = metadata
    return known


def _read(store: Store, at: CheckpointPointer, known: _Known) -> CheckpointMetadata | None:
    """Returns the metadata of a completed checkpoint, or None if it is void, missing or unreadable."""
    try:
        metadata = read_pointed(store, at)
    except NotFoundError:
        return None
    except (CorruptionError, CodecError) as error:
        _logger.warning("%s cannot be read, so what it may need is kept: %s", at, error)
        known.unreadable.append(at)
        return None
    return None if metadata.void else metadata


class _Sweep:
    """Decides for each file in the folder of one job whether it is an orphan."""

    def __init__(self, store: Store, job_id: JobId, known: _Known, open_store: OpenStore, dead: bool) -> None:
        self._store = store
        self._job_id = job_id
        self._known = known
        self._open_store = open_store
        self._layout = CheckpointLayout(job_id)
        complete = known.complete.values()
        self._paths = {path for metadata in complete for subtask in metadata.subtasks for path in subtask.paths}
        attempts = (metadata.attempt for (job, _), metadata in known.complete.items() if job == job_id)
        self._attempt = None if dead else max(attempts, default=AttemptNumber(0))
        """Attempt of the newest checkpoint. This attempt and later ones may still use their changelogs.

        None if the job is dead.
        """
        self._unreadable = {at.checkpoint_id for at in known.unreadable if at.job_id == job_id and not at.savepoint}
        # The URL of the table may spell the root differently, but the path after the root is the same.
        own, mark = self._layout.taskowned_dir(), f"/{self._layout.taskowned_dir()}/"
        self._data_files = {
            f"{own}/{committable.table.rpartition(mark)[2].rstrip('/')}/{file.path}"
            for metadata in known.metadata
            for subtask in metadata.subtasks
            for committable in subtask.committables
            if mark in committable.table
            for file in committable.files
        }
        self._goes_back_to = _goes_back_to(job_id, known)
        self._committed: dict[str, frozenset[str] | None] = {}

    def is_orphan(self, path: str) -> bool:
        """Returns whether a file is not needed. False for files that tidegate did not create."""
        taskowned = f"{self._layout.taskowned_dir()}/"
        if path.startswith(taskowned):
            return self._is_orphan_of_tasks(path, *path.removeprefix(taskowned).split("/", 1))
        if path.startswith(f"{self._layout.changelog_dir()}/"):
            written = parse_changelog_file_name(path.rpartition("/")[2])
            return self._is_left(path, None if written is None else written[2])
        if path.startswith(f"{self._layout.sinks_dir()}/"):
            return self._is_left(path, parse_sink_file_name(path.rpartition("/")[2]))
        number = _checkpoint_of(path, self._job_id)
        if number is None or path in self._paths or path == self._layout.metadata(number):
            return False
        if path.startswith(f"{self._layout.shared_dir()}/"):
            # Any checkpoint may refer to it.
            return not self._known.unreadable
        return number not in self._unreadable

    def _is_left(self, path: str, attempt: AttemptNumber | None) -> bool:
        """Returns whether a file of an attempt is not needed: no checkpoint refers to it, and no later
        checkpoint can.
        """
        if path in self._paths or self._known.unreadable or attempt is None:
            return False
        return self._attempt is None or attempt < self._attempt

    def _is_orphan_of_tasks(self, path: str, name: str, below: str = "") -> bool:
        if self._known.unreadable or not below:
            return False
        if name.startswith(SOURCE):
            return not self._goes_back_to
        own_data = f"{DATA_FOLDER}/{self._job_id}/"
        if not name.startswith(COLLECT) or not below.startswith(own_data):
            return False
        committed = self._committed_in(path.removesuffix(f"/{below}"))
        return committed is not None and below not in committed and path not in self._data_files

    def _committed_in(self, folder: str) -> frozenset[str] | None:
        """Returns the data files in the log of the table in a folder, or None if the log cannot be read."""
        if folder not in self._committed:
            try:
                log = TableLog(self._open_store(join_url(self._store.url, folder)))
                self._committed[folder] = log.referenced_paths()
            except (CorruptionError, CodecError) as error:
                _logger.warning("the log of %s cannot be read, so its files are kept: %s", folder, error)
                self._committed[folder] = None
        return self._committed[folder]


def _goes_back_to(job_id: JobId, known: _Known) -> bool:
    """Returns whether a checkpoint or savepoint needs the staged data of this job.

    The checkpoint may belong to this job, or to a job restored from it.
    """
    # A relocated savepoint contains the staged data.
    needing = [metadata for metadata in known.metadata if metadata.carried is None]
    restored_from = {m.job_id: parse_pointer(m.restored_from) for m in needing if m.restored_from is not None}
    known_jobs = {metadata.job_id for metadata in needing}
    for job in known_jobs:
        at: JobId | None = job
        # A chain is not longer than the number of jobs. Damaged metadata could contain a cycle.
        for _ in range(len(known_jobs) + 1):
            if at == job_id:
                return True
            origin = restored_from.get(at) if at is not None else None
            if origin is None:
                # The job in between has no checkpoints left, so the jobs before it are unknown.
                if at not in known_jobs:
                    return True
                break
            at = origin.job_id
    return False
