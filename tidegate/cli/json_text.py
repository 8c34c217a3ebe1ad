"""Turns the dataclasses of `tidegate.recovery` into JSON: what the commands print with `--json`."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from tidegate.recovery.contents.inspection import CheckpointReport


def to_json(value: Any) -> str:
    """One line of JSON. Names are those of the fields; sizes are in bytes, times in milliseconds since the epoch."""
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, CheckpointReport):
        return _report(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return value


def _report(report: CheckpointReport) -> dict[str, Any]:
    """The report without the whole metadata, which may hold state."""
    metadata = report.metadata
    return {
        "path": report.path,
        "job_id": metadata.job_id,
        "job_name": metadata.job_name,
        "checkpoint_id": metadata.checkpoint_id,
        "kind": metadata.kind.value,
        "savepoint_format": None if metadata.savepoint_format is None else metadata.savepoint_format.value,
        "void": metadata.void,
        "final": metadata.final,
        "attempt": metadata.attempt,
        "triggered_at_ms": metadata.triggered_at_ms,
        "restored_from": metadata.restored_from,
        "size_bytes": report.size_bytes,
        "in_flight_bytes": report.in_flight_bytes,
        "needs": list(report.needs),
        "operators": _plain(report.operators),
    }
