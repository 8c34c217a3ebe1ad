"""Checks from outside that no split is read that is too far ahead of its watermark group.

What counts is the watermark of the group that the task has heard last in its attempt, and how far the rows of a split
have come by what the task has processed of it.
"""

from __future__ import annotations

from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.ids import AttemptNumber
from tidegate.testing.oracle.violation import InvariantViolated


class AlignmentOracle:
    """Of one job."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._heard: dict[tuple[TaskId, AttemptNumber], int] = {}
        """The watermark of its group that each task has heard."""

    def heard(self, machine: TaskMachine, event: ev.WatermarkAnnounced) -> None:
        """A task obeys a coordinator that tells how far its group is."""
        if event.attempt == machine.attempt:
            self._heard[machine.descriptor.task, machine.attempt] = event.watermark_ms

    def reads(self, machine: TaskMachine, split_id: str) -> None:
        """A task reads a split."""
        task = machine.descriptor.task
        source = self._spec.aligned_source(task)
        if source is None or machine.source is None:
            return
        ahead_ms = _watermark_ms(machine, split_id)
        heard_ms = self._heard.get((task, machine.attempt))
        limit_ms = MIN_WATERMARK_MS if heard_ms is None else heard_ms + source.max_drift_ms
        if ahead_ms > limit_ms:
            raise InvariantViolated(10, f"{task} reads {split_id!r} at {ahead_ms}, and its group allows {limit_ms}")


def _watermark_ms(machine: TaskMachine, split_id: str) -> int:
    assert machine.source is not None
    in_turn = machine.chain.splits.in_turn
    split = machine.source.split_ids.index(split_id) if in_turn else None
    aligned = machine.chain.aligned_generator
    assert aligned is not None
    return aligned[1].split_watermark_ms(split)
