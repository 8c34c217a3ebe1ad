"""What a savepoint needs beside its own folder. `inspect` says it.

It needs what its job, or one before it, has staged and collected; a relocated savepoint has that with it. It also names
data files in output tables, which stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.recovery.job_lineage import COLLECT, SOURCE, lineage
from tidegate.storage.checkpoints.layout import CheckpointLayout, CheckpointPointer
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import OpenStore


def needed_urls(at: CheckpointPointer, metadata: CheckpointMetadata, open_store: OpenStore) -> tuple[str, ...]:
    """URLs of the folders that must stay for a savepoint to be restored, and of the tables with files that it covers.

    A folder that cannot be listed is named as a whole: what is in it may be needed.
    """
    folders: dict[str, str] = {}
    if metadata.carried is None:
        for root, job_id in lineage(at, metadata, at.root, open_store):
            folder = join_url(root, CheckpointLayout(job_id).taskowned_dir())
            try:
                names = [name for name in open_store(folder).list("") if name.startswith((SOURCE, COLLECT))]
            except StorageError:
                folders.setdefault(folder, folder)
                continue
            for name in names:
                folders.setdefault(name, join_url(folder, name))
    return (*folders.values(), *(url for url in _tables(metadata) if url not in folders.values()))


def _tables(metadata: CheckpointMetadata) -> Iterator[str]:
    committables = (c for subtask in metadata.subtasks for c in subtask.committables)
    return iter(sorted({c.table for c in committables if "://" in c.table or c.table.startswith("/")}))
