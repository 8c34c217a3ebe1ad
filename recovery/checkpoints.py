"""Checkpoints as people and restores see them: which there are, whether they are whole, and what is in them.

Rules: only a complete, non-void checkpoint is ever listed; a damaged one is listed as such, and passed over
for the one before it by `latest`, with a warning that says why. Verifying reads every byte that the
checkpoint refers to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError
from tidegate.storage.filesystem import open_store
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid
from tidegate.storage.layout import CheckpointLayout, parse_checkpoint_name, parse_pointer, pointer
from tidegate.storage.metadata import CheckpointMetadata
from tidegate.storage.metadata_file import read_metadata
from tidegate.storage.state import StateTable
from tidegate.storage.state_file import read_state, verify_state
from tidegate.storage.store import Store

_logger = logging.getLogger(__name__)

OpenStore = Callable[[str], Store]
"""Opens the store at a url; for stores that need credentials of their own."""


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One completed checkpoint. `size_bytes` counts state; -1 (and `triggered_at_ms` as well) if unreadable.

    `verified` is None when only the metadata was read, True when every file was, False when something is
    damaged; `reason` then says what.
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
    """Path of the checkpoint that the job itself was restored from."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What `verify` found: `ok`, or the problems in words, after reading so many files and bytes."""

    path: str
    ok: bool
    problems: tuple[str, ...]
    files: int
    bytes: int


def list_checkpoints(
    url: str, job: str | None = None, *, open_store: OpenStore = open_store
) -> list[CheckpointSummary]:
    """All completed checkpoints under a checkpoint root, of every job or of the one with this name or id.

    Oldest first. State files are not read. Raises StorageError.
    """
    store = open_store(url)
    ordered: list[tuple[int, CheckpointSummary]] = []
    for job_id in _job_ids(store):
        # A checkpoint whose time can't be read takes its place by its number, after the one before it.
        at_ms = 0
        for checkpoint_id in _checkpoint_ids(store, job_id):
            summary = _summarise(store, job_id, checkpoint_id)
            if summary is None or job not in (None, summary.job_id, summary.job_name):
                continue
            at_ms = max(at_ms, summary.triggered_at_ms)
            ordered.append((at_ms, summary))
    ordered.sort(key=lambda item: (item[0], item[1].job_id, item[1].checkpoint_id))
    return [summary for _, summary in ordered]


def latest(url: str, job: str | None = None, *, open_store: OpenStore = open_store) -> CheckpointSummary | None:
    """The newest checkpoint of which every byte verifies, or None if there is none.

    A job that another one was restored from comes after it, whatever it may still have completed: its tables belong to
    its successor. Damaged checkpoints are passed over, with a warning in the log. Raises StorageError for faults of the
    storage.
    """
    summaries = list_checkpoints(url, job, open_store=open_store)
    later = _jobs_after(summaries)
    summaries.sort(key=lambda summary: -later.get(summary.job_id, 0))
    for summary in reversed(summaries):
        report = verify(summary.path, open_store=open_store)
        if report.ok:
            return replace(summary, verified=True)
        _logger.warning(
            "Checkpoint %s is damaged and passed over for the one before it: %s",
            summary.path,
            "; ".join(report.problems),
        )
    return None


def _jobs_after(summaries: Sequence[CheckpointSummary]) -> dict[JobId, int]:
    """How many jobs follow on a job in its longest line of restores; jobs without a successor are left out."""
    origin = {s.job_id: parse_pointer(s.restored_from)[1] for s in summaries if s.restored_from is not None}
    after: dict[JobId, int] = {}
    for last in origin:
        job_id, distance = last, 0
        # A line is no longer than there are jobs.
        while job_id in origin and distance < len(origin):
            job_id, distance = origin[job_id], distance + 1
            after[job_id] = max(after.get(job_id, 0), distance)
    return after


def inspect(path: str) -> CheckpointMetadata:
    """Metadata of the checkpoint at `<root>/<job>/chk-N`.

    Raises ConfigurationError for a path that names no checkpoint, NotFoundError if it was never completed,
    CorruptionError for damage.
    """
    root, job_id, checkpoint_id = parse_pointer(path)
    return read_metadata(open_store(root), job_id, checkpoint_id)


def verify(path: str, *, open_store: OpenStore = open_store) -> VerificationReport:
    """Read every file of the checkpoint at `<root>/<job>/chk-N` and compare it with its checksum.

    Damage and missing files are problems in the report, not exceptions; those are ConfigurationError for a
    path that names no checkpoint, and StorageError for a storage that does not answer.
    """
    root, job_id, checkpoint_id = parse_pointer(path)
    store = open_store(root)
    metadata_path = CheckpointLayout(job_id).metadata(checkpoint_id)
    try:
        metadata = read_metadata(store, job_id, checkpoint_id)
        size_bytes = len(store.read(metadata_path))
    except (CorruptionError, CodecError, NotFoundError) as error:
        return VerificationReport(path, False, (str(error),), 0, 0)
    problems: list[str] = []
    if metadata.void:
        problems.append(f"checkpoint {checkpoint_id} was given up and never completed")
    files = 1
    for subtask in metadata.subtasks:
        if subtask.handle is None:
            continue
        try:
            verify_state(store, subtask.handle)
        except (CorruptionError, CodecError, NotFoundError) as error:
            problems.append(f"{subtask.vertex} subtask {subtask.subtask}: {error}")
        if subtask.handle.path is not None:
            files += 1
            size_bytes += subtask.handle.size_bytes
    return VerificationReport(path, not problems, tuple(problems), files, size_bytes)


def load_operator_state(
    store: Store, metadata: CheckpointMetadata, uid: OperatorUid, key_groups: range | None = None
) -> list[StateTable]:
    """The state of one operator from all subtasks' bytes, in the order of the subtasks, verified.

    With `key_groups`, keyed tables hold only the rows of these groups, and tables without such rows are left
    out. Empty if the checkpoint has no state of this uid. Raises CorruptionError, NotFoundError.
    """
    tables: list[StateTable] = []
    for subtask in sorted(metadata.subtasks, key=lambda s: (s.vertex, s.subtask)):
        if subtask.handle is not None:
            tables += read_state(store, subtask.handle, uid, key_groups)
    return tables


def _job_ids(store: Store) -> Iterator[JobId]:
    return (JobId(name) for name in store.list(""))


def _checkpoint_ids(store: Store, job_id: JobId) -> list[CheckpointId]:
    names = store.list(CheckpointLayout(job_id).job_dir())
    return sorted(found for found in map(parse_checkpoint_name, names) if found is not None)


def _summarise(store: Store, job_id: JobId, checkpoint_id: CheckpointId) -> CheckpointSummary | None:
    path = pointer(store.url, job_id, checkpoint_id)
    try:
        metadata = read_metadata(store, job_id, checkpoint_id)
    except NotFoundError:
        return None
    except (CorruptionError, CodecError) as error:
        # The name is the part of the id before the random digits, see JobId.
        name = job_id.rpartition("-")[0] or job_id
        return CheckpointSummary(path, job_id, name, checkpoint_id, -1, -1, 0, False, str(error))
    if metadata.void:
        return None
    return CheckpointSummary(
        path=path,
        job_id=job_id,
        job_name=metadata.job_name,
        checkpoint_id=checkpoint_id,
        triggered_at_ms=metadata.triggered_at_ms,
        size_bytes=metadata.size_bytes,
        subtasks=len(metadata.subtasks),
        restored_from=metadata.restored_from,
    )
