"""Metrics of a job and of its vertices by name, as Flink's REST API has them: without `get` the names alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics
from tidegate.web.model.vertices import metrics_of, vertex_of
from tidegate.web.seen_job import SeenJob

_OF_SUBTASK = {
    "numRecordsIn": "records_in",
    "numRecordsOut": "records_out",
    "numBytesIn": "bytes_in",
    "numBytesOut": "bytes_out",
    "numRecordsInPerSecond": "records_in_per_second",
    "numRecordsOutPerSecond": "records_out_per_second",
    "numBytesInPerSecond": "bytes_in_per_second",
    "numBytesOutPerSecond": "bytes_out_per_second",
    "busyTimeMsPerSecond": "busy_ms_per_second",
    "idleTimeMsPerSecond": "idle_ms_per_second",
    "backPressuredTimeMsPerSecond": "back_pressured_ms_per_second",
    "isBackPressured": "is_back_pressured",
    "currentInputWatermark": "input_watermark_ms",
    "currentOutputWatermark": "output_watermark_ms",
    "watermarkAlignmentDrift": "alignment_drift_ms",
}


def job_metrics(job: SeenJob, names: Collection[str] | None = None) -> list[dict[str, str]]:
    """`/jobs/<id>/metrics`."""
    return _chosen(job.snapshot.values, names)


def vertex_metrics(job: SeenJob, vertex_id: str, names: Collection[str] | None = None) -> list[dict[str, str]]:
    """`/jobs/<id>/vertices/<v>/metrics`: `0.numRecordsIn` is that of the first subtask. Raises NotKnown."""
    vertex_of(job, vertex_id)
    metrics = metrics_of(job, vertex_id)
    values: dict[str, Any] = {}
    for each in () if metrics is None else metrics.subtasks:
        values |= {f"{each.subtask}.{name}": value for name, value in _values(each).items()}
    return _chosen(values, names)


def _values(subtask: SubtaskMetrics) -> dict[str, Any]:
    values = {name: getattr(subtask, field) for name, field in _OF_SUBTASK.items()}
    return {name: value for name, value in values.items() if value is not None}


def _chosen(values: Mapping[str, Any], names: Collection[str] | None) -> list[dict[str, str]]:
    if names is None:
        return [{"id": name} for name in sorted(values)]
    return [{"id": name, "value": _text(values[name])} for name in sorted(set(names)) if name in values]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
