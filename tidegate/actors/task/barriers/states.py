"""States of the barrier aligner, and its inputs as seen from the checkpoint that is pending.

An input is named by what it means, not by the call it came in: a barrier of an old checkpoint and a late abort are both
STALE. So the transition table needs no conditions.
"""

from __future__ import annotations

import enum


class BarrierState(enum.Enum):
    """What the aligner is doing; the value is the sentence that the documentation shows."""

    IDLE = "no checkpoint is pending; aligned barriers may be announced"
    TRIGGERED = "triggered by the coordinator, waits for the channels' ends; nothing is blocked"
    ALIGNING = "some barriers were taken, their channels are blocked; no snapshot yet"
    COLLECTING_UNALIGNED = "the snapshot was taken; the barriers that bound what was in flight are collected"


class BarrierInput(enum.Enum):
    """What the aligner is told; the value is the sentence that the documentation shows.

    "Overtaking" is a barrier that is UNALIGNED, or aligned and over its timeout.
    """

    STALE = "anything that changes nothing: of a checkpoint that is over or older than the pending one, or told again"
    FROM_BLOCKED = "an element of a blocked channel"
    ANNOUNCED = "an aligned barrier of the pending checkpoint has arrived"
    ANNOUNCED_NEXT = "an aligned barrier of a newer checkpoint (or while none is pending) has arrived"
    TAKEN = "an aligned barrier of the pending checkpoint (or while none is pending) was taken"
    OVERTAKING = (
        "an overtaking barrier of the pending checkpoint (or while none is pending): arrived, taken or triggered"
    )
    TRIGGER = "the coordinator triggers an aligned checkpoint while none is pending"
    TIMEOUT = "the timeout of the pending checkpoint (or while none is pending, of an announced one) is over"
    NEWER = "a newer checkpoint: barrier taken, overtaking, triggered, timed out, or cancelled"
    CANCEL = "a cancel barrier of the pending checkpoint (or while none is pending)"
    ABORT = "the coordinator aborts the pending checkpoint"
    ABORT_EARLY = "the coordinator aborts a checkpoint that is not pending yet"
    ABORTED_BEFORE = (
        "a barrier, trigger or cancel barrier of a checkpoint that was aborted early, while none is pending"
    )
    ENDED = "a channel has ended"
