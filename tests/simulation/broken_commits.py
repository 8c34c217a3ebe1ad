"""Rules of sinks that commit in their tasks, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import PropertyMock, patch

from random_jobs.ledger_topologies import NAME, SLOT, known

from tidegate.actors.drivers import committing_sinks
from tidegate.actors.graph.job_graph import JobVertex
from tidegate.actors.restore import restore_task
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.snapshots import SnapshotTracker
from tidegate.actors.task.task_commits import SubtaskCommits
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.connectors.committing_sink import CommitToken
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, PreparedPart, PreparedRows
from tidegate.storage.ids import SubtaskIndex
from tidegate.testing.world.ledger import Ledger

Patch = Callable[[], AbstractContextManager[Any]]

_prepared_rows = restore_task.prepared_rows
_written = SubtaskCommits.written
_handle = TaskMachine.handle


def _own_rows_only(metadata: CheckpointMetadata, vertex: JobVertex, subtask: SubtaskIndex) -> tuple[PreparedRows, ...]:
    """Breaks: committables go to the subtask that owns their bucket now. Here they stay with their subtask."""
    own = tuple(state for state in metadata.subtasks if state.subtask == subtask)
    return _prepared_rows(replace(metadata, subtasks=own), vertex, subtask)


def _nothing(metadata: CheckpointMetadata, vertex: JobVertex, subtask: SubtaskIndex) -> tuple[PreparedRows, ...]:
    """Breaks: a restored task commits what its checkpoint holds."""
    return ()


def _due_at_once(self: SubtaskCommits, index: int, parts: tuple[PreparedPart, ...]) -> None:
    """Breaks: rows are committed after a checkpoint that covers them has completed."""
    _written(self, index, parts)
    self.complete(index + 1)


def _without_due(self: SubtaskCommits, end: int) -> tuple[PreparedRows, ...] | None:
    """Breaks: a checkpoint stores the rows whose commit is not confirmed."""
    if any(index < end for index in self._writing):
        return None
    return tuple(rows for index, rows in sorted(self._prepared.items()) if index < end)


def _own_checkpoint_only(self: SubtaskCommits, end: int) -> None:
    """Breaks: the next checkpoint commits the rows of an aborted one. Here only its own rows become due."""
    if any(index < end for index in self._prepared):
        newest = max(rows.checkpoint_id for index, rows in self._prepared.items() if index < end)
        for index in sorted(index for index in self._prepared if index < end):
            rows = self._prepared.pop(index)
            if rows.checkpoint_id == newest:
                self._due.append(rows)


def _all_that_is_due(self: SubtaskCommits, rows: tuple[PreparedRows, ...]) -> None:
    """Breaks: rows that become due during a commit are committed by the next one. Here they count as committed."""
    self._due.clear()
    self._committing = 0


def _never_covered(self: CommitToken, stored: CommitToken | None) -> bool:
    """Breaks: a commit is idempotent by its token."""
    return False


def _of_any_job(job_id: str, checkpoint_id: int) -> CommitToken:
    """Breaks: tokens of other jobs do not count."""
    return CommitToken("any job", checkpoint_id)


def _all_but_the_last(self: Ledger, lane: tuple[str, int]) -> CommitToken | None:
    """Breaks: tokens are read up to the end. Here up to the one before."""
    tokens = self._tokens.get(lane, [])
    return tokens[-2] if len(tokens) > 1 else None


def _not_fenced(self: Ledger, lane: tuple[str, int]) -> None:
    """Breaks: a commit ends what earlier commits of its bucket have left open."""


def _confirms_snapshots(self: TaskMachine, event: ev.TaskEvent) -> list[do.TaskInstruction]:
    """Breaks: a reader is notified of completed checkpoints. Here of snapshots, before their checkpoint is complete."""
    instructions = _handle(self, event)
    frozen = {} if self.source is None else self.source.frozen
    if frozen:
        newest = max(frozen)
        splits = tuple(position.split for position in frozen[newest].positions)
        instructions.append(do.NotifySource(newest, splits))
    return instructions


def _over_ledgers(broken: Patch) -> Patch:
    @contextmanager
    def patched() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(known())
            stack.enter_context(broken())
            yield

    return patched


COMMIT_PATCHES: dict[str, tuple[int, Patch]] = {
    "commits: committables stay with their subtask at a rescale": (
        6,
        _over_ledgers(lambda: patch.object(restore_task, "prepared_rows", _own_rows_only)),
    ),
    "commits: a restored task does not commit again": (
        6,
        _over_ledgers(lambda: patch.object(restore_task, "prepared_rows", _nothing)),
    ),
    "commits: rows are committed before their checkpoint is complete": (
        6,
        _over_ledgers(lambda: patch.object(SubtaskCommits, "written", _due_at_once)),
    ),
    "commits: a checkpoint drops rows whose commit is under way": (
        6,
        _over_ledgers(lambda: patch.object(SubtaskCommits, "covered", _without_due)),
    ),
    "commits: rows of an aborted checkpoint are dropped": (
        6,
        _over_ledgers(lambda: patch.object(SubtaskCommits, "complete", _own_checkpoint_only)),
    ),
    "commits: rows that become due during a commit count as committed": (
        6,
        _over_ledgers(lambda: patch.object(SubtaskCommits, "committed", _all_that_is_due)),
    ),
    "commits: the token is ignored": (
        6,
        _over_ledgers(lambda: patch.object(CommitToken, "is_covered_by", _never_covered)),
    ),
    "commits: tokens of other jobs count": (
        6,
        _over_ledgers(lambda: patch.object(committing_sinks, "CommitToken", _of_any_job)),
    ),
    "commits: tokens are not read to their end": (
        6,
        _over_ledgers(lambda: patch.object(Ledger, "_read_token", _all_but_the_last)),
    ),
    "commits: earlier commits are not fenced": (
        6,
        _over_ledgers(lambda: patch.object(Ledger, "_fence", _not_fenced)),
    ),
    "commits: a source confirms positions before their checkpoint is complete": (
        6,
        _over_ledgers(lambda: patch.object(TaskMachine, "handle", _confirms_snapshots)),
    ),
    "commits: a task leaves before it has committed": (
        6,
        _over_ledgers(
            lambda: patch.object(SnapshotTracker, "all_committed", new_callable=PropertyMock, return_value=True)
        ),
    ),
}
"""Every such break: its invariant, and the patch."""

_LEDGER: Mapping[str, Hashable] = {
    "topology": NAME,
    "mode": "exactly-once",
    "retention": "retain_on_cancellation",
    "interval_ms": 60,
    "sources": "at once",
    "faults": "storage",
    "rows": 60,
}
COMMIT_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    **dict.fromkeys(COMMIT_PATCHES, _LEDGER),
    "commits: committables stay with their subtask at a rescale": {**_LEDGER, "ending": "cancel", "then": "rescaled"},
    "commits: a restored task does not commit again": {**_LEDGER, "faults": "all"},
    "commits: a checkpoint drops rows whose commit is under way": {**_LEDGER, "faults": "all"},
    "commits: rows of an aborted checkpoint are dropped": {**_LEDGER, "faults": "all"},
    "commits: tokens of other jobs count": {**_LEDGER, "ending": "cancel"},
    "commits: a source confirms positions before their checkpoint is complete": {
        **_LEDGER,
        "topology": SLOT,
        "faults": "tasks",
    },
}
"""Fixed values of the scenarios for these breaks."""
