"""The checkpoints of a job, one of them, and their settings, as Flink's REST API has them.

Of a checkpoint that is over the coordinator keeps what each vertex has measured, and for some what each subtask has
(`Chronicle`). Rules: sizes count data in flight, as with Flink; what tidegate does not measure is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidegate.actors.coordinator.chronicle import EndedCheckpoint
from tidegate.actors.coordinator.job.job_spec import Retention
from tidegate.actors.coordinator.state.checkpoint_statistics import (
    CheckpointRecord,
    VertexStatistics,
    vertex_statistics,
)
from tidegate.actors.runtimes.job_snapshot import PendingNow
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.ids import CheckpointId
from tidegate.web.model.numbers import summary
from tidegate.web.model.states import UNKNOWN, NotKnown
from tidegate.web.seen_job import SeenJob

NO_INTERVAL_MS = 2**63 - 1
"""Flink's interval where there are no periodic checkpoints."""
IN_PROGRESS, COMPLETED, FAILED = "IN_PROGRESS", "COMPLETED", "FAILED"
_BACKENDS = {"columnar": "HashMapStateBackend", "rocksdb": "EmbeddedRocksDBStateBackend"}


def checkpoints(job: SeenJob) -> dict[str, Any]:
    """`/jobs/<id>/checkpoints`: counts, summary, the newest ones, and the history, newest first."""
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
    told = {
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
        return told | {"external_path": _path(job, record), "discarded": not kept}
    message = record.message or record.reason.value
    return told | {"failure_timestamp": record.ended_at_ms, "failure_message": message}


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
    told = list(vertices)
    in_flight = sum(vertex.in_flight_bytes.total for vertex in told)
    return {
        "checkpointed_size": sum(vertex.incremental_bytes.total for vertex in told) + in_flight,
        "state_size": sum(vertex.state_bytes.total for vertex in told) + in_flight,
        "alignment_buffered": 0,
        "processed_data": UNKNOWN,
        "persisted_data": in_flight,
    }


def find_checkpoint(job: SeenJob, checkpoint_id: int) -> EndedCheckpoint | PendingNow:
    """The checkpoint of this number, if it is kept. Raises NotKnown."""
    for ended in job.ended:
        if ended.record.checkpoint_id == checkpoint_id:
            return ended
    for pending in job.snapshot.checkpoints.pending:
        if pending.checkpoint_id == checkpoint_id:
            return pending
    newest = f"; the newest {len(job.ended)} are kept" if job.ended else ""
    raise NotKnown(f"job {job.job_id} has no checkpoint {checkpoint_id}, or not any more{newest}")


def newest_checkpoint(job: SeenJob, status: str | None) -> CheckpointId:
    """The number of the newest one that is over, or that has this status. Raises NotKnown."""
    for ended in reversed(job.ended):
        if status in (None, COMPLETED if ended.record.reason is None else FAILED):
            return ended.record.checkpoint_id
    raise NotKnown(f"job {job.job_id} has no such checkpoint yet")


def checkpoint_details(job: SeenJob, checkpoint_id: int) -> dict[str, Any]:
    """`/jobs/<id>/checkpoints/details/<n>`: one checkpoint, with its parts by vertex. Raises NotKnown."""
    found = find_checkpoint(job, checkpoint_id)
    if isinstance(found, PendingNow):
        told, vertices = _pending(job, found), vertex_statistics(dict(found.subtasks))
    else:
        told, vertices = _ended(job, found.record, found.savepoint_format), found.record.vertices
    parts = {vertex.vertex: vertex for vertex in vertices}
    tasks = {
        str(vertex.vertex): _part(told, parts.get(vertex.vertex), _taking_part(job, found, vertex.vertex, parts))
        for vertex in job.about.vertices
    }
    return told | {"tasks": tasks}


def _taking_part(job: SeenJob, found: EndedCheckpoint | PendingNow, vertex: str, parts: Mapping[Any, Any]) -> int:
    """How many subtasks of a vertex take part. Of a checkpoint that is over nobody counts those that had finished."""
    parallelism = next(each.parallelism for each in job.about.vertices if each.vertex == vertex)
    if isinstance(found, PendingNow):
        return next((count for name, count in found.vertex_tasks.items() if name == vertex), parallelism)
    if found.record.reason is None:
        return parts[vertex].subtasks if vertex in parts else 0
    return parallelism


def _part(told: Mapping[str, Any], part: VertexStatistics | None, subtasks: int) -> dict[str, Any]:
    vertices = () if part is None else (part,)
    acknowledged = 0 if part is None else part.subtasks
    done = told["status"] == IN_PROGRESS and 0 < subtasks == acknowledged
    return {
        "id": told["id"],
        "status": COMPLETED if done else told["status"],
        "latest_ack_timestamp": _newest_ack(told["trigger_timestamp"], vertices),
        **_sizes(vertices),
        "end_to_end_duration": 0 if part is None else part.end_to_end_ms.max,
        "num_subtasks": subtasks,
        "num_acknowledged_subtasks": acknowledged,
    }


def checkpoint_config(job: SeenJob) -> dict[str, Any]:
    """`/jobs/<id>/checkpoints/config`."""
    settings, about = job.about.checkpoints, job.about
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
