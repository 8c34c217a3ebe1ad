"""`BarrierAligner`: barrier handling for exactly-once: aligned, unaligned, or with a timeout, as each barrier requests.

Rules (Carbone et al., "Lightweight Asynchronous Snapshots for Distributed Dataflows"; Flink's
SingleCheckpointBarrierHandler):

- Aligned (and forced aligned): once a channel's barrier was taken, no further element of that channel is processed
  until every channel has delivered its barrier or has ended. A barrier that has only arrived, and waits in its queue,
  blocks no channel and does not affect an older checkpoint.
- Unaligned: the first barrier that arrives triggers the snapshot, and no channel is blocked. The checkpoint stays
  pending until all barriers have arrived, because the elements before them belong to it.
- Aligned with a timeout: becomes unaligned if the timeout passes before the last barrier was taken, or as soon as an
  unaligned barrier of the checkpoint arrives.
- A checkpoint ends only once for this task, and ids only grow. A newer checkpoint supersedes the pending one.
- An abort that comes before the first barrier is remembered, so that the barrier blocks no channel.

`TABLE` lists which method handles which input in which state. An input that the state does not allow raises
ProtocolError before anything has changed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tidegate.actors.task.barrier_handler import NOTHING, BarrierHandler, BarrierTracker, Outcome
from tidegate.actors.task.invariants import check_newer
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Alignment, Barrier
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId


class BarrierState(enum.Enum):
    """The state of the aligner. The value of each member is its explanation in the documentation."""

    IDLE = "no checkpoint is pending; aligned barriers may be announced"
    TRIGGERED = "triggered by the coordinator, waits for the channels' ends; nothing is blocked"
    ALIGNING = "some barriers were taken, their channels are blocked; no snapshot yet"
    COLLECTING_UNALIGNED = "the snapshot was taken; the barriers that bound what was in flight are collected"


class BarrierInput(enum.Enum):
    """The input of the aligner. The value of each member is its explanation in the documentation."""

    STALE = "an input without effect: its checkpoint is over or older than the pending one, or the input is repeated"
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


@dataclass(slots=True)
class Collected:
    """The barriers of one checkpoint that have arrived so far.

    `arrived` has the channels with a barrier in their queue, and `taken` the channels whose barrier was taken from the
    queue. Times are in ms.
    """

    barrier: Barrier
    arrived: set[ChannelId] = field(default_factory=set)
    taken: set[ChannelId] = field(default_factory=set)
    started_at_ms: int | None = None
    timeout_at_ms: int | None = None
    timer_armed: bool = False

    def start(self, at_ms: int) -> None:
        """Records the start of the alignment, unless it has started already."""
        if self.started_at_ms is None:
            self.started_at_ms = at_ms

    def arm(self, barrier: Barrier, at_ms: int) -> int | None:
        """Returns the time, in ms, for which the caller has to set a timer, or None.

        A timer is set once, for the first barrier with an alignment timeout.
        """
        timeout_at_ms = timeout_at_ms_of(barrier, at_ms)
        if self.timer_armed or timeout_at_ms is None:
            return None
        self.timer_armed = True
        self.timeout_at_ms = timeout_at_ms
        return timeout_at_ms


@dataclass(frozen=True, slots=True)
class Step:
    """One input of the aligner, passed to the action of a transition. `taken`: the barrier was taken from its queue."""

    checkpoint_id: CheckpointId
    at_ms: int = 0
    channel: ChannelId | None = None
    barrier: Barrier | None = None
    taken: bool = False


def overtakes(barrier: Barrier, at_ms: int) -> bool:
    """Returns whether a barrier overtakes the elements that are queued before it: it is unaligned, or its timeout
    has passed.
    """
    timeout_at_ms = timeout_at_ms_of(barrier, at_ms)
    is_over = timeout_at_ms is not None and timeout_at_ms <= at_ms
    return is_over or barrier.options.alignment is Alignment.UNALIGNED


def timeout_at_ms_of(barrier: Barrier, at_ms: int) -> int | None:
    """Returns the time, in ms, from which a barrier may overtake queued elements, or None without a timeout.

    The trigger time comes from another machine's clock, or from this machine's clock before it was set back. If it is
    later than `at_ms`, `at_ms` is used instead.
    """
    if not barrier.options.timeoutable:
        return None
    assert barrier.options.aligned_timeout_ms is not None
    return min(barrier.triggered_at_ms, at_ms) + barrier.options.aligned_timeout_ms


ANNOUNCED_MAX = 50
"""Limit of checkpoints whose arrived barriers are remembered. A further one begins when one of its barriers is
taken.
"""


class BarrierAligner(BarrierHandler):
    """The `BarrierHandler` for exactly-once checkpoints, which aligns barriers."""

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        super().__init__(channels)
        self._state = BarrierState.IDLE
        self._pending: Collected | None = None
        self._known: dict[CheckpointId, Collected] = {}
        """The barriers of the pending checkpoint, and of newer checkpoints with arrived barriers."""

    @property
    def state(self) -> BarrierState:
        """Returns the current state of the aligner."""
        return self._state

    @property
    def pending(self) -> CheckpointId | None:
        """The checkpoint whose barriers are being collected, or None."""
        return None if self._pending is None else self._pending.barrier.checkpoint_id

    def invalidated_by_end_of_input(self) -> tuple[CheckpointId, ...]:
        """Returns an empty tuple: elements after a channel's barrier are blocked, so no snapshot is invalidated."""
        return ()

    def blocks(self, channel: ChannelId) -> bool:
        """Returns whether elements of this channel must wait for the barriers of other channels."""
        return self._state is BarrierState.ALIGNING and channel in self._of_pending().taken

    @property
    def blocks_for(self) -> CheckpointId | None:
        """Returns the checkpoint for which channels are blocked, or None."""
        return self.pending if self._state is BarrierState.ALIGNING else None

    # --- inputs: each names what it means in the present state ----------------------------------------------------

    def announced(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles a barrier that has arrived at the end of the channel's queue."""
        self._channels.check(channel)
        step = Step(barrier.checkpoint_id, at_ms, channel, barrier)
        if overtakes(barrier, at_ms):
            return self._take_in(BarrierInput.OVERTAKING, step)
        if self._is_stale(step.checkpoint_id) or step.checkpoint_id in self._aborted_early:
            return self.apply(BarrierInput.STALE, step)
        if step.checkpoint_id == self.pending:
            return self.apply(BarrierInput.ANNOUNCED, step)
        return self.apply(BarrierInput.ANNOUNCED_NEXT, step)

    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles a barrier that was taken from the channel's queue."""
        self._channels.check(channel)
        step = Step(barrier.checkpoint_id, at_ms, channel, barrier, taken=True)
        if self.blocks(channel):
            return self.apply(BarrierInput.FROM_BLOCKED, step)
        self._channels.took(channel, step.checkpoint_id)
        overtaking = overtakes(barrier, at_ms)
        if overtaking and barrier.options.timeoutable:
            # The last barrier aligns, however late it is: there is nothing left to overtake.
            known = self._known.get(step.checkpoint_id)
            overtaking = self._channels.missing({channel} | (known.taken if known else set())) > 0
        return self._take_in(BarrierInput.OVERTAKING if overtaking else BarrierInput.TAKEN, step)

    def trigger(self, barrier: Barrier, at_ms: int) -> Outcome:
        """Handles the coordinator's trigger of a checkpoint in this task."""
        step = Step(barrier.checkpoint_id, at_ms, barrier=barrier)
        if step.checkpoint_id == self.pending:
            return self.apply(BarrierInput.STALE, step)
        overtaking = overtakes(barrier, at_ms)
        if barrier.options.timeoutable:
            overtaking = overtaking and self._channels.missing(set()) > 0
        return self._take_in(BarrierInput.OVERTAKING if overtaking else BarrierInput.TRIGGER, step)

    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId, at_ms: int) -> Outcome:
        """Handles a cancel barrier that was taken from the channel's queue."""
        self._channels.check(channel)
        step = Step(checkpoint_id, at_ms, channel)
        return self._take_in(BarrierInput.FROM_BLOCKED if self.blocks(channel) else BarrierInput.CANCEL, step)

    def abort(self, checkpoint_id: CheckpointId) -> Outcome:
        """Handles the abort of a checkpoint by the coordinator."""
        step = Step(checkpoint_id)
        if self._is_stale(checkpoint_id):
            return self.apply(BarrierInput.STALE, step)
        return self.apply(BarrierInput.ABORT if checkpoint_id == self.pending else BarrierInput.ABORT_EARLY, step)

    def channel_ended(self, channel: ChannelId, at_ms: int) -> Outcome:
        """Handles the end of a channel."""
        self._channels.check(channel)
        given = BarrierInput.FROM_BLOCKED if self.blocks(channel) else BarrierInput.ENDED
        return self.apply(given, Step(CheckpointId(0), at_ms, channel))

    def timer(self, at_ms: int) -> Outcome:
        """Handles a timer that an outcome requested: barriers of the oldest checkpoint past its timeout now
        overtake.
        """
        due = sorted(n for n, c in self._known.items() if c.timeout_at_ms is not None and c.timeout_at_ms <= at_ms)
        if not due:
            return self.apply(BarrierInput.STALE, Step(CheckpointId(0), at_ms))
        outcome = self._take_in(BarrierInput.TIMEOUT, Step(due[0], at_ms))
        return replace(outcome, timer_at_ms=at_ms) if len(due) > 1 else outcome

    def _take_in(self, given: BarrierInput, step: Step) -> Outcome:
        """Applies an input that may start or end a checkpoint.

        The input is ignored if its checkpoint is over. If its checkpoint is newer than the pending one, the pending
        checkpoint is aborted first.
        """
        if given is BarrierInput.FROM_BLOCKED:
            return self.apply(given, step)
        if self._is_stale(step.checkpoint_id):
            return self.apply(BarrierInput.STALE, step)
        superseded = NOTHING
        if self.pending is not None and step.checkpoint_id > self.pending:
            superseded = self.apply(BarrierInput.NEWER, step)
        if step.checkpoint_id in self._aborted_early:
            given = BarrierInput.ABORTED_BEFORE
        outcome = self.apply(given, step)
        return replace(outcome, cancelled=superseded.cancelled + outcome.cancelled)

    def apply(self, given: BarrierInput, step: Step) -> Outcome:
        """Makes the transition of the table for this input. Raises ProtocolError if the table has none."""
        transition = TABLE[self._state, given]
        if transition.act is None:
            raise ProtocolError(
                f"the barrier aligner is {self._state.name} at checkpoint {self.pending} and got {given.name} of "
                f"checkpoint {step.checkpoint_id} on channel {step.channel}; this is a bug in tidegate, please report "
                "it"
            )
        outcome = transition.act(self, step)
        assert self._state in transition.to, "the table names every state that an action leads to"
        assert (self._pending is None) == (self._state is BarrierState.IDLE), "IDLE is having nothing pending"
        return outcome

    def _is_stale(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id <= self._closed or (self.pending is not None and checkpoint_id < self.pending)

    # --- actions: what the table names ------------------------------------------------------------------------------

    def _ignore(self, step: Step) -> Outcome:
        return NOTHING

    def _remember(self, step: Step) -> Outcome:
        """Stores that an aligned barrier has arrived in the queue of a channel.

        Nothing else happens until the barrier is taken from the queue, or its timeout passes.
        """
        assert step.channel is not None
        assert step.barrier is not None
        if step.checkpoint_id not in self._known and len(self._known) >= ANNOUNCED_MAX:
            return NOTHING
        collected = self._collected(step)
        collected.arrived.add(step.channel)
        if step.barrier.options.timeoutable:
            collected.start(step.at_ms)
        return Outcome(timer_at_ms=collected.arm(step.barrier, step.at_ms))

    def _align(self, step: Step) -> Outcome:
        """Blocks the channel until the barriers of all channels were taken."""
        return self._await_channels(step, BarrierState.ALIGNING)

    def _wait_for_ends(self, step: Step) -> Outcome:
        """Waits until every channel has ended, because no barrier will arrive. The snapshot follows then."""
        return self._await_channels(step, BarrierState.TRIGGERED)

    def _overtake(self, step: Step) -> Outcome:
        """Requests the snapshot before the queued elements are processed, and collects the missing barriers."""
        collected = self.begin(step, BarrierState.COLLECTING_UNALIGNED)
        collected.timeout_at_ms = None
        self._snapshot_started_at_ms = collected.started_at_ms
        barrier = step.barrier or collected.barrier
        options = replace(barrier.options, alignment=Alignment.UNALIGNED)
        self._close_if_collected()
        return Outcome(snapshot=replace(barrier, options=options))

    def _collect(self, step: Step) -> Outcome:
        """Records that the barrier of one more channel has arrived, which ends the in-flight elements of the channel.

        The snapshot is taken already, so an aligned barrier has the same effect as an unaligned one.
        """
        assert step.channel is not None
        self._of_pending().arrived.add(step.channel)
        self._close_if_collected()
        return NOTHING

    def _end_channel(self, step: Step) -> Outcome:
        assert step.channel is not None
        self._channels.end(step.channel)
        for collected in self._known.values():
            collected.arrived.discard(step.channel)
        if self._state is BarrierState.COLLECTING_UNALIGNED:
            self._close_if_collected()
            return NOTHING
        return NOTHING if self._state is BarrierState.IDLE else self._snapshot_if_aligned()

    def _supersede(self, step: Step) -> Outcome:
        return self._give_up_pending(CheckpointFailureReason.SUBSUMED)

    def _cancel_pending(self, step: Step) -> Outcome:
        return self._give_up_pending(CheckpointFailureReason.CANCEL_BARRIER)

    def _abort_pending(self, step: Step) -> Outcome:
        return self._give_up_pending(None)

    def _cancel_unseen(self, step: Step) -> Outcome:
        """Closes a checkpoint that was cancelled before its first barrier, so that later barriers block no channel."""
        self.mark_over(step.checkpoint_id)
        return Outcome(cancelled=((step.checkpoint_id, CheckpointFailureReason.CANCEL_BARRIER),))

    def _give_up_aborted(self, step: Step) -> Outcome:
        self.mark_over(step.checkpoint_id)
        return Outcome(cancelled=((step.checkpoint_id, None),))

    def _remember_abort(self, step: Step) -> Outcome:
        self._aborted_early.add(step.checkpoint_id)
        self._known.pop(step.checkpoint_id, None)
        return NOTHING

    # --- parts of actions -------------------------------------------------------------------------------------------

    def _collected(self, step: Step) -> Collected:
        collected = self._known.get(step.checkpoint_id)
        if collected is None:
            assert step.barrier is not None
            collected = self._known[step.checkpoint_id] = Collected(step.barrier)
        return collected

    def begin(self, step: Step, state: BarrierState) -> Collected:
        """Makes the checkpoint of this step the pending one, unless it is pending already, and enters the given
        state.
        """
        assert self._pending is None or self.pending == step.checkpoint_id, "a newer one supersedes first"
        # Older checkpoints of which barriers have only arrived are stale now: their timeouts must not come up.
        self._known = {n: c for n, c in self._known.items() if n >= step.checkpoint_id}
        collected = self._pending = self._collected(step)
        self._state = state
        collected.start(step.at_ms)
        if step.channel is not None:
            collected.arrived.add(step.channel)
            if step.taken:
                collected.taken.add(step.channel)
        return collected

    def _await_channels(self, step: Step, state: BarrierState) -> Outcome:
        """Starts to wait for the barriers of all channels. If none is missing, requests the snapshot at once."""
        assert step.barrier is not None
        timer_at_ms = self.begin(step, state).arm(step.barrier, step.at_ms)
        outcome = self._snapshot_if_aligned()
        return outcome if outcome.snapshot is not None else Outcome(timer_at_ms=timer_at_ms)

    def _of_pending(self) -> Collected:
        assert self._pending is not None
        return self._pending

    def _snapshot_if_aligned(self) -> Outcome:
        pending = self._of_pending()
        if self._channels.missing(pending.taken):
            return NOTHING
        self._snapshot_started_at_ms = pending.started_at_ms
        self.mark_over(pending.barrier.checkpoint_id)
        return Outcome(snapshot=pending.barrier)

    def _close_if_collected(self) -> None:
        pending = self._of_pending()
        if not self._channels.missing(pending.arrived):
            self.mark_over(pending.barrier.checkpoint_id)

    def _give_up_pending(self, reason: CheckpointFailureReason | None) -> Outcome:
        checkpoint_id = self._of_pending().barrier.checkpoint_id
        self.mark_over(checkpoint_id)
        return Outcome(cancelled=((checkpoint_id, reason),))

    def mark_over(self, checkpoint_id: CheckpointId) -> None:
        """Records that this checkpoint and all older ones are over for the task."""
        check_newer(checkpoint_id, self._closed)
        self._closed = checkpoint_id
        self._pending = None
        self._state = BarrierState.IDLE
        self._known = {n: collected for n, collected in self._known.items() if n > checkpoint_id}
        self._aborted_early.forget_up_to(checkpoint_id)


Action: TypeAlias = Callable[[BarrierAligner, Step], Outcome]


@dataclass(frozen=True, slots=True)
class Transition:
    """An entry of the aligner's transition table: the action for an input in a state, and the states to which it may
    lead.

    `act` is None if the input is not allowed.
    """

    act: Action | None = None
    to: tuple[BarrierState, ...] = ()


_IDLE, _TRIGGERED, _ALIGNING, _COLLECTING = BarrierState
_ILLEGAL = Transition()
_Aligner = BarrierAligner


def _stay(act: Action, state: BarrierState) -> Transition:
    return Transition(act, (state,))


TABLE: dict[tuple[BarrierState, BarrierInput], Transition] = {
    (_IDLE, BarrierInput.STALE): _stay(_Aligner._ignore, _IDLE),
    (_IDLE, BarrierInput.FROM_BLOCKED): _ILLEGAL,
    (_IDLE, BarrierInput.ANNOUNCED): _ILLEGAL,
    (_IDLE, BarrierInput.ANNOUNCED_NEXT): _stay(_Aligner._remember, _IDLE),
    (_IDLE, BarrierInput.TAKEN): Transition(_Aligner._align, (_ALIGNING, _IDLE)),
    (_IDLE, BarrierInput.OVERTAKING): Transition(_Aligner._overtake, (_COLLECTING, _IDLE)),
    (_IDLE, BarrierInput.TRIGGER): Transition(_Aligner._wait_for_ends, (_TRIGGERED, _IDLE)),
    (_IDLE, BarrierInput.TIMEOUT): Transition(_Aligner._overtake, (_COLLECTING, _IDLE)),
    (_IDLE, BarrierInput.NEWER): _ILLEGAL,
    (_IDLE, BarrierInput.CANCEL): _stay(_Aligner._cancel_unseen, _IDLE),
    (_IDLE, BarrierInput.ABORT): _ILLEGAL,
    (_IDLE, BarrierInput.ABORT_EARLY): _stay(_Aligner._remember_abort, _IDLE),
    (_IDLE, BarrierInput.ABORTED_BEFORE): _stay(_Aligner._give_up_aborted, _IDLE),
    (_IDLE, BarrierInput.ENDED): _stay(_Aligner._end_channel, _IDLE),
    (_TRIGGERED, BarrierInput.STALE): _stay(_Aligner._ignore, _TRIGGERED),
    (_TRIGGERED, BarrierInput.FROM_BLOCKED): _ILLEGAL,
    (_TRIGGERED, BarrierInput.ANNOUNCED): _stay(_Aligner._remember, _TRIGGERED),
    (_TRIGGERED, BarrierInput.ANNOUNCED_NEXT): _stay(_Aligner._remember, _TRIGGERED),
    (_TRIGGERED, BarrierInput.TAKEN): Transition(_Aligner._align, (_ALIGNING, _IDLE)),
    (_TRIGGERED, BarrierInput.OVERTAKING): Transition(_Aligner._overtake, (_COLLECTING, _IDLE)),
    (_TRIGGERED, BarrierInput.TRIGGER): _ILLEGAL,
    (_TRIGGERED, BarrierInput.TIMEOUT): Transition(_Aligner._overtake, (_COLLECTING, _IDLE)),
    (_TRIGGERED, BarrierInput.NEWER): Transition(_Aligner._supersede, (_IDLE,)),
    (_TRIGGERED, BarrierInput.CANCEL): Transition(_Aligner._cancel_pending, (_IDLE,)),
    (_TRIGGERED, BarrierInput.ABORT): Transition(_Aligner._abort_pending, (_IDLE,)),
    (_TRIGGERED, BarrierInput.ABORT_EARLY): _stay(_Aligner._remember_abort, _TRIGGERED),
    (_TRIGGERED, BarrierInput.ABORTED_BEFORE): _ILLEGAL,
    (_TRIGGERED, BarrierInput.ENDED): Transition(_Aligner._end_channel, (_TRIGGERED, _IDLE)),
    (_ALIGNING, BarrierInput.STALE): _stay(_Aligner._ignore, _ALIGNING),
    (_ALIGNING, BarrierInput.FROM_BLOCKED): _ILLEGAL,
    (_ALIGNING, BarrierInput.ANNOUNCED): _stay(_Aligner._remember, _ALIGNING),
    (_ALIGNING, BarrierInput.ANNOUNCED_NEXT): _stay(_Aligner._remember, _ALIGNING),
    (_ALIGNING, BarrierInput.TAKEN): Transition(_Aligner._align, (_ALIGNING, _IDLE)),
    (_ALIGNING, BarrierInput.OVERTAKING): Transition(_Aligner._overtake, (_COLLECTING, _IDLE)),
    (_ALIGNING, BarrierInput.TRIGGER): _ILLEGAL,
    (_ALIGNING, BarrierInput.TIMEOUT): Transition(_Aligner._overtake, (_COLLECTING, _IDLE)),
    (_ALIGNING, BarrierInput.NEWER): Transition(_Aligner._supersede, (_IDLE,)),
    (_ALIGNING, BarrierInput.CANCEL): Transition(_Aligner._cancel_pending, (_IDLE,)),
    (_ALIGNING, BarrierInput.ABORT): Transition(_Aligner._abort_pending, (_IDLE,)),
    (_ALIGNING, BarrierInput.ABORT_EARLY): _stay(_Aligner._remember_abort, _ALIGNING),
    (_ALIGNING, BarrierInput.ABORTED_BEFORE): _ILLEGAL,
    (_ALIGNING, BarrierInput.ENDED): Transition(_Aligner._end_channel, (_ALIGNING, _IDLE)),
    (_COLLECTING, BarrierInput.STALE): _stay(_Aligner._ignore, _COLLECTING),
    (_COLLECTING, BarrierInput.FROM_BLOCKED): _ILLEGAL,
    (_COLLECTING, BarrierInput.ANNOUNCED): Transition(_Aligner._collect, (_COLLECTING, _IDLE)),
    (_COLLECTING, BarrierInput.ANNOUNCED_NEXT): _stay(_Aligner._remember, _COLLECTING),
    (_COLLECTING, BarrierInput.TAKEN): Transition(_Aligner._collect, (_COLLECTING, _IDLE)),
    (_COLLECTING, BarrierInput.OVERTAKING): Transition(_Aligner._collect, (_COLLECTING, _IDLE)),
    (_COLLECTING, BarrierInput.TRIGGER): _ILLEGAL,
    (_COLLECTING, BarrierInput.TIMEOUT): _ILLEGAL,
    (_COLLECTING, BarrierInput.NEWER): Transition(_Aligner._supersede, (_IDLE,)),
    (_COLLECTING, BarrierInput.CANCEL): Transition(_Aligner._cancel_pending, (_IDLE,)),
    (_COLLECTING, BarrierInput.ABORT): Transition(_Aligner._abort_pending, (_IDLE,)),
    (_COLLECTING, BarrierInput.ABORT_EARLY): _stay(_Aligner._remember_abort, _COLLECTING),
    (_COLLECTING, BarrierInput.ABORTED_BEFORE): _ILLEGAL,
    (_COLLECTING, BarrierInput.ENDED): Transition(_Aligner._end_channel, (_COLLECTING, _IDLE)),
}
"""The transition for each pair of state and input."""


def make_handler(channels: frozenset[ChannelId], exactly_once: bool) -> BarrierHandler:
    """Returns the barrier handler of a task with these input channels (none for a source)."""
    return BarrierAligner(channels) if exactly_once else BarrierTracker(channels)
