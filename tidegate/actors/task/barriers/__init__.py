"""Barrier handling of one task: when its inputs' barriers make a snapshot, and whom they block until then.

Two handlers keep one interface: `BarrierAligner` for exactly-once (aligned, unaligned, and aligned with a timeout, as
each barrier says), `BarrierTracker` for at-least-once. Neither does I/O nor reads a clock.
"""

from __future__ import annotations

from tidegate.actors.protocol.identity import ChannelId
from tidegate.actors.task.barriers.barrier_aligner import ANNOUNCED_MAX, BarrierAligner
from tidegate.actors.task.barriers.barrier_handler import BarrierHandler, Outcome
from tidegate.actors.task.barriers.barrier_tracker import TRACKED_MAX, BarrierTracker
from tidegate.actors.task.barriers.collected import timeout_at_ms_of
from tidegate.actors.task.barriers.diagram import render, transition_table
from tidegate.actors.task.barriers.remembered import REMEMBERED_ABORTS_MAX
from tidegate.actors.task.barriers.states import BarrierInput, BarrierState

__all__ = [
    "ANNOUNCED_MAX",
    "REMEMBERED_ABORTS_MAX",
    "TRACKED_MAX",
    "BarrierAligner",
    "BarrierHandler",
    "BarrierInput",
    "BarrierState",
    "BarrierTracker",
    "Outcome",
    "make_handler",
    "render",
    "timeout_at_ms_of",
    "transition_table",
]


def make_handler(channels: frozenset[ChannelId], exactly_once: bool) -> BarrierHandler:
    """The handler of a task with these input channels (none: a source) in the job's checkpointing mode."""
    return BarrierAligner(channels) if exactly_once else BarrierTracker(channels)
