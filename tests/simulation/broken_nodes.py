"""Rules for failures that come together, as with a node, broken on purpose: patches that hold while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator import coordinator_machine
from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.failover import Failover
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.identity import TaskId

Patch = Callable[[], AbstractContextManager[Any]]

_stop_regions, _changes_nothing = Failover.stop_regions, coordinator_machine.is_noop


def _one_at_a_time(self: Failover, tasks: Iterable[TaskId], reason: str, at_ms: int) -> None:
    """Breaks: what fails while something waits for its restart waits with it. Here that is forgotten."""
    if not self._context.state.down:
        _stop_regions(self, tasks, reason, at_ms)


def _deaf_while_deploying(event: ev.CoordinatorEvent, state: CoordinatorState) -> bool:
    """Breaks: a continuing task may fail while other tasks are deployed. Here its failure is ignored then."""
    if isinstance(event, ev.TaskFailed) and state.status is JobStatus.DEPLOYING and event.task in state.older_attempts:
        return True
    return _changes_nothing(event, state)


NODE_PATCHES: dict[str, tuple[int, Patch]] = {
    "nodes: what fails beside a restart is forgotten": (
        7, lambda: patch.object(Failover, "stop_regions", _one_at_a_time)
    ),
    "nodes: what fails beside a deployment is forgotten": (
        7, lambda: patch.object(coordinator_machine, "is_noop", _deaf_while_deploying)
    ),
}  # fmt: skip
"""Each rule with the invariant that it belongs to."""

APART = {"faults": "nodes", "topology": "pipelines", "hooks": "none", "interval_ms": 60, "rows": 80, "ending": "finish"}
NODE_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "nodes: what fails beside a restart is forgotten": APART,
    "nodes: what fails beside a deployment is forgotten": {**APART, "slots": "apart"},
}
"""Fixed values with which several regions fail at a time, because a node takes tasks of each with it.

Regions that share processes hardly ever fail one after the other.
"""
