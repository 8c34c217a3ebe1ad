"""Rules of event time, broken on purpose. Each is a patch that holds while a seed runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from random_jobs.window_topologies import PROGRAMS

from tidegate.actors.task import input_gate, output_gate, subtask_checkpoints
from tidegate.actors.task.channels import InFlightElement
from tidegate.actors.task.source_cursor import SourceCursor
from tidegate.actors.task.task_machine import WatermarkValve
from tidegate.operators.functions.async_map import AsyncMap
from tidegate.operators.joins.join_operator import JoinOperator
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.watermarks import watermark_generator
from tidegate.operators.watermarks.watermark_generator import Due, Piece, Times
from tidegate.operators.windows.function_windows import FunctionWindows
from tidegate.operators.windows.window_top import WindowTop
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS, Element, Watermark, WatermarkStatus

Patch = Callable[[], AbstractContextManager[Any]]

_reached = JoinOperator.reached


def _in_silence(of: type[Operator]) -> AbstractContextManager[Any]:
    """Breaks: late rows go to the side output. Here they are dropped."""
    process = of.process

    def processed(self: Operator, batch: pa.RecordBatch, emit: Emit) -> None:
        aside = self.context.emit_aside
        object.__setattr__(self.context, "emit_aside", lambda tag, rows: None)
        process(self, batch, emit)
        object.__setattr__(self.context, "emit_aside", aside)

    return patch.object(of, "process", processed)


def _too_far(self: JoinOperator, keys: pa.RecordBatch) -> Times | int:
    """Breaks: a row that is in time is joined. Here event time seems to be further than it is."""
    return _reached(self, keys) + 20


def _as_it_comes(
    times: Times, before_ms: int, delay_ms: int, dues: list[Due], movers: Times | None = None
) -> list[Piece]:
    """Breaks: a row is late by the rows before it. Here by the rows of earlier batches."""
    moving = times if movers is None else movers
    return [Piece(0, len(times), max(before_ms, int(moving.max())))]


def _back_and_forth(self: WatermarkValve) -> list[Watermark | WatermarkStatus]:
    """Breaks: event time never moves back. Here, every other time, it is the event time of any channel."""
    own = vars(self)
    own["turns"] = own.get("turns", 0) + 1
    known = [ms for ms in self._watermark_ms.values() if ms > MIN_WATERMARK_MS]
    if not known:
        return []
    self._emitted_ms = max(known) if own["turns"] % 2 else min(known)
    return [Watermark(self._emitted_ms)]


@contextmanager
def _rows_alone() -> Iterator[None]:
    """Breaks: watermarks are in flight as well. Here a checkpoint has the rows alone."""

    def keep(held: list[InFlightElement], elements: Iterable[Element | None]) -> None:
        held.extend(element for element in elements if isinstance(element, pa.RecordBatch))

    with ExitStack() as patches:
        for module in (input_gate, output_gate, subtask_checkpoints):
            patches.enter_context(patch.object(module, "keep_in_flight", keep))
        yield


TIME_PATCHES: dict[str, tuple[int, Patch]] = {
    "time: a late row is in no ranking, and nowhere else": (6, lambda: _in_silence(WindowTop)),
    "time: a late row comes to no function, and nowhere else": (6, lambda: _in_silence(FunctionWindows)),
    "time: a row in time is late for a join": (6, lambda: patch.object(JoinOperator, "reached", _too_far)),
    "time: a row is judged by its batch": (6, lambda: patch.object(watermark_generator, "pieces_of", _as_it_comes)),
    "time: how far event time is in a split is not restored": (
        6,
        lambda: patch.object(SourceCursor, "_note_event_times", lambda self: None),
    ),
    "time: a watermark goes back": (1, lambda: patch.object(WatermarkValve, "_advance", _back_and_forth)),
    "time: watermarks in flight are not in the checkpoint": (6, _rows_alone),
    "time: watermarks between calls are not in the checkpoint": (
        6,
        lambda: patch.object(AsyncMap, "_marks", lambda self: []),
    ),
}
"""Every such break: its invariant, and the patch."""

_LATE: Mapping[str, Hashable] = {"topology": "late", "mode": "exactly-once", "sources": "at once"}
_IN_FLIGHT: Mapping[str, Hashable] = {
    "topology": "windows",
    "mode": "exactly-once",
    "sources": "at once",
    "alignment": "unaligned",
    "max_concurrent": 1,
    "interval_ms": 60,
    "buffers": "tiny",
    "rows": 4 * len(PROGRAMS) + 3,
}
"""Sessions whose rows come by one channel, late ones among them."""
TIME_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "time: a late row is in no ranking, and nowhere else": {**_LATE, "rows": 50},
    "time: a late row comes to no function, and nowhere else": {
        **_LATE,
        "topology": "windows",
        "rows": 4 * len(PROGRAMS) + next(number for number, program in enumerate(PROGRAMS) if program.applied),
    },
    "time: a row in time is late for a join": {**_LATE, "rows": 49},
    "time: a row is judged by its batch": {**_LATE, "rows": 51},
    "time: how far event time is in a split is not restored": {**_LATE, "rows": 51},
    "time: a watermark goes back": {"topology": "timers"},
    "time: watermarks in flight are not in the checkpoint": _IN_FLIGHT,
    "time: watermarks between calls are not in the checkpoint": {**_LATE, "rows": 55},
}
"""Fixed values of the scenarios for these breaks. The number of rows selects the program: `late_topologies.py`,
`window_topologies.py`.
"""
