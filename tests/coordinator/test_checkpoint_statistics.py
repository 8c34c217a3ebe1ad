"""What a coordinator counts and measures of checkpoints."""

from __future__ import annotations

from coordinators import (
    SINK,
    SOURCE,
    TASKS,
    Coordinator,
    part,
    spec,
)

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId

ELSEWHERE = RestorePoint("memory://old", JobId("job-00000000"), CheckpointId(7), final=False)


def test_statistics_hold_counts_summary_and_the_newest_checkpoint_in_detail() -> None:
    """Sizes of handles, times of the acknowledgements, aggregates of each vertex."""
    coordinator = Coordinator(spec(tolerable_failures=9, history_max=2, retained=9)).run()
    for n, took_ms in ((1, 40), (2, 100)):
        coordinator.ask()
        started_ms, coordinator.at_ms = coordinator.at_ms, coordinator.at_ms + took_ms
        for task in TASKS:
            metrics = SnapshotMetrics(alignment_ms=took_ms // 2, unaligned=task == SINK)
            event = ev.CheckpointAcknowledged(
                started_ms + took_ms, AttemptNumber(0), task, CheckpointId(n), part(n, task), metrics
            )
            coordinator.tell(event)
        coordinator.written(n)
    coordinator.decline(coordinator.ask(), "disk full")
    coordinator.ask()

    found = coordinator.state.statistics

    assert (found.triggered, found.completed, found.failed, found.in_progress) == (4, 2, 1, 1)
    assert (found.duration_ms.min, found.duration_ms.avg, found.duration_ms.max) == (40, 70, 100)
    assert found.by_kind == {"checkpoint": 2}
    assert [record.checkpoint_id for record in found.history] == [2, 3], "bounded"
    newest, failed = found.latest_completed, found.latest_failed
    assert newest is not None
    assert (newest.checkpoint_id, newest.duration_ms, newest.state_bytes) == (2, 100, 20)
    sink, source = newest.vertices
    assert (sink.vertex, sink.alignment_ms.max, sink.end_to_end_ms.max, sink.unaligned) == ("sink", 50, 100, 1)
    assert (source.vertex, source.unaligned) == (SOURCE.vertex, 0)
    assert set(found.subtasks) == set(TASKS)
    assert failed is not None
    assert (failed.reason, failed.message) == (Reason.DECLINED, "a task declined: sink[0]: disk full")


def test_no_time_in_the_statistics_is_negative() -> None:
    """What a task has sent before the trigger, or by a clock that is behind, takes no time."""
    coordinator = Coordinator(spec(tolerable_failures=9)).run()
    number = CheckpointId(coordinator.ask())
    early_ms = coordinator.at_ms - 30
    coordinator.tell(ev.CheckpointAcknowledged(early_ms, AttemptNumber(0), SINK, number, part(number, SINK)))

    coordinator.tell(ev.CheckpointDeclined(early_ms, AttemptNumber(0), SOURCE, number, Reason.DECLINED, "disk full"))

    failed = coordinator.state.statistics.latest_failed
    assert failed is not None
    assert failed.duration_ms == 0
    assert [vertex.end_to_end_ms.min for vertex in failed.vertices] == [0]


def test_statistics_count_restores() -> None:
    """Every attempt that starts from a checkpoint, and which one."""
    coordinator = Coordinator(spec(restore=ELSEWHERE)).run()
    coordinator.complete()
    coordinator.fail()
    coordinator.fire("restart:1", at_ms=77)

    found = coordinator.state.statistics
    assert found.restored == 2
    assert found.latest_restored is not None
    assert (found.latest_restored.checkpoint_id, found.latest_restored.at_ms) == (1, 77)
