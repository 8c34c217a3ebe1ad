"""The events of an outage: the event log cannot be written for a while."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class StorageWentAway:
    """The event log cannot be written. Nothing can be decided before `StorageCameBack`."""

    at_ms: int
    error: str


@wire
@dataclass(frozen=True, slots=True)
class StorageCameBack:
    """The event log can be written again."""

    at_ms: int
