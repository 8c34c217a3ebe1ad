"""Rules of event time, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from tidegate.actors.operators.operator import Emit
from tidegate.actors.operators.watermarks import watermark_generator
from tidegate.actors.operators.watermarks.late_rows import LateRows
from tidegate.actors.operators.watermarks.watermark_pieces import Due, Piece, Times
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS, Watermark, WatermarkStatus
from tidegate.actors.task.channels.watermark_valve import WatermarkValve
from tidegate.actors.task.pipeline.source_cursor import SourceCursor

Patch = Callable[[], AbstractContextManager[Any]]

_process = LateRows.process


def _in_silence(self: LateRows, batch: pa.RecordBatch, emit: Emit) -> None:
    """Breaks: late rows go to the side output. Here they are dropped."""
    aside = self.context.emit_aside
    object.__setattr__(self.context, "emit_aside", lambda tag, rows: None)
    _process(self, batch, emit)
    object.__setattr__(self.context, "emit_aside", aside)


def _as_it_comes(
    times: Times, before_ms: int, delay_ms: int, dues: list[Due], movers: Times | None = None
) -> list[Piece]:
    """Breaks: a row is judged by the rows before it. Here by those of the batches before its own."""
    moving = times if movers is None else movers
    return [Piece(0, len(times), before_ms, max(before_ms, int(moving.max())))]


def _back_and_forth(self: WatermarkValve) -> list[Watermark | WatermarkStatus]:
    """Breaks: event time never goes back. Here it is that of whichever channel has it, every other time."""
    own = vars(self)
    own["turns"] = own.get("turns", 0) + 1
    known = [ms for ms in self._watermark_ms.values() if ms > MIN_WATERMARK_MS]
    if not known:
        return []
    self._emitted_ms = max(known) if own["turns"] % 2 else min(known)
    return [Watermark(self._emitted_ms)]


TIME_PATCHES: dict[str, tuple[int, Patch]] = {
    "time: a late row is dropped in silence": (6, lambda: patch.object(LateRows, "process", _in_silence)),
    "time: a row is judged by its batch": (6, lambda: patch.object(watermark_generator, "pieces_of", _as_it_comes)),
    "time: how far event time is in a split is not restored": (
        6,
        lambda: patch.object(SourceCursor, "_note_event_times", lambda self: None),
    ),
    "time: a watermark goes back": (1, lambda: patch.object(WatermarkValve, "_advance", _back_and_forth)),
}
"""Every such break: its invariant, and the patch."""

_LATE: Mapping[str, Hashable] = {"topology": "late"}
TIME_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    **dict.fromkeys(TIME_PATCHES, _LATE),
    "time: a watermark goes back": {"topology": "timers"},
}
"""What is not drawn for them."""
