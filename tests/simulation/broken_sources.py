"""Rules of sources that have nothing at the moment, broken."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tidegate.actors.task.messages.events import SourceBatchRead
from tidegate.actors.task.messages.instructions import ReadSource
from tidegate.actors.task.pipeline.source_cursor import SourceCursor

Patch = Callable[[], AbstractContextManager[Any]]

_batch_read, _next_read = SourceCursor.batch_read, SourceCursor.next_read


def _ends(self: SourceCursor, event: SourceBatchRead) -> int | None:
    return _batch_read(self, event if event.batch is not None else replace(event, at_end=True))


def _from_the_greatest_row(self: SourceCursor, *rows_max: int) -> ReadSource | None:
    read = _next_read(self, *rows_max)
    return None if read is None else replace(read, offset=max(self._offsets))


SOURCE_PATCHES: dict[str, tuple[int, Patch]] = {
    "sources: a split that has nothing has ended": (6, lambda: patch.object(SourceCursor, "batch_read", _ends)),
    "sources: a pause has no end": (7, lambda: patch.object(SourceCursor, "resume", lambda self: None)),
    "sources: a split goes on where another one is": (
        6,
        lambda: patch.object(SourceCursor, "next_read", _from_the_greatest_row),
    ),
}
"""Every such break: its invariant, and the patch."""

SOURCE_FIXED: Mapping[str, Mapping[str, Hashable]] = {rule: {"sources": "trickling"} for rule in SOURCE_PATCHES}
"""What is not drawn for them."""
