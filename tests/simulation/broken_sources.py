"""Rules of sources that have nothing at the moment, or whose splits move on and are found, broken."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tidegate.actors.task.events import SourceBatchRead
from tidegate.actors.task.instructions import ReadSource
from tidegate.actors.task.source_cursor import SourceCursor
from tidegate.actors.task.split_positions import FrozenPositions
from tidegate.storage.ids import CheckpointId

Patch = Callable[[], AbstractContextManager[Any]]

_batch_read, _next_read, _freeze = SourceCursor.batch_read, SourceCursor.next_read, SourceCursor.freeze


def _ends(self: SourceCursor, event: SourceBatchRead) -> int | None:
    return _batch_read(self, event if event.batch is not None else replace(event, at_end=True))


def _from_the_greatest_row(self: SourceCursor, *rows_max: int) -> ReadSource | None:
    read = _next_read(self, *rows_max)
    return None if read is None else replace(read, offset=max(self._offsets))


def _with_what_was_read_ahead(self: SourceCursor, taken: CheckpointId) -> FrozenPositions:
    positions = (replace(p, split=split) for p, split in zip(self._positions, self._read_in, strict=True))
    return FrozenPositions(tuple(positions))


def _found_when_read(self: SourceCursor, event: SourceBatchRead) -> int | None:
    pause_ms = _batch_read(self, replace(event, found=()))
    for split in event.found:
        self._add(split)
    return pause_ms


def _without_what_was_found(self: SourceCursor, taken: CheckpointId) -> FrozenPositions:
    frozen = _freeze(self, taken)
    return replace(frozen, positions=tuple(p for p in frozen.positions if p.split.rows == 0))


_TRICKLING_PATCHES: dict[str, tuple[int, Patch]] = {
    "sources: a split that has nothing has ended": (6, lambda: patch.object(SourceCursor, "batch_read", _ends)),
    "sources: a pause has no end": (7, lambda: patch.object(SourceCursor, "resume", lambda self: None)),
    "sources: a split goes on where another one is": (
        6,
        lambda: patch.object(SourceCursor, "next_read", _from_the_greatest_row),
    ),
}
"""Breaks of sources that have nothing to read at the moment: the invariant, and the patch."""

_FINDING_PATCHES: dict[str, tuple[int, Patch]] = {
    "sources: a split remembers what was read ahead": (
        6,
        lambda: patch.object(SourceCursor, "freeze", _with_what_was_read_ahead),
    ),
    "sources: a split is found before what finds it counts": (
        7,
        lambda: patch.object(SourceCursor, "batch_read", _found_when_read),
    ),
    "sources: what was found is in no checkpoint": (
        6,
        lambda: patch.object(SourceCursor, "freeze", _without_what_was_found),
    ),
}
"""Breaks of sources whose splits are found while the job runs."""

SOURCE_PATCHES = _TRICKLING_PATCHES | _FINDING_PATCHES
"""Every such break: its invariant, and the patch."""

SOURCE_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    **{rule: {"sources": "trickling"} for rule in _TRICKLING_PATCHES},
    **{rule: {"sources": "finding"} for rule in _FINDING_PATCHES},
}
"""Fixed values of the scenarios for these breaks."""
