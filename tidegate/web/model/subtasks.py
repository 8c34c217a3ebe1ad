"""What each subtask of a vertex has done for one checkpoint, as Flink's REST API has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.actors.coordinator.state.checkpoint_statistics import SubtaskStatistics
from tidegate.actors.runtimes.job_snapshot import PendingNow
from tidegate.web.model.checkpoints import checkpoint_details, find_checkpoint
from tidegate.web.model.numbers import summary
from tidegate.web.model.states import UNKNOWN, NotKnown
from tidegate.web.model.vertices import vertex_of
from tidegate.web.seen_job import SeenJob


def checkpoint_subtasks(job: SeenJob, checkpoint_id: int, vertex_id: str) -> dict[str, Any]:
    """`/jobs/<id>/checkpoints/details/<n>/subtasks/<v>`. Raises NotKnown."""
    found, vertex = find_checkpoint(job, checkpoint_id), vertex_of(job, vertex_id)
    part: dict[str, Any] = checkpoint_details(job, checkpoint_id)["tasks"][vertex_id]
    told = {task.subtask: each for task, each in found.subtasks.items() if task.vertex == vertex_id}
    if part["num_acknowledged_subtasks"] and not told:
        raise NotKnown(f"of checkpoint {checkpoint_id} of job {job.job_id} only totals are kept, no subtasks")
    triggered_at_ms = found.triggered_at_ms if isinstance(found, PendingNow) else found.record.triggered_at_ms
    aborted = not isinstance(found, PendingNow) and found.record.reason is not None
    return part | {
        "summary": _summary(told),
        "subtasks": [
            {"className": "pending", "index": index, "status": "pending_or_failed"}
            if (each := told.get(index)) is None  # type: ignore[call-overload]
            else _completed(index, each, triggered_at_ms, aborted)
            for index in range(vertex.parallelism)
        ],
    }


def _summary(told: Mapping[Any, SubtaskStatistics]) -> dict[str, Any]:
    parts = list(told.values())
    zeros = [0 for _ in parts]
    return {
        "checkpointed_size": summary(each.incremental_bytes + each.in_flight_bytes for each in parts),
        "state_size": summary(each.state_bytes + each.in_flight_bytes for each in parts),
        "end_to_end_duration": summary(each.end_to_end_ms for each in parts),
        "checkpoint_duration": {
            "sync": summary(each.metrics.sync_ms for each in parts),
            "async": summary(each.metrics.async_ms for each in parts),
        },
        "alignment": {
            "buffered": summary(zeros),
            "processed": summary(UNKNOWN for _ in parts),
            "persisted": summary(each.in_flight_bytes for each in parts),
            "duration": summary(each.metrics.alignment_ms for each in parts),
        },
        "start_delay": summary(each.metrics.start_delay_ms for each in parts),
    }


def _completed(index: int, each: SubtaskStatistics, triggered_at_ms: int, aborted: bool) -> dict[str, Any]:
    return {
        "className": "completed",
        "index": index,
        "status": "completed",
        "ack_timestamp": triggered_at_ms + each.end_to_end_ms,
        "end_to_end_duration": each.end_to_end_ms,
        "checkpointed_size": each.incremental_bytes + each.in_flight_bytes,
        "state_size": each.state_bytes + each.in_flight_bytes,
        "checkpoint": {"sync": each.metrics.sync_ms, "async": each.metrics.async_ms},
        "alignment": {
            "buffered": 0,
            "processed": UNKNOWN,
            "persisted": each.in_flight_bytes,
            "duration": each.metrics.alignment_ms,
        },
        "start_delay": each.metrics.start_delay_ms,
        "unaligned_checkpoint": each.metrics.unaligned,
        "aborted": aborted,
    }
