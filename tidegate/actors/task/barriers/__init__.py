"""Barrier handling of one task: when it takes the snapshot, and which channels are blocked until then.

`SubtaskCheckpoints` tells a handler of every barrier, and does what the handler answers. Two handlers have one
interface: `BarrierAligner` for exactly-once (aligned, unaligned, or aligned with a timeout, as each barrier says), and
`BarrierTracker` for at-least-once. They do no I/O and read no clock.
"""

from __future__ import annotations

from tidegate.actors.task.barriers.barrier_aligner import ANNOUNCED_MAX, BarrierAligner
from tidegate.actors.task.barriers.barrier_handler import BarrierHandler, Outcome
from tidegate.actors.task.barriers.barrier_tracker import TRACKED_MAX, BarrierTracker
from tidegate.actors.task.barriers.collected import timeout_at_ms_of
from tidegate.actors.task.barriers.diagram import render, transition_table
from tidegate.actors.task.barriers.remembered import REMEMBERED_ABORTS_MAX
from tidegate.actors.task.barriers.states import BarrierInput, BarrierState
from tidegate.protocol.identity import ChannelId

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
