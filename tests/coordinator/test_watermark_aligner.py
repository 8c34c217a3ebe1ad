"""Who is told how far a group of sources is in event time: the lowest watermark of those that count."""

from __future__ import annotations

from dataclasses import replace

from coordinators import SPEC

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import WatermarkReported
from tidegate.actors.coordinator.job_spec import AlignedSource
from tidegate.actors.coordinator.source_coordinator import WatermarkAligner
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.ids import AttemptNumber, SubtaskIndex, VertexId

A, B, C, D = (TaskId(VertexId(name), SubtaskIndex(0)) for name in "abcd")
FIRST, SECOND = AttemptNumber(1), AttemptNumber(2)


class Group:
    """A and B are in one group, with drifts of 10 and 20; C is in another one, D in none. All run."""

    def __init__(self) -> None:
        aligned = tuple(
            AlignedSource(task.vertex, group, drift)
            for task, group, drift in ((A, "x", 10), (B, "x", 20), (C, "y", 10))
        )
        spec = replace(SPEC, tasks=(A, B, C, D), sources=(A, B, C, D), edges=(), aligned_sources=aligned)
        self.state = CoordinatorState(spec=spec, attempt=FIRST)
        self.alignment = WatermarkAligner()

    def tells(
        self, task: TaskId, watermark_ms: int | None, *, waits: bool = False, attempt: AttemptNumber = FIRST
    ) -> dict[TaskId, int]:
        """Who is told what when a task tells how far it is."""
        event = WatermarkReported(0, attempt, task, watermark_ms, waits)
        return {told.task: told.watermark_ms for told in self.alignment.reported(self.state, event)}


def test_each_is_told_the_lowest_of_its_group() -> None:
    """Once all others have told theirs; a source in another group, or in none, has no part in it."""
    group = Group()
    assert group.tells(A, 50) == {}
    assert group.tells(B, 30) == {B: 30}
    assert group.tells(A, 60) == {A: 30}
    assert group.tells(C, 5) == {C: 5}
    assert group.tells(D, 1) == {}
    assert group.tells(B, MIN_WATERMARK_MS) == {B: MIN_WATERMARK_MS}


def test_who_waits_is_told_as_soon_as_it_may_go_on() -> None:
    """By its own drift, and once."""
    group = Group()
    group.tells(B, 30)
    assert group.tells(A, 50, waits=True) == {A: 30}
    assert group.tells(B, 39) == {B: 39}
    assert group.tells(B, 40) == {B: 40, A: 40}
    assert group.tells(B, 41) == {B: 41}
    assert group.tells(A, 50) == {A: 41}
    group.tells(B, 71, waits=True)
    assert group.tells(A, 51) == {A: 51, B: 51}


def test_idle_ones_and_ended_ones_hold_nobody_back() -> None:
    """When nobody is left nothing holds anybody."""
    group = Group()
    group.tells(B, 30)
    assert group.tells(A, 50) == {A: 30}
    group.tells(B, None)
    assert group.tells(A, 50) == {A: 50}
    group.tells(B, 30)
    group.state.ended[B] = None
    assert group.tells(A, 55) == {A: 55}
    assert group.tells(A, None) == {A: MAX_WATERMARK_MS}


def test_what_was_told_in_another_attempt_does_not_count() -> None:
    """Nor what a task that is down has told: until it is back, and has told anew, nobody is told anything."""
    group = Group()
    group.tells(B, 30)
    assert group.tells(A, 35) == {A: 30}
    group.state.stop([B])
    assert group.tells(A, 36) == {}
    assert group.tells(B, 31) == {}
    group.state.begin_attempt()
    assert group.tells(A, 37) == {}
    assert group.tells(B, 31) == {}
    assert group.tells(B, 20, attempt=SECOND) == {B: 20}
    assert group.tells(A, 37) == {A: 20}


def test_it_is_no_decision_of_the_machine() -> None:
    """So nothing of it is logged."""
    group = Group()
    assert CoordinatorMachine(group.state).ignores(WatermarkReported(0, FIRST, A, 1, waits=True))
