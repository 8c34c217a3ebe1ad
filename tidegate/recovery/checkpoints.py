"""Lists, verifies and reads stored checkpoints, for users and for jobs that are restored.

Rules:

- Only completed checkpoints are listed, never an aborted one.
- A damaged checkpoint is listed as damaged. `latest` skips it, uses the one before it, and logs a warning with the
  reason.
- Verifying a checkpoint reads every byte of every file to which it refers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tidegate.storage.checkpoints.layout import (
    CheckpointLayout,
    CheckpointPointer,
    parse_checkpoint_name,
    parse_pointer,
    parse_savepoint_name,
)
from tidegate.storage.checkpoints.lease import read_lease
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, NativeFile, StateHandle, read_pointed
from tidegate.storage.errors import DAMAGE, CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, name_in
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.state_file import verify_native, verify_state
from tidegate.storage.state.subtask_state import read_subtask_state

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One completed checkpoint or savepoint.

    `size_bytes` is the size of the state, including in-flight data. `triggered_at_ms` is in ms since the epoch. Both
    are -1 if the metadata cannot be read.

    `verified` is None if only the metadata was read, True if every file was verified, and False if something is
    damaged. `reason` then describes the damage.
    """

    path: str
    job_id: JobId
    job_name: str
    checkpoint_id: CheckpointId
    triggered_at_ms: int
    size_bytes: int
    subtasks: int
    verified: bool | None = None
    reason: str | None = None
    restored_from: str | None = None
    """Path of the checkpoint from which the job itself was restored, or None."""
    savepoint: bool = False
    """True for a savepoint, which is self-contained and never deleted by a job."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of `verify`: whether everything is undamaged, the problems as text, and how many files and bytes
    were read.
    """

    path: str
    ok: bool
    problems: tuple[str, ...]
    files: int
    bytes: int


def list_checkpoints(
    url: str, job: str | None = None, *, open_store: OpenStore = open_store
) -> list[CheckpointSummary]:
    """Returns all completed checkpoints and savepoints directly under a root, oldest first.

    `job` selects the job with this name or id. A savepoint is listed before the checkpoint of which it is a copy. State
    files are not read. Raises StorageError.
    """
    store = open_store(url)
    ordered: list[tuple[int, CheckpointSummary]] = []
    names = store.list("")
    for at in _savepoints(store, names):
        summary = _summarise(open_store(at.root), at, store)
        if summary is not None and job in (None, summary.job_id, summary.job_name):
            ordered.append((summary.triggered_at_ms, summary))
    for job_id in map(JobId, names):
        # A checkpoint whose time cannot be read is sorted by its number, after the one before it.
        at_ms = 0
        for checkpoint_id in _checkpoint_ids(store, job_id):
            summary = _summarise(store, CheckpointPointer(store.url, job_id, checkpoint_id), store)
            if summary is None or job not in (None, summary.job_id, summary.job_name):
                continue
            at_ms = max(at_ms, summary.triggered_at_ms)
            ordered.append((at_ms, summary))
    ordered.sort(key=lambda item: (item[0], item[1].job_id, item[1].checkpoint_id, not item[1].savepoint))
    return [summary for _, summary in ordered]


def latest(url: str, job: str | None = None, *, open_store: OpenStore = open_store) -> CheckpointSummary | None:
    """Returns the newest checkpoint or savepoint in which every byte is verified, or None if there is none.

    If a job was restored from another one, its checkpoints are preferred, even if the other job completed newer ones,
    because the tables belong to the later job. Damaged checkpoints are skipped, with a warning in the log. Raises
    StorageError if the storage does not answer.
    """
    return latest_and_damaged(url, job, open_store=open_store)[0]


def latest_and_damaged(
    url: str, job: str | None = None, *, open_store: OpenStore = open_store
) -> tuple[CheckpointSummary | None, tuple[CheckpointSummary, ...]]:
    """Returns the result of `latest`, and the damaged checkpoints that it skipped, with reasons, newest first."""
    damaged: list[CheckpointSummary] = []
    summaries = list_checkpoints(url, job, open_store=open_store)
    later = _jobs_after(summaries)
    summaries.sort(key=lambda summary: -later.get(summary.job_id, 0))
    for summary in reversed(summaries):
        report = verify(summary.path, open_store=open_store)
        if report.ok:
            return replace(summary, verified=True), tuple(damaged)
        reason = "; ".join(report.problems)
        _logger.warning("Checkpoint %s is damaged and skipped for the one before it: %s", summary.path, reason)
        damaged.append(replace(summary, verified=False, reason=reason))
    return None, tuple(damaged)


def _jobs_after(summaries: Sequence[CheckpointSummary]) -> dict[JobId, int]:
    """Returns, for each job, the number of jobs after it in its longest chain of restores. Jobs without a later job are
    omitted.
    """
    origin = {s.job_id: parse_pointer(s.restored_from).job_id for s in summaries if s.restored_from is not None}
    after: dict[JobId, int] = {}
    for last in origin:
        job_id, distance = last, 0
        # A chain is not longer than the number of jobs. Damaged metadata could contain a cycle.
        while job_id in origin and distance < len(origin):
            job_id, distance = origin[job_id], distance + 1
            after[job_id] = max(after.get(job_id, 0), distance)
    return after


def job_name(store: Store, job_id: JobId) -> str:
    """Returns the name of a job under a root: from its lease, or else the part of its id that was made from the
    name.
    """
    try:
        lease = read_lease(store, job_id)
    except CorruptionError:
        lease = None
    return lease.job_name if lease is not None else name_in(job_id)


def is_of_job(store: Store, job_id: JobId, job: str | None) -> bool:
    """Returns whether a folder under a root belongs to the job with this name or id. None matches any job."""
    return job is None or job in (job_id, name_in(job_id)) or job == job_name(store, job_id)


def verify(path: str, *, open_store: OpenStore = open_store) -> VerificationReport:
    """Reads every file of a checkpoint or savepoint, and compares it with its checksum. `path` is as for `inspect`.

    Damaged and missing files are problems in the report, not exceptions. Raises ConfigurationError if `path` is not the
    path of a checkpoint, and StorageError if the storage does not answer.
    """
    at = parse_pointer(path)
    store = open_store(at.root)
    try:
        metadata = read_pointed(store, at)
        size_bytes = len(store.read(at.metadata))
    except DAMAGE as error:
        return VerificationReport(path, False, (str(error),), 0, 0)
    problems: list[str] = []
    if metadata.void:
        problems.append(f"checkpoint {at.checkpoint_id} was given up and never completed")
    files = 1
    for subtask in metadata.subtasks:
        everything: tuple[StateHandle | NativeFile, ...] = (*subtask.handles, *subtask.native_files)
        for stored in everything:
            try:
                if isinstance(stored, NativeFile):
                    verify_native(store, stored)
                else:
                    verify_state(store, stored)
            except DAMAGE as error:
                problems.append(f"{subtask.vertex} subtask {subtask.subtask}: {error}")
            if stored.path is not None:
                files += 1
                size_bytes += stored.size_bytes
    for file in metadata.carried or ():
        try:
            verify_native(store, file)
        except DAMAGE as error:
            problems.append(f"its copy of a file of its job: {error}")
        files += 1
        size_bytes += file.size_bytes
    return VerificationReport(path, not problems, tuple(problems), files, size_bytes)


def load_operator_state(
    store: Store, metadata: CheckpointMetadata, uid: OperatorUid, key_groups: range | None = None
) -> list[StateTable]:
    """Returns the verified state of one operator: the tables of all subtasks, ordered by layer, then by subtask.

    With `key_groups`, keyed tables have only the rows of these groups, and tables without such rows are omitted. Empty
    if the checkpoint has no state with this uid. Raises CorruptionError, NotFoundError, StorageError.
    """
    tables: list[StateTable] = []
    for subtask in sorted(metadata.subtasks, key=lambda s: (s.vertex, s.subtask)):
        tables += read_subtask_state(store, subtask, uid, key_groups)
    return sorted(tables, key=lambda table: table.layer)


def _savepoints(store: Store, names: Sequence[str]) -> Iterator[CheckpointPointer]:
    for name in names:
        found = parse_savepoint_name(name)
        if found is not None:
            yield CheckpointPointer(join_url(store.url, name), *found, savepoint=True)


def _checkpoint_ids(store: Store, job_id: JobId) -> list[CheckpointId]:
    names = store.list(CheckpointLayout(job_id).job_dir())
    return sorted(found for found in map(parse_checkpoint_name, names) if found is not None)


def _summarise(store: Store, at: CheckpointPointer, names: Store) -> CheckpointSummary | None:
    """Returns the summary of a checkpoint from its metadata. None if it has no metadata or is void.

    `names` is the store with the job's lease.
    """
    path, job_id = str(at), at.job_id
    try:
        metadata = read_pointed(store, at)
    except NotFoundError:
        return None
    except (CorruptionError, CodecError) as error:
        return CheckpointSummary(
            path,
            job_id,
            job_name(names, job_id),
            at.checkpoint_id,
            -1,
            -1,
            0,
            False,
            str(error),
            savepoint=at.savepoint,
        )
    if metadata.void:
        return None
    return CheckpointSummary(
        path=path,
        job_id=job_id,
        job_name=metadata.job_name,
        checkpoint_id=at.checkpoint_id,
        triggered_at_ms=metadata.triggered_at_ms,
        size_bytes=metadata.size_bytes,
        subtasks=len(metadata.subtasks),
        restored_from=metadata.restored_from,
        savepoint=at.savepoint,
    )
