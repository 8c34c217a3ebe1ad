"""Rules of sources that wait for each other in event time, broken on purpose. Each is a patch while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.source_coordinator import WatermarkAligner
from tidegate.actors.task.source_cursor import SplitAlignment
from tidegate.protocol.identity import TaskId

Patch = Callable[[], AbstractContextManager[Any]]

_holds, _lowest_ms = SplitAlignment.holds, WatermarkAligner.lowest_ms


def _holds_for_ever(self: SplitAlignment, split: int | None) -> bool:
    """Breaks: a split that was held is read when its group has come nearer. Here it stays held."""
    held = self.__dict__.setdefault("held", set())
    if _holds(self, split):
        held.add(split)
    return split in held


def _with_those_at_their_end(self: WatermarkAligner, state: CoordinatorState, members: dict[TaskId, Any]) -> int | None:
    """Breaks: a task at the end of its data does not hold back other tasks. Here its last report still counts."""
    ended, state.ended = state.ended, {}
    try:
        return _lowest_ms(self, state, members)
    finally:
        state.ended = ended


ALIGNMENT_PATCHES: dict[str, tuple[int, Patch]] = {
    "alignment: a split that was held stays held": (7, lambda: patch.object(SplitAlignment, "holds", _holds_for_ever)),
    "alignment: nobody is held": (10, lambda: patch.object(SplitAlignment, "holds", lambda self, split: False)),
    "alignment: how far a task is it tells once": (
        7,
        lambda: patch.object(SplitAlignment, "timer_due", lambda self: None),
    ),
    "alignment: who is at its end holds back": (
        7,
        lambda: patch.object(WatermarkAligner, "lowest_ms", _with_those_at_their_end),
    ),
}
"""Every such break: its invariant, and the patch."""

_PACED: Mapping[str, Hashable] = {"topology": "paced", "rows": 60, "ending": "finish"}
ALIGNMENT_FIXED: Mapping[str, Mapping[str, Hashable]] = dict.fromkeys(ALIGNMENT_PATCHES, _PACED)
"""Fixed values of the scenarios for these breaks."""
