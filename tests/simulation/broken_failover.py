"""Rules of failover by regions, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.failover import Failover
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId

Patch = Callable[[], AbstractContextManager[Any]]

_drop, _going_back, _begin = CheckpointCoordinator.drop, Failover.going_back, CoordinatorState.begin_attempt


def _keeps_pending(self: CheckpointCoordinator, reason: Reason, at_ms: int, detail: str = "") -> None:
    """Breaks: pending checkpoints are aborted when a region fails. Here other regions may still acknowledge."""
    if reason is not Reason.JOB_FAILOVER or len(self._context.state.down) == len(self._context.spec.tasks):
        _drop(self, reason, at_ms, detail)


def _takes_survivors(self: Failover, tasks: Iterable[TaskId]) -> tuple[TaskId, ...]:
    """Breaks: a region without a failure continues. Here every region restarts."""
    return tuple(task for task in self._context.spec.tasks if task not in self._context.state.down)


def _leaves_neighbours(self: Failover, tasks: Iterable[TaskId]) -> tuple[TaskId, ...]:
    """Breaks: what channels join goes back together. Here the task that has failed starts anew, alone."""
    return tuple(task for task in tasks if task not in self._context.state.down)


def _of_any_attempt(self: CoordinatorState, task: TaskId, attempt: int) -> bool:
    """Breaks: a report of a task counts only in its attempt. Here a report that was in flight when it was stopped
    counts too.
    """
    return True


def _forgets_attempts(self: CoordinatorState) -> tuple[TaskId, ...] | None:
    """Breaks: continuing tasks receive events of their own attempt. Here all tasks count as being in the newest one."""
    tasks = _begin(self)
    self.older_attempts = dict.fromkeys(self.older_attempts, self.attempt)
    return tasks


def _at_once(state: CoordinatorState) -> bool:
    """Breaks: the fate of what is being written decides where a region starts. Here it is not awaited."""
    return state.status is JobStatus.RESTARTING


def _unchecked() -> Any:
    """No machine looks before it deploys: the oracle has to."""
    return patch.object(invariants, "check_deployed", lambda *_: None)


class Both:
    """Two patches at once."""

    def __init__(self, *patches: Any) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for one in self._patches:
            one.start()

    def __exit__(self, *_: object) -> None:
        for one in self._patches:
            one.stop()


FAILOVER_PATCHES: dict[str, tuple[int, Patch]] = {
    "regions: one that continues starts anew": (7, lambda: patch.object(Failover, "going_back", _takes_survivors)),
    "regions: a channel is cut": (
        1, lambda: Both(patch.object(Failover, "going_back", _leaves_neighbours), _unchecked())
    ),
    "regions: what is pending is not given up": (
        4, lambda: patch.object(CheckpointCoordinator, "drop", _keeps_pending)
    ),
    "regions: what a stopped task says counts": (
        4, lambda: patch.object(CoordinatorState, "is_current", _of_any_attempt)
    ),
    "regions: those that go on are told in another attempt": (
        7, lambda: patch.object(CoordinatorState, "begin_attempt", _forgets_attempts)
    ),
    "regions: the fate of a checkpoint is not awaited": (
        7, lambda: patch.object(invariants, "is_fate_known", _at_once)
    ),
    "regions: union state is restored in one subtask": (
        9, lambda: patch.object(Failover, "_tied_vertices", lambda self: set())
    ),
}  # fmt: skip
"""Each rule with the invariant that it belongs to."""

_APART: dict[str, str | int] = {
    "faults": "tasks",
    "hooks": "none",
    "interval_ms": 60,
    "rows": 80,
    "ending": "finish",
}
FAILOVER_FIXED: dict[str, dict[str, Any]] = {
    rule: {**_APART, "topology": "subtasks" if "union" in rule else "pipelines"} for rule in FAILOVER_PATCHES
}
"""Fixed values with which a region fails while other regions continue."""
