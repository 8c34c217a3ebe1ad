"""Breaks of which request may start while checkpoints are pending: limits that are ignored, or that count other
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator import checkpoint_requests
from tidegate.actors.coordinator.checkpoint_requests import (
    CheckpointProperties,
    Demand,
    Pause,
    Start,
    decide,
)
from tidegate.actors.coordinator.checkpoints import checkpoint_coordinator
from tidegate.actors.coordinator.job_spec import CheckpointSettings

Patch = Callable[[], AbstractContextManager[Any]]


def _room(rule: Callable[[CheckpointProperties, Demand, CheckpointSettings], bool]) -> Patch:
    return lambda: patch.object(checkpoint_requests, "has_room", rule)


def _savepoints_know_no_limit(asked: CheckpointProperties, demand: Demand, settings: CheckpointSettings) -> bool:
    return asked.kind.is_savepoint or demand.pending < settings.max_concurrent


def _savepoints_count_for_nobody(asked: CheckpointProperties, demand: Demand, settings: CheckpointSettings) -> bool:
    counted = demand.savepoints if asked.kind.is_savepoint else demand.pending - demand.savepoints
    return counted < settings.max_concurrent


def _also_of_unaligned_ones(asked: CheckpointProperties, demand: Demand, settings: CheckpointSettings) -> bool:
    counted = demand.savepoints if asked.kind.is_savepoint else demand.pending
    return counted < settings.max_concurrent


def _while_hooks_are_called(demand: Demand, settings: CheckpointSettings, at_ms: int) -> Start | Pause | None:
    return decide(replace(demand, hooks=False), settings, at_ms)


REQUEST_PATCHES: dict[str, tuple[int, Patch]] = {
    "requests: one starts while the hooks of another are called": (
        10,
        lambda: patch.object(checkpoint_coordinator, "decide", _while_hooks_are_called),
    ),
    "requests: savepoints do not wait for one another": (10, _room(_savepoints_know_no_limit)),
    "requests: checkpoints do not wait for savepoints": (10, _room(_savepoints_count_for_nobody)),
    "requests: savepoints go ahead of unaligned checkpoints": (10, _room(_also_of_unaligned_ones)),
}
"""Every such break: its invariant, and the patch."""

_ASKED = {"ask": "savepoint", "max_concurrent": 1, "interval_ms": 60, "min_pause_ms": 0, "ending": "finish"}
REQUEST_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    rule: _ASKED | {"mode": "exactly-once", "alignment": "unaligned" if "unaligned" in rule else "aligned"}
    for rule in REQUEST_PATCHES
} | {"requests: one starts while the hooks of another are called": _ASKED | {"hooks": "one", "faults": "storage"}}
"""Fixed values of the scenarios for these breaks: savepoints have to be close together, or start while a checkpoint is
pending.
"""
