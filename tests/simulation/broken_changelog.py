"""Breaks rules of changelogs and their incremental base.

The rules: what a chain consists of, what builds on a failure, and whose a file is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tidegate.actors.task import incremental_base
from tidegate.actors.task.incremental_base import Chain, ChangeLog, Layer
from tidegate.storage.checkpoints.metadata import StateHandle

Patch = Callable[[], AbstractContextManager[Any]]


# --- chains -----------------------------------------------------------------------------------------------------------


def _without(lost: Callable[[tuple[Layer, ...]], Layer | None]) -> Patch:
    """Snapshots lack the files of one layer of their chains."""

    def handles(self: Chain) -> tuple[StateHandle, ...]:
        gone = lost(self.layers)
        return tuple(handle for layer in self.layers if layer is not gone for handle in layer.handles)

    return lambda: patch.object(Chain, "handles", property(handles))


def _a_segment(layers: tuple[Layer, ...]) -> Layer | None:
    written = [layer for layer in layers[1:] if layer.handles]
    return written[len(written) // 2] if written else None


def _the_base(layers: tuple[Layer, ...]) -> Layer | None:
    return layers[0] if len(layers) > 1 else None


# --- what is built on what --------------------------------------------------------------------------------------------


def _goes_on_above_a_failure(self: ChangeLog, number: int, whole: bool) -> list[StateHandle]:
    # The next base would hold all that was lost, and that comes soon: none is to come.
    self.limits = replace(self.limits, ratio_max=1e9, layers_max=10**9)
    return self.written(number, whole, None)


# --- whose a file is --------------------------------------------------------------------------------------------------


def _all_of_them(layers: list[Layer]) -> list[StateHandle]:
    return [handle for layer in layers for handle in layer.handles]


CHANGELOG_PATCHES: dict[str, tuple[int, Patch]] = {
    "changelog: a segment is lost from a chain": (9, _without(_a_segment)),
    "changelog: the base is lost from a chain": (9, _without(_the_base)),
    "changelog: a segment that failed is built on": (
        9,
        lambda: patch.object(ChangeLog, "failed", _goes_on_above_a_failure),
    ),
    "changelog: it goes on above a canonical savepoint": (
        5,
        lambda: patch.object(ChangeLog, "start_anew", lambda self: None),
    ),
    "changelog: a task deletes what a checkpoint has": (
        5,
        lambda: patch.object(incremental_base, "_own", _all_of_them),
    ),
}
"""Every such break: its invariant, and the patch."""

_LOGGED = {"state": "changelog", "interval_ms": 60, "min_pause_ms": 0, "rows": 120}
_SENSITIVE = {"topology": "timers", "faults": "all", "ending": "cancel", "retention": "retain_on_cancellation"}
_SAVED = {"ask": "savepoint", "savepoints": "canonical", "retained": 1, "ending": "finish"}

CHANGELOG_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    rule: _LOGGED
    | (_SENSITIVE | {"tolerable": 3} if "failed" in rule else {})
    | (_SAVED if "savepoint" in rule else {})
    for rule in CHANGELOG_PATCHES
}
"""Fixed values of the scenarios for these breaks.

Only one seed in ten has an incremental base, and it is short. A lost segment hardly shows where the same keys change
again. So rows wait for a timer, and a restore happens.
"""
