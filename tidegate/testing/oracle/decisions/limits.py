"""The oracle of limits (10): how many checkpoints are pending side by side, and what waits in tasks and coordinator.

Pending ones are seen from the barriers that start them:

- A checkpoint waits while so many are pending as may be at a time; savepoints count, too.
- A savepoint waits for other savepoints alone, or, where checkpoints are unaligned, for whatever is pending.
- The savepoint of a stop waits for nothing: it has given up whatever was pending.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.actors.coordinator.checkpoint_requests import REQUESTS_MAX
from tidegate.actors.coordinator.job_spec import CheckpointSettings
from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.testing.oracle.violation import InvariantViolated


def check_limits(
    settings: CheckpointSettings, number: int, kind: SnapshotKind, pending: Sequence[SnapshotKind]
) -> bool:
    """Look at a checkpoint that starts beside pending ones. Whether it has gone ahead of one. InvariantViolated."""
    if kind.stops:
        return False
    goes_ahead = kind.is_savepoint and not settings.unaligned
    counted = [each for each in pending if each.is_savepoint or not goes_ahead]
    if len(counted) >= settings.max_concurrent:
        raise InvariantViolated(
            10,
            f"{kind.value} {number} starts while {len(counted)} are pending that it has to wait for; "
            f"{settings.max_concurrent} at a time was asked for",
        )
    return len(pending) >= settings.max_concurrent


def check_held(machine: TaskMachine, abort: ev.CheckpointAborted) -> None:
    """Look at a task that was told of an abort: it holds back nothing of that checkpoint. InvariantViolated."""
    obeyed = abort.attempt == machine.attempt and abort.generation == machine.fence.generation
    if obeyed and abort.checkpoint_id in machine._checkpoints.held:
        raise InvariantViolated(
            10,
            f"{machine.descriptor.task} holds back checkpoint {abort.checkpoint_id}, and was told that it was aborted",
        )


def check_requests(waiting: int) -> None:
    """Look at the requests that wait in a coordinator: there are no more than its queue takes. InvariantViolated."""
    if waiting > REQUESTS_MAX:
        raise InvariantViolated(10, f"{waiting} requests wait in a queue that takes {REQUESTS_MAX}")
