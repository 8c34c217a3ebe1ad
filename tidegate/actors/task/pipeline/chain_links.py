"""`Link`: what an operator chain remembers of each of its operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.channels.turn_pacer import ROWS_UNLIMITED
from tidegate.operators.operator import Emit, Operator
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS


@dataclass(slots=True)
class Link:
    """An operator, and how far it is in event time."""

    operator: Operator
    emit: Emit
    """Takes its output."""
    rows_max: int
    """It gets no more rows than this at once."""
    waits: bool
    """`Operator.waits_for_event_time`, asked once."""
    generated_ms: int = MIN_WATERMARK_MS
    """The newest watermark of its own that was passed on."""
    next_ms: int | None = None
    """The newest watermark that has come, until it begins with it."""
    current_ms: int = MIN_WATERMARK_MS
    """The newest watermark that it has begun with."""
    steps: Iterator[None] | None = None
    """The steps left for that one."""


def link_of(spec: OperatorSpec, emit: Emit) -> Link:
    """Make the operator of a spec."""
    operator = spec.factory()
    rows_max = ROWS_UNLIMITED if spec.batch_rows is None else spec.batch_rows.most
    return Link(operator, emit, rows_max, operator.waits_for_event_time)
