"""Chooses where the rows of `collect()` are stored. `submission.py` asks.

Rules:

- A restored job goes on in the place where the job before it has its rows.
- Rows that are stored keep their columns: a program with others is refused.
- A relocated savepoint has a copy of the rows with it. That copy stays as it is: the job gets a copy of its own, in its
  own folder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tidegate.api.tables.output_tables import CollectedRows
from tidegate.recovery.job_lineage import COLLECT, taskowned_url
from tidegate.storage.checkpoints.layout import parse_savepoint_name
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, Committable, SubtaskState
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.storage.tables.handed_rows import newest_mark
from tidegate.storage.tables.table_copy import copy_table
from tidegate.storage.tables.table_info import schema_difference
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)


def collect_url(
    root: str,
    job_id: JobId,
    rows: CollectedRows,
    line: Sequence[tuple[str, JobId]],
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
) -> str:
    """URL of the rows: that of the restored job, if it has collected before, so that `to_arrow` gives all rows.

    `line` are the jobs that this one goes on from, newest first. `covering` are the checkpoints whose sink files may
    not be committed yet.
    """
    own = taskowned_url(root, job_id, COLLECT, rows.uid)
    for before_root, _, url in _earlier(rows, line, open_store):
        if parse_savepoint_name(before_root.rstrip("/").rpartition("/")[2]) is None:
            return url
        covered = (c for metadata in covering for subtask in metadata.subtasks for c in subtask.committables)
        uncommitted = [file for c in covered if c.table == rows.placeholder for file in c.files]
        copy_table(open_store(url), open_store(own), uncommitted)
        return own
    return own


def check_collected(
    collected: Iterable[CollectedRows], line: Sequence[tuple[str, JobId]], open_store: OpenStore
) -> None:
    """Raise TableError where rows that a job of the line has collected have other columns than the program's.

    ConfigurationError if rows to collect were handed on with `for_each_checkpoint` before.
    """
    for rows in collected:
        for _, before, url in _earlier(rows, line, open_store):
            if not rows.handed_on and newest_mark(open_store(url))[0]:
                raise ConfigurationError(
                    f"collect (uid {rows.uid!r}): job {before} handed the rows of this uid on with "
                    "for_each_checkpoint, and they are gone; give collect() another uid"
                )
            stored = TableLog(open_store(url)).snapshot().info.arrow_schema
            if difference := schema_difference(stored, rows.info.arrow_schema):
                step = "for_each_checkpoint" if rows.handed_on else "collect"
                raise TableError(
                    f"{step} (uid {rows.uid!r}): job {before} has stored its rows with other columns: {difference}. "
                    f"Give {step}() another uid, so that it begins without these rows; or restore the former columns"
                )
            break


def _earlier(
    rows: CollectedRows, line: Sequence[tuple[str, JobId]], open_store: OpenStore
) -> Iterator[tuple[str, JobId, str]]:
    """Root, job and URL of the rows that jobs of the line have collected under this uid, newest first."""
    for root, job_id in line:
        url = taskowned_url(root, job_id, COLLECT, rows.uid)
        if TableLog(open_store(url)).exists():
            yield root, job_id, url


def with_places(covering: Sequence[CheckpointMetadata], urls: Mapping[str, str]) -> list[CheckpointMetadata]:
    """The checkpoints with URLs for placeholders: a relocated savepoint knows collected rows only by their uid."""
    return [
        replace(metadata, subtasks=tuple(_with_places(subtask, urls) for subtask in metadata.subtasks))
        for metadata in covering
    ]


def _with_places(subtask: SubtaskState, urls: Mapping[str, str]) -> SubtaskState:
    def placed(committable: Committable) -> Committable | None:
        if not committable.table.startswith(CollectedRows.PREFIX):
            return committable
        url = urls.get(committable.table)
        if url is None:
            log.warning("rows of %s in the savepoint are left behind: the program collects none", committable.table)
            return None
        return replace(committable, table=url)

    found = (placed(committable) for committable in subtask.committables)
    return replace(subtask, committables=tuple(committable for committable in found if committable is not None))
