"""Rules of splits that the coordinator assigns, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from broken_failover import Both

from tidegate.actors.coordinator import coordinator_machine, deployment, source_coordinator
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint, TakenSplits
from tidegate.actors.coordinator.events import SplitsRequested, TaskReady
from tidegate.actors.coordinator.instructions import AssignSplits
from tidegate.actors.coordinator.job_spec import AssignedSource
from tidegate.actors.coordinator.source_coordinator import Pools, UntakenSplits
from tidegate.actors.task.events import SplitsAssigned
from tidegate.actors.task.source_cursor import SplitRequests
from tidegate.connectors.source import SourceSplit
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.ids import OperatorUid

Patch = Callable[[], AbstractContextManager[Any]]

_assign, _took_up = source_coordinator.assign, source_coordinator.took_up


def _all_that_was_given(pending: PendingCheckpoint, task: TaskId, uid: OperatorUid, taken: TakenSplits) -> int:
    """Breaks: what was on its way at the cut is in the pool. Here it counts as taken."""
    return len(taken.given)


def _nothing_that_was_given(pending: PendingCheckpoint, task: TaskId, uid: OperatorUid, taken: TakenSplits) -> int:
    """Breaks: what is in a snapshot is not in the pool. Here only what was restored counts as taken."""
    return 0


def _keeps_all(state: CoordinatorState, event: TaskReady) -> None:
    """Breaks: what a checkpoint lacks goes back to the pool. Here it stays with the subtask that had it."""
    if event.task not in state.splits:
        _took_up(state, event)


def _answers_anew(state: CoordinatorState, event: SplitsRequested, pools: Pools) -> AssignSplits:
    """Breaks: the same question gets the same answer. Here it gets others, and what was lost stays lost."""
    given = len(state.splits.setdefault(event.task, TakenSplits()).given)
    answer = _assign(state, SplitsRequested(event.at_ms, event.attempt, event.task, given), pools)
    return AssignSplits(answer.attempt, answer.task, event.first, answer.splits)


def _takes_again(self: SplitRequests, event: SplitsAssigned) -> Sequence[SourceSplit]:
    """Breaks: an answer counts once. Here as often as it comes."""
    self._asked = False
    self._given = event.first + len(event.splits)
    self.over = not event.splits
    return event.splits


def _over_at_once(self: SplitRequests, event: SplitsAssigned) -> Sequence[SourceSplit]:
    """Breaks: a source ends when the coordinator reports that no split is left. Here after its first answer."""
    self._asked, self.over = False, True
    return event.splits


def _only_ahead(task: TaskId, pool: UntakenSplits, still_ask: list[int]) -> tuple[int, int]:
    """Breaks: a split that no other subtask will take goes to any subtask that requests one. Here a subtask gets no
    split that it has read past.
    """
    return pool.after(pool.last(task)), len(pool.left)


def _remembers(self: UntakenSplits, source: AssignedSource, subtasks: Mapping[TaskId, TakenSplits]) -> bool:
    """Breaks: the pool holds the unassigned splits. Here it is outdated."""
    return True


SPLIT_PATCHES: dict[str, tuple[int, Patch]] = {
    "splits: what was given counts as taken": (
        3,
        lambda: Both(
            patch.object(source_coordinator, "_taken_in", _all_that_was_given),
            patch.object(source_coordinator, "check_snapshot", lambda *_: None),
        ),
    ),
    "splits: what was taken stays in the pool": (
        3,
        lambda: patch.object(source_coordinator, "_taken_in", _nothing_that_was_given),
    ),
    "splits: what a checkpoint lacks does not come back": (7, lambda: patch.object(deployment, "took_up", _keeps_all)),
    "splits: a question that comes twice is a new one": (
        3,
        lambda: patch.object(coordinator_machine, "assign", _answers_anew),
    ),
    "splits: an answer counts as often as it comes": (9, lambda: patch.object(SplitRequests, "answered", _takes_again)),
    "splits: one answer is all": (6, lambda: patch.object(SplitRequests, "answered", _over_at_once)),
    "splits: nobody asks again": (7, lambda: patch.object(SplitRequests, "ask_again", lambda self: None)),
    "splits: what everybody has read beyond is left": (
        7,
        lambda: patch.object(source_coordinator, "_next_for", _only_ahead),
    ),
    "splits: the pool is remembered": (7, lambda: patch.object(UntakenSplits, "follows_from", _remembers)),
    "splits: two subtasks get the same": (9, lambda: patch.object(TakenSplits, "all", property(lambda self: ()))),
    "splits: what nobody had read is forgotten with the job": (
        6,
        lambda: patch.object(CheckpointMetadata, "pool_of", lambda self, uid: ()),
    ),
}
"""Every such break: its invariant, and the patch."""

_ASKED_FOR: Mapping[str, Hashable] = {"sources": "at once", "splits": "assigned"}
_STOPPED_EARLY = {**_ASKED_FOR, "splits": "many", "ending": "suspend", "buffers": "tiny"}
SPLIT_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    **dict.fromkeys(SPLIT_PATCHES, _ASKED_FOR),
    "splits: nobody asks again": {**_ASKED_FOR, "faults": "network"},
    "splits: what everybody has read beyond is left": {**_STOPPED_EARLY, "then": "rescaled"},
    "splits: what nobody had read is forgotten with the job": _STOPPED_EARLY,
}
"""Fixed values of the scenarios for these breaks."""
