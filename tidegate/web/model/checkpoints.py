"""The checkpoints of a job, one checkpoint by vertex and by subtask, and their settings, in the form of Flink's REST
API.

For a checkpoint that has ended, the coordinator keeps the figures of each vertex, and for some also of each subtask
(`JobHistory`). Sizes include in-flight data, as in Flink. Values that tidegate does not measure are 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tidegate.actors.coordinator.checkpoint_statistics import (
    CheckpointRecord,
    SubtaskStatistics,
    VertexStatistics,
    vertex_statistics,
)
from tidegate.actors.coordinator.job_history import EndedCheckpoint
from tidegate.actors.coordinator.job_spec import Retention
from tidegate.actors.runtimes.job_snapshot import PendingNow
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.ids import CheckpointId
from tidegate.web.jobs import SeenJob
from tidegate.web.model.states import UNKNOWN, NotKnown
from tidegate.web.model.vertices import vertex_of

NO_INTERVAL_MS = 2**63 - 1
"""The interval that Flink returns for a job without periodic checkpoints."""

IN_PROGRESS = "IN_PROGRESS"
COMPLETED = "COMPLETED"
FAILED = "FAILED"
_BACKENDS = {"columnar": "HashMapStateBackend", "rocksdb": "EmbeddedRocksDBStateBackend"}
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


def checkpoints(job: SeenJob) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/checkpoints`: counts, summary, the newest of each kind, and the history,
    newest first.
    """
    now = job.snapshot.checkpoints
    ended = [_ended(job, each.record, each.savepoint_format) for each in job.ended]
    history = [*ended, *(_pending(job, each) for each in now.pending)]
    return {
        "counts": {
            "restored": now.restored,
            "total": now.triggered,
            "in_progress": now.in_progress,
            "completed": now.completed,
            "failed": now.failed,
        },
        "summary": _summary([each for each in ended if each["status"] == COMPLETED]),
        "latest": {
            "completed": _newest(job, now.latest_completed),
            "savepoint": _newest(job, now.latest_savepoint),
            "failed": _newest(job, now.latest_failed),
            "restored": _restored(job),
        },
        "history": sorted(history, key=lambda each: -each["id"]),
    }


def find_checkpoint(job: SeenJob, checkpoint_id: int) -> EndedCheckpoint | PendingNow:
    """Returns the checkpoint with this number. Raises NotKnown if it does not exist or is no longer kept."""
    for ended in job.ended:
        if ended.record.checkpoint_id == checkpoint_id:
            return ended
    for pending in job.snapshot.checkpoints.pending:
        if pending.checkpoint_id == checkpoint_id:
            return pending
    newest = f"; the newest {len(job.ended)} are kept" if job.ended else ""
    raise NotKnown(
        f"job {job.job_id} has no checkpoint {checkpoint_id}, or no longer keeps it{newest}; see "
        f"/jobs/{job.job_id}/checkpoints"
    )


def newest_checkpoint(job: SeenJob, status: str | None) -> CheckpointId:
    """Returns the number of the newest checkpoint that has ended (with this status, if given).

    Raises NotKnown if none has.
    """
    for ended in reversed(job.ended):
        if status in (None, COMPLETED if ended.record.reason is None else FAILED):
            return ended.record.checkpoint_id
    raise NotKnown(f"job {job.job_id} has no such checkpoint yet; see /jobs/{job.job_id}/checkpoints")


def checkpoint_details(job: SeenJob, checkpoint_id: int) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/checkpoints/details/<n>`: one checkpoint, with its parts by vertex.

    Raises NotKnown if there is no such checkpoint.
    """
    found = find_checkpoint(job, checkpoint_id)
    if isinstance(found, PendingNow):
        checkpoint = _pending(job, found)
        vertices = vertex_statistics(dict(found.subtasks))
    else:
        checkpoint = _ended(job, found.record, found.savepoint_format)
        vertices = found.record.vertices
    parts = {vertex.vertex: vertex for vertex in vertices}
    tasks = {
        str(vertex.vertex): _part(checkpoint, parts.get(vertex.vertex), _taking_part(job, found, vertex.vertex, parts))
        for vertex in job.about.vertices
    }
    return checkpoint | {"tasks": tasks}


def _taking_part(job: SeenJob, found: EndedCheckpoint | PendingNow, vertex: str, parts: Mapping[Any, Any]) -> int:
    """Returns how many subtasks of a vertex take part in a checkpoint.

    A pending checkpoint has the planned subtasks, a completed one the subtasks in its statistics, without finished
    subtasks, and a failed one all of them.
    """
    parallelism = next(each.parallelism for each in job.about.vertices if each.vertex == vertex)
    if isinstance(found, PendingNow):
        return next((count for name, count in found.vertex_tasks.items() if name == vertex), parallelism)
    if found.record.reason is None:
        return parts[vertex].subtasks if vertex in parts else 0
    return parallelism


def _part(checkpoint: Mapping[str, Any], part: VertexStatistics | None, subtasks: int) -> dict[str, Any]:
    vertices = () if part is None else (part,)
    acknowledged = 0 if part is None else part.subtasks
    done = checkpoint["status"] == IN_PROGRESS and 0 < subtasks == acknowledged
    return {
        "id": checkpoint["id"],
        "status": COMPLETED if done else checkpoint["status"],
        "latest_ack_timestamp": _newest_ack(checkpoint["trigger_timestamp"], vertices),
        **_sizes(vertices),
        "end_to_end_duration": 0 if part is None else part.end_to_end_ms.max,
        "num_subtasks": subtasks,
        "num_acknowledged_subtasks": acknowledged,
    }


def checkpoint_subtasks(job: SeenJob, checkpoint_id: int, vertex_id: str) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/checkpoints/details/<n>/subtasks/<v>`: the part of a vertex, by subtask.

    Raises NotKnown if there is no such checkpoint or vertex.
    """
    found = find_checkpoint(job, checkpoint_id)
    vertex = vertex_of(job, vertex_id)
    part: dict[str, Any] = checkpoint_details(job, checkpoint_id)["tasks"][vertex_id]
    acknowledged = {task.subtask: each for task, each in found.subtasks.items() if task.vertex == vertex_id}
    if part["num_acknowledged_subtasks"] and not acknowledged:
        raise NotKnown(
            f"checkpoint {checkpoint_id} of job {job.job_id} keeps only totals, not its subtasks; increase "
            "web.checkpoints.history for later ones"
        )
    triggered_at_ms = found.triggered_at_ms if isinstance(found, PendingNow) else found.record.triggered_at_ms
    aborted = not isinstance(found, PendingNow) and found.record.reason is not None
    return part | {
        "summary": _subtask_summary(acknowledged),
        "subtasks": [
            {"className": "pending", "index": index, "status": "pending_or_failed"}
            if (each := acknowledged.get(index)) is None  # type: ignore[call-overload]
            else _completed(index, each, triggered_at_ms, aborted)
            for index in range(vertex.parallelism)
        ],
    }


def _subtask_summary(acknowledged: Mapping[Any, SubtaskStatistics]) -> dict[str, Any]:
    parts = list(acknowledged.values())
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


def checkpoint_config(job: SeenJob) -> dict[str, Any]:
    """Returns the answer to `/jobs/<id>/checkpoints/config`."""
    settings = job.about.checkpoints
    about = job.about
    return {
        "mode": "exactly_once" if settings.exactly_once else "at_least_once",
        "interval": NO_INTERVAL_MS if settings.interval_ms is None else settings.interval_ms,
        "timeout": settings.timeout_ms,
        "min_pause": settings.min_pause_ms,
        "max_concurrent": settings.max_concurrent,
        "externalization": {
            "enabled": settings.retention is not Retention.NEVER_RETAIN,
            "delete_on_cancellation": settings.retention is not Retention.RETAIN_ON_CANCELLATION,
        },
        "state_backend": _BACKENDS.get(about.backend, about.backend),
        "checkpoint_storage": job.snapshot.card.root,
        "unaligned_checkpoints": settings.unaligned,
        "tolerable_failed_checkpoints": settings.tolerable_failures,
        "aligned_checkpoint_timeout": settings.aligned_timeout_ms or 0,
        "checkpoints_after_tasks_finish": True,
        "state_changelog_enabled": about.changelog,
        "changelog_periodic_materialization_interval": 0,
        "changelog_storage": "",
    }


def _summary(completed: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data",
             "persisted_data")  # fmt: skip
    return {name: summary(each[name] for each in completed) for name in names}


def _newest(job: SeenJob, record: CheckpointRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    formats = {each.record.checkpoint_id: each.savepoint_format for each in job.ended}
    return _ended(job, record, formats.get(record.checkpoint_id))


def _restored(job: SeenJob) -> dict[str, Any] | None:
    restored = job.snapshot.checkpoints.latest_restored
    if restored is None:
        return None
    return {
        "id": restored.checkpoint_id,
        "restore_timestamp": restored.at_ms,
        "is_savepoint": "/savepoint-" in restored.pointer,
        "external_path": restored.pointer,
    }


def _ended(job: SeenJob, record: CheckpointRecord, savepoint_format: SavepointFormat | None) -> dict[str, Any]:
    status = COMPLETED if record.reason is None else FAILED
    unaligned = any(vertex.unaligned for vertex in record.vertices)
    ended = {
        "className": status.lower(),
        "id": record.checkpoint_id,
        "status": status,
        "is_savepoint": record.kind.is_savepoint,
        "savepointFormat": _format(record.kind, savepoint_format),
        "trigger_timestamp": record.triggered_at_ms,
        "latest_ack_timestamp": _newest_ack(record.triggered_at_ms, record.vertices),
        "checkpointed_size": record.incremental_bytes + record.in_flight_bytes,
        "state_size": record.state_bytes + record.in_flight_bytes,
        "end_to_end_duration": record.duration_ms,
        "alignment_buffered": 0,
        "processed_data": UNKNOWN,
        "persisted_data": record.in_flight_bytes,
        "num_subtasks": record.tasks,
        "num_acknowledged_subtasks": record.acknowledged,
        "checkpoint_type": _type(record.kind, unaligned),
        "tasks": {},
    }
    if record.reason is None:
        kept = record.kind.is_savepoint or record.checkpoint_id in job.snapshot.checkpoints.kept
        return ended | {"external_path": _path(job, record), "discarded": not kept}
    message = record.message or record.reason.value
    return ended | {"failure_timestamp": record.ended_at_ms, "failure_message": message}


def _pending(job: SeenJob, pending: PendingNow) -> dict[str, Any]:
    vertices = vertex_statistics(dict(pending.subtasks))
    sizes = _sizes(vertices)
    return {
        "className": IN_PROGRESS.lower(),
        "id": pending.checkpoint_id,
        "status": IN_PROGRESS,
        "is_savepoint": pending.kind.is_savepoint,
        "savepointFormat": _format(pending.kind, pending.savepoint_format),
        "trigger_timestamp": pending.triggered_at_ms,
        "latest_ack_timestamp": _newest_ack(pending.triggered_at_ms, vertices),
        **sizes,
        "end_to_end_duration": max(0, job.now_ms - pending.triggered_at_ms),
        "num_subtasks": pending.tasks,
        "num_acknowledged_subtasks": len(pending.subtasks),
        "checkpoint_type": _type(pending.kind, any(vertex.unaligned for vertex in vertices)),
        "tasks": {},
    }


def _path(job: SeenJob, record: CheckpointRecord) -> str:
    return record.path or f"{job.snapshot.card.root}/{job.job_id}/chk-{record.checkpoint_id}"


def _format(kind: SnapshotKind, savepoint_format: SavepointFormat | None) -> str | None:
    return savepoint_format.value.upper() if kind.is_savepoint and savepoint_format is not None else None


def _type(kind: SnapshotKind, unaligned: bool) -> str:
    if kind.stops:
        return "SYNC_SAVEPOINT"
    if kind.is_savepoint:
        return "SAVEPOINT"
    return "UNALIGNED_CHECKPOINT" if unaligned else "CHECKPOINT"


def _newest_ack(triggered_at_ms: int, vertices: Iterable[VertexStatistics]) -> int:
    longest = [vertex.end_to_end_ms.max for vertex in vertices if vertex.subtasks]
    return triggered_at_ms + max(longest) if longest else UNKNOWN


def _sizes(vertices: Iterable[VertexStatistics]) -> dict[str, int]:
    parts = list(vertices)
    in_flight = sum(vertex.in_flight_bytes.total for vertex in parts)
    return {
        "checkpointed_size": sum(vertex.incremental_bytes.total for vertex in parts) + in_flight,
        "state_size": sum(vertex.state_bytes.total for vertex in parts) + in_flight,
        "alignment_buffered": 0,
        "processed_data": UNKNOWN,
        "persisted_data": in_flight,
    }


def summary(values: Iterable[int]) -> dict[str, Any]:
    """Returns minimum, maximum, mean and percentiles.

    If there are no values, percentiles are "NaN" and the rest is 0.
    """
    numbers = sorted(values)
    if not numbers:
        return {"min": 0, "max": 0, "avg": 0, **dict.fromkeys(_PERCENTILES, "NaN")}
    return {
        "min": numbers[0],
        "max": numbers[-1],
        "avg": sum(numbers) // len(numbers),
        **{name: _percentile(numbers, part) for name, part in _PERCENTILES.items()},
    }


def _percentile(numbers: Sequence[int], part: float) -> float:
    """Returns the percentile `part` of numbers, interpolated between the two nearest numbers as in Apache
    Commons Math.
    """
    place = part * (len(numbers) + 1)
    if place < 1:
        return float(numbers[0])
    if place >= len(numbers):
        return float(numbers[-1])
    below = math.floor(place)
    return numbers[below - 1] + (place - below) * (numbers[below] - numbers[below - 1])
