"""The chain of jobs that were restored from one another. The last job reads data that the first one has staged.

    <root>/<job>/taskowned/source-<uid>    a source that was written to storage when its job was submitted
    <root>/<job>/taskowned/collect-<uid>   the rows of `collect()`

A savepoint that was relocated has copies of these folders. Then its own folder is the root, and the chain ends there.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.storage.checkpoints.layout import CheckpointLayout, CheckpointPointer, escape, parse_pointer
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, read_pointed
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId, OperatorUid

CHAIN_MAX = 1_000
SOURCE, COLLECT = "source-", "collect-"


def restore_chain(
    at: CheckpointPointer, metadata: CheckpointMetadata, own_root: str, open_store: OpenStore
) -> Iterator[tuple[str, JobId]]:
    """Yields the jobs of a checkpoint as (root, job id): the job that took it, the job from which that one was
    restored, ...

    `own_root` is used as the root of a job whose root is unknown. Raises ConfigurationError for a chain of more than
    1,000 jobs, CorruptionError, CodecError, StorageError.
    """
    yield metadata.origin_root or at.root, at.job_id
    for _ in range(CHAIN_MAX):
        if metadata.restored_from is None or metadata.carried is not None:
            return
        before = parse_pointer(metadata.restored_from)
        try:
            metadata = read_pointed(open_store(before.root), before)
        except NotFoundError:
            # It was subsumed, deleted or moved, so earlier jobs are unknown. If it was a savepoint, the root of its
            # job is unknown too, but most jobs of a chain share one root.
            yield own_root if before.savepoint else before.root, before.job_id
            return
        yield metadata.origin_root or before.root, before.job_id
    raise ConfigurationError(f"{at} has a chain of more than {CHAIN_MAX} restored jobs; start the job without restore")


def taskowned_url(root: str, job_id: JobId, kind: str, uid: OperatorUid) -> str:
    """Returns the URL of the folder of a source (`SOURCE`) or of collected rows (`COLLECT`)."""
    return join_url(root.rstrip("/"), taskowned_path(job_id, kind, uid))


def taskowned_path(job_id: JobId, kind: str, uid: OperatorUid) -> str:
    """Returns the path, relative to the root, of the folder of a source (`SOURCE`) or of collected rows (`COLLECT`)."""
    return f"{CheckpointLayout(job_id).taskowned_dir()}/{kind}{escape(uid)}"
