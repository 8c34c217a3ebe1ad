"""Takes the checkpoints of one subtask: barriers in, snapshot, barriers out (Flink's `SubtaskCheckpointCoordinator`).

The task machine passes `SubtaskCheckpoints` barriers, triggers, aborts, and the results of writes. Rules:

- The order of a snapshot: prepare, barrier out, in-flight elements, synchronous part. The asynchronous part and the
  acknowledgement follow.
- While the operators are finishing no snapshot is taken, because a half finished operator cannot be restored. Inputs
  about checkpoints are deferred meanwhile (`DeferredInputs`), and handled afterwards, in order.
- An unaligned barrier becomes forced-aligned on an edge where it must not overtake, and unaligned again behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import pyarrow as pa

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.barrier_aligner import timeout_at_ms_of
from tidegate.actors.task.barrier_handler import TRACKED_MAX, BarrierHandler, Outcome
from tidegate.actors.task.channels import InFlightElement, has_rows, keep_in_flight
from tidegate.actors.task.incremental_base import ChangedRows, IncrementalBase, IncrementalBases, canonical
from tidegate.actors.task.input_gate import InputGate
from tidegate.actors.task.instructions import Direction, InFlight
from tidegate.actors.task.invariants import check_hold, may_hold
from tidegate.actors.task.output_gate import OutputGate
from tidegate.actors.task.snapshots import ChangelogWriter, SnapshotPart, SnapshotTracker, TaskSnapshot, Written
from tidegate.actors.task.split_positions import FrozenPositions
from tidegate.actors.task.task_commits import SubtaskCommits
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Alignment, Barrier, BarrierOptions, CancelBarrier, Element, ends_in_flight
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.storage.checkpoints.metadata import StoredSplit, SubtaskState
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot


class SubtaskCheckpoints:
    """Takes one subtask's snapshots for the checkpoints of the job."""

    def __init__(
        self,
        descriptor: TaskDescriptor,
        handler: BarrierHandler,
        inputs: InputGate,
        outputs: OutputGate,
        parts: SnapshotParts,
        instruct: Callable[[do.TaskInstruction], None],
        changelog: ChangelogWriter | None = None,
    ) -> None:
        self._descriptor = descriptor
        self.handler = handler
        self._inputs = inputs
        self._outputs = outputs
        self._parts = parts
        self._instruct = instruct
        self._recorders: dict[CheckpointId, ChannelRecorder] = {}
        """Recorders of snapshots whose in-flight elements have not all arrived."""
        self._deadlines_ms: dict[CheckpointId, int] = {}
        """The time, in ms since 1970, at which a checkpoint's barrier overtakes elements in output queues."""
        self._barriers: dict[CheckpointId, Barrier] = {}
        self._lineages = IncrementalBases()
        self._changelog = changelog
        self._held: DeferredInputs | None = None
        """Deferred inputs, while the operators are finishing, else None."""
        self.taken = CheckpointId(0)
        """The newest checkpoint for which a snapshot was taken, or 0."""
        self.stopping: CheckpointId | None = None
        """The savepoint of a stop, after which the task ends. None until its snapshot was taken."""
        self.tracker = SnapshotTracker(
            descriptor.task.subtask,
            {spec.uid: spec.table for spec in descriptor.operators if spec.table is not None},
            {
                spec.uid: SubtaskCommits(spec.uid, descriptor.job_id)
                for spec in descriptor.operators
                if spec.committing is not None
            },
        )

    @property
    def held(self) -> frozenset[CheckpointId]:
        """Returns the checkpoints whose inputs are deferred until the operators have finished."""
        return frozenset() if self._held is None else self._held.checkpoints

    # --- what comes in --------------------------------------------------------------------------------------------

    def blocks(self, channel: ChannelId) -> bool:
        """Returns whether elements of this channel must wait for a barrier of other channels."""
        return self.handler.blocks(channel)

    @property
    def blocks_for(self) -> CheckpointId | None:
        """Returns the checkpoint for which channels are blocked, or None."""
        return self.handler.blocks_for

    def restored(self, lineage: IncrementalBase | None) -> None:
        """Sets the checkpoint part from which this subtask was restored, or None. The next snapshots may be based on
        it.
        """
        if lineage is not None:
            self._lineages.remember(lineage)
            if self._changelog is not None:
                self._changelog.restored(lineage.layers)

    def arrived(self, channel: ChannelId, elements: Sequence[Element], at_ms: int) -> None:
        """Handles new elements that were queued on an input channel: records in-flight elements, and announces
        barriers.
        """
        limit_bytes = self._descriptor.limits.in_flight_bytes_max
        for recorder in list(self._recorders.values()):
            recorder.arrived(channel, elements)
            if recorder.size_bytes > limit_bytes:
                self._give_up(recorder.checkpoint_id)
                message = f"more than {limit_bytes} bytes came in before the last barrier: too much is in flight"
                self.decline(recorder.checkpoint_id, CheckpointFailureReason.DECLINED, message)
        for element in elements:
            if isinstance(element, Barrier):
                self._tell((element.checkpoint_id, channel), partial(self._announced, channel, element), at_ms)

    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> None:
        """Handles a barrier that was taken from a channel."""
        self._follow(self.handler.barrier(channel, barrier, at_ms), at_ms)

    def cancel_barrier(self, channel: ChannelId, checkpoint_id: CheckpointId, at_ms: int) -> None:
        """Handles a cancel barrier that was taken from a channel."""
        self._follow(self.handler.cancel_barrier(channel, checkpoint_id, at_ms), at_ms)

    def channel_ended(self, channel: ChannelId, at_ms: int) -> None:
        """Handles the end of a channel."""
        self._follow(self.handler.channel_ended(channel, at_ms), at_ms)

    def trigger(self, barrier: Barrier, at_ms: int) -> None:
        """Starts a checkpoint that the coordinator has triggered at this task."""
        news = barrier.checkpoint_id, None
        self._tell(news, lambda at_ms: self._follow(self.handler.trigger(barrier, at_ms), at_ms), at_ms)

    def timer(self, at_ms: int) -> None:
        """Handles the timer of alignments: a barrier may have exceeded its timeout, at an input or in an output
        queue.
        """
        self._tell(None, lambda at_ms: self._follow(self.handler.timer(at_ms), at_ms), at_ms)
        for checkpoint_id, recorder in self._recorders.items():
            if at_ms >= self._deadlines_ms.get(checkpoint_id, at_ms + 1):
                self._overtake_late(self._barriers[checkpoint_id], recorder)

    def abort(self, checkpoint_id: CheckpointId, at_ms: int) -> None:
        """Aborts this task's part of a checkpoint that the coordinator has aborted."""
        if self._held is not None and self._held.forget(checkpoint_id):
            self._outputs.broadcast(CancelBarrier(checkpoint_id))
        self._follow(self.handler.abort(checkpoint_id), at_ms)
        self._give_up(checkpoint_id)

    def completed(self, checkpoint_id: CheckpointId) -> TaskSnapshot | None:
        """Handles a completed checkpoint. Returns this task's snapshot, or None for a repeated notification."""
        snapshot = self.tracker.complete(checkpoint_id)
        self._discard(self.tracker.abort_before(checkpoint_id))
        for older in [n for n in self._recorders if n <= checkpoint_id]:
            self._forget(older)
        return snapshot

    def written(self, event: ev.WriteAnswered) -> None:
        """Handles the result of a write for a snapshot or the changelog."""
        if isinstance(event, ev.SnapshotFailed):
            self._failed(event)
        elif isinstance(event, ev.SegmentPersisted | ev.SegmentFailed):
            self._logged(event)
        else:
            self._persisted(event)

    def _logged(self, event: ev.SegmentPersisted | ev.SegmentFailed) -> None:
        assert self._changelog is not None
        self._changelog.answered(event)
        for checkpoint_id in self.tracker.changelog_answered():
            error = "a part of the changelog was not written"
            away = True
            if isinstance(event, ev.SegmentFailed):
                error = event.error
                away = event.away
            self._part_failed(checkpoint_id, SnapshotPart.CHANGELOG, error, away)

    def _persisted(self, event: ev.SnapshotPersisted | ev.ChannelStatePersisted) -> None:
        if isinstance(event, ev.ChannelStatePersisted):
            part = SnapshotPart.CHANNELS
            written = Written(event.handle)
            sync_ms = 0
        else:
            part = SnapshotPart.STATE
            written = Written(event.handle, event.layer, event.native)
            sync_ms = event.sync_ms
        self._discard(self.tracker.persisted(event.checkpoint_id, part, written, sync_ms))

    def _failed(self, event: ev.SnapshotFailed) -> None:
        part = SnapshotPart.CHANNELS if event.channels else SnapshotPart.STATE
        self._part_failed(event.checkpoint_id, part, event.error, event.away)

    def _part_failed(self, checkpoint_id: CheckpointId, part: SnapshotPart, error: str, away: bool) -> None:
        declines, paths = self.tracker.failed(checkpoint_id, part)
        self._discard(paths)
        self._forget(checkpoint_id)
        if declines:
            reason = CheckpointFailureReason.STORAGE_AWAY if away else CheckpointFailureReason.ASYNC_PART_FAILED
            self.decline(checkpoint_id, reason, error)

    def decline(self, checkpoint_id: CheckpointId, reason: CheckpointFailureReason, message: str) -> None:
        """Reports to the coordinator that this task cannot take part in a checkpoint."""
        self._instruct(do.Decline(self._descriptor.attempt, checkpoint_id, reason, message))

    def hold(self) -> None:
        """Defers all inputs about checkpoints (barriers, triggers, aborts), because the operators are finishing.

        In at-least-once mode barriers block no channel, so the task may have processed a channel beyond its barrier, up
        to the end. A snapshot of the finished task would then imply that its upstream tasks have finished too. So
        pending checkpoints are declined.
        """
        assert self._held is None
        for pending in self.handler.invalidated_by_end_of_input():
            self._refuse(pending, CheckpointFailureReason.TASK_CLOSING)
        self._held = DeferredInputs()

    def release(self, at_ms: int) -> None:
        """Handles the deferred inputs, because the operators have finished."""
        held = self._held
        self._held = None
        for told in () if held is None else held.take_all():
            told(at_ms)

    def settle(self, at_ms: int) -> None:
        """Starts the writes of in-flight elements that are complete, and acknowledges durable snapshots. Called at the
        end of each event.
        """
        for checkpoint_id, recorder in list(self._recorders.items()):
            for channel in recorder.open_outputs:
                if checkpoint_id not in self._outputs[channel].barriers:
                    recorder.output_left(channel)
            if recorder.complete:
                self._forget(checkpoint_id)
                channels = recorder.channels()
                self.tracker.write_channels(checkpoint_id, empty=not channels)
                if channels:
                    self._instruct(do.PersistChannelState(checkpoint_id, channels))
        if self._changelog is not None and not self._parts.finished() and self._held is None:
            self._changelog.go_on()
        self._acknowledge_durable(at_ms)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _tell(self, news: News, told: Told, at_ms: int) -> None:
        """Handles an input now, or defers it until the operators have finished."""
        if self._held is None:
            told(at_ms)
        elif (oldest := self._held.add(news, told)) is not None:
            self._refuse(oldest, CheckpointFailureReason.SUBSUMED)

    def _refuse(self, checkpoint_id: CheckpointId, reason: CheckpointFailureReason) -> None:
        """Declines a checkpoint without a snapshot, and sends cancel barriers to the outputs."""
        self.handler.abort(checkpoint_id)
        self._outputs.broadcast(CancelBarrier(checkpoint_id))
        self.decline(checkpoint_id, reason, reason.value)

    def _announced(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> None:
        self._follow(self.handler.announced(channel, barrier, at_ms), at_ms)

    def _follow(self, outcome: Outcome, at_ms: int) -> None:
        for checkpoint_id, reason in outcome.cancelled:
            recorded = checkpoint_id <= self.taken and checkpoint_id not in self._recorders
            if recorded and reason is CheckpointFailureReason.SUBSUMED:
                # No barrier is missing, only the end of a channel was not processed yet: this task's part stays.
                continue
            self._outputs.broadcast(CancelBarrier(checkpoint_id))
            self._give_up(checkpoint_id)
            if reason is not None:
                self.decline(checkpoint_id, reason, reason.value)
        if outcome.timer_at_ms is not None:
            self._instruct(do.SetTaskTimer(ev.TaskTimer.ALIGNMENT, outcome.timer_at_ms))
        if outcome.snapshot is not None:
            self._take(outcome.snapshot, at_ms)

    def _take(self, barrier: Barrier, at_ms: int) -> None:
        checkpoint_id = barrier.checkpoint_id
        options = barrier.options
        self.taken = checkpoint_id
        if not self._parts.finished():
            self._parts.prepare()
        recorder = ChannelRecorder(checkpoint_id)
        overtakes = options.alignment is Alignment.UNALIGNED
        if overtakes:
            self.record_inputs(recorder)
        output_positions = self._outputs.row_positions()
        may_overtake = self.send_barrier(barrier, recorder, at_ms)
        self._parts.send()
        self._parts.stage()
        alignment_ms = self.handler.alignment_ms(at_ms)
        finished = self._parts.finished()
        cut, base = self._lineages.begin(barrier, finished, self._parts.changed_rows)
        chain = None
        since = 0
        if self._changelog is not None and not finished:
            cut, chain, since = self._changelog.for_snapshot(cut)
            base = None
        snapshot = TaskSnapshot(
            checkpoint_id=checkpoint_id,
            kind=options.kind,
            finished=finished,
            unaligned=overtakes,
            start_delay_ms=max(0, at_ms - barrier.triggered_at_ms - alignment_ms),
            alignment_ms=alignment_ms,
            started_at_ms=at_ms,
            ends=self.tracker.ends(),
            base=base,
            chain=chain,
            chain_since=since,
        )
        self.tracker.begin(snapshot)
        if options.kind.stops:
            self.stopping = checkpoint_id
        frozen = self._parts.freeze(cut)
        if finished:
            snapshot.read_splits = tuple(split for each in frozen for split in _splits_of(each))
        if cut.canonical:
            frozen = tuple(map(canonical, frozen))
        input_positions = self._inputs.row_positions()
        self._instruct(do.PersistSnapshot(checkpoint_id, frozen, input_positions, output_positions, base, chain))
        if overtakes or may_overtake:
            self.tracker.await_channels(checkpoint_id)
            self._recorders[checkpoint_id] = recorder
            self._barriers[checkpoint_id] = barrier

    def record_inputs(self, recorder: ChannelRecorder) -> None:
        """Passes the elements that wait in the input queues before the barrier to `recorder`, as in-flight data."""
        for channel in self._inputs:
            if not self.handler.passed(channel.channel, recorder.checkpoint_id):
                recorder.input_waits(channel.channel, *channel.before(recorder.checkpoint_id))

    def send_barrier(self, barrier: Barrier, recorder: ChannelRecorder, at_ms: int) -> bool:
        """Queues the barrier on every output. Returns whether the barrier has overtaken elements, or may still
        do that.
        """
        may_overtake = False
        for edge in self._descriptor.outputs:
            out = replace(barrier, options=outgoing_options(barrier.options, edge.unaligned))
            for channel in edge.channels:
                if out.options.alignment is Alignment.UNALIGNED:
                    recorder.output_overtaken(channel, self._outputs[channel].overtake(out))
                    may_overtake = True
                    continue
                self._outputs[channel].put(out)
                timeout_at_ms = timeout_at_ms_of(out, at_ms)
                if timeout_at_ms is not None:
                    recorder.output_waits(channel)
                    may_overtake = True
                    self._deadlines_ms[barrier.checkpoint_id] = timeout_at_ms
        if barrier.checkpoint_id in self._deadlines_ms:
            due_at_ms = self._deadlines_ms[barrier.checkpoint_id]
            self._instruct(do.SetTaskTimer(ev.TaskTimer.ALIGNMENT, due_at_ms))
        return may_overtake

    def _overtake_late(self, barrier: Barrier, recorder: ChannelRecorder) -> None:
        """Moves the barrier before the elements in output queues, because its timeout has passed there."""
        late = replace(barrier, options=replace(barrier.options, alignment=Alignment.UNALIGNED))
        for channel in recorder.open_outputs:
            if barrier.checkpoint_id in self._outputs[channel].barriers:
                recorder.output_overtaken(channel, self._outputs[channel].overtake(late))
                self.tracker.overtook(barrier.checkpoint_id)

    def _acknowledge_durable(self, at_ms: int) -> None:
        task = self._descriptor.task
        for snapshot, committables, prepared in self.tracker.to_acknowledge():
            lineage = snapshot.lineage
            self._lineages.remember(lineage)
            in_flight = snapshot.written.get(SnapshotPart.CHANNELS, Written()).handle
            state = SubtaskState(
                task.vertex,
                task.subtask,
                snapshot.written[SnapshotPart.STATE].handle,
                committables,
                snapshot.finished,
                in_flight,
                lineage.layers,
                lineage.native,
                snapshot.read_splits,
                prepared,
            )
            in_flight_bytes = 0 if in_flight is None else in_flight.size_bytes
            self._instruct(
                do.Acknowledge(
                    self._descriptor.attempt,
                    snapshot.checkpoint_id,
                    state,
                    SnapshotMetrics(
                        start_delay_ms=snapshot.start_delay_ms,
                        alignment_ms=snapshot.alignment_ms,
                        sync_ms=snapshot.sync_ms,
                        async_ms=max(0, at_ms - snapshot.started_at_ms),
                        state_bytes=state.size_bytes - in_flight_bytes,
                        incremental_bytes=snapshot.incremental_bytes,
                        in_flight_bytes=in_flight_bytes,
                        unaligned=snapshot.unaligned,
                    ),
                    snapshot.kind,
                )
            )

    def _give_up(self, checkpoint_id: CheckpointId) -> None:
        self._forget(checkpoint_id)
        self._lineages.forget(checkpoint_id)
        self._discard(self.tracker.abort(checkpoint_id))

    def _forget(self, checkpoint_id: CheckpointId) -> None:
        self._recorders.pop(checkpoint_id, None)
        self._barriers.pop(checkpoint_id, None)
        self._deadlines_ms.pop(checkpoint_id, None)

    def _discard(self, paths: Sequence[str]) -> None:
        if paths:
            self._instruct(do.DiscardState(tuple(paths)))


def outgoing_options(options: BarrierOptions, unaligned: bool) -> BarrierOptions:
    """Returns the options of a barrier on an output edge. `unaligned`: barriers may overtake on the edge."""
    if not unaligned:
        if options.alignment is Alignment.UNALIGNED or options.timeoutable:
            return replace(options, alignment=Alignment.FORCED_ALIGNED)
    elif options.alignment is Alignment.FORCED_ALIGNED:
        alignment = Alignment.ALIGNED if options.aligned_timeout_ms else Alignment.UNALIGNED
        return replace(options, alignment=alignment)
    return options


def _splits_of(operator: OperatorSnapshot) -> tuple[StoredSplit, ...]:
    return tuple(split for state in operator.states if isinstance(state, FrozenPositions) for split in state.splits)


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """Functions that a snapshot calls.

    The first four are called in the order of the fields. The last two return facts about the task.
    """

    prepare: Callable[[], None]
    """Makes the operators emit the rows that belong before the barrier. Not called after they have finished."""
    send: Callable[[], None]
    """Sends the queued output, with the barrier."""
    stage: Callable[[], None]
    """Orders the writes of the sinks' rows so far."""
    freeze: Callable[[Cut], tuple[OperatorSnapshot, ...]]
    """Freezes the state of the operators: the synchronous part of the snapshot."""
    finished: Callable[[], bool]
    """Returns whether the operators have finished."""
    changed_rows: ChangedRows
    """Returns the number of rows of keyed state in a snapshot based on a checkpoint, and in a full snapshot."""


HELD_MAX = TRACKED_MAX
"""Limit of checkpoints whose inputs are deferred. As many may be pending in an at-least-once task."""
Told: TypeAlias = Callable[[int], None]
"""A function that handles a deferred input. Its argument is the time in ms since 1970."""
News: TypeAlias = tuple[CheckpointId, ChannelId | None] | None
"""The key of a deferred input: the checkpoint, and the channel of its barrier, or None for a trigger.

The key None is for the timer.
"""


class DeferredInputs:
    """Inputs about checkpoints that are deferred while the operators are finishing.

    `SubtaskCheckpoints` defers triggers, barriers that have arrived, and the timer of the alignment. Operators may take
    any time to finish, and the coordinator keeps triggering and aborting checkpoints. Rules:

    - Inputs of an aborted checkpoint are dropped at once.
    - At most `HELD_MAX` checkpoints have deferred inputs (invariant 10). One more drops the oldest.
    - A checkpoint has at most a trigger and one barrier of each channel. A repeated input is stored once.
    """

    def __init__(self) -> None:
        self._told: dict[News, Told] = {}

    @property
    def checkpoints(self) -> frozenset[CheckpointId]:
        """Returns the checkpoints of which inputs are deferred."""
        return frozenset(news[0] for news in self._told if news is not None)

    def add(self, news: News, told: Told) -> CheckpointId | None:
        """Defers one more input. Returns the checkpoint that has to be declined because of the limit, or None."""
        self._told.setdefault(news, told)
        oldest = None
        if not may_hold(len(self.checkpoints), HELD_MAX):
            oldest = min(self.checkpoints)
            self.forget(oldest)
        check_hold(len(self.checkpoints), HELD_MAX)
        return oldest

    def forget(self, checkpoint_id: CheckpointId) -> bool:
        """Drops the deferred inputs of an aborted checkpoint.

        Returns whether the coordinator had triggered the checkpoint at this task. Then no barrier will arrive.
        """
        triggered = (checkpoint_id, None) in self._told
        self._told = {news: told for news, told in self._told.items() if news is None or news[0] != checkpoint_id}
        return triggered

    def take_all(self) -> list[Told]:
        """Removes and returns all deferred inputs about checkpoints, in order."""
        all_told = list(self._told.values())
        self._told = {}
        return all_told


class ChannelRecorder:
    """Records the in-flight elements of a snapshot, until the barrier of every channel has arrived.

    `SubtaskCheckpoints` has one recorder for each snapshot that may overtake. Rules (Flink's ChannelStateWriter; Chandy
    and Lamport, "Distributed Snapshots"):

    - Input channel: elements that are queued when the snapshot is taken belong to the checkpoint. So do elements that
      arrive afterwards, up to the channel's barrier or its end.
    - Output channel: elements that the barrier has overtaken in the queue belong to the checkpoint. A barrier that may
      overtake later (an aligned one with a timeout) keeps its channel open until it was sent, or has overtaken.
    - Watermarks keep their places among the rows. Without rows, watermarks are not stored.
    - Batches are not copied. The queues limit the queued elements. They do not limit the elements that arrive while a
      barrier is late: the owner of the recorder checks `size_bytes`.
    """

    def __init__(self, checkpoint_id: CheckpointId) -> None:
        self.checkpoint_id = checkpoint_id
        self._held: dict[tuple[Direction, ChannelId], list[InFlightElement]] = {}
        self._recovered: dict[ChannelId, int] = {}
        self._open_inputs: set[ChannelId] = set()
        self._open_outputs: set[ChannelId] = set()
        self.size_bytes = 0
        """Size in bytes of all recorded batches."""

    @property
    def complete(self) -> bool:
        """Returns whether all in-flight elements of the snapshot are recorded."""
        return not self._open_inputs and not self._open_outputs

    @property
    def open_outputs(self) -> Iterable[ChannelId]:
        """Returns the output channels in which the barrier may still overtake elements."""
        return tuple(self._open_outputs)

    def input_waits(
        self, channel: ChannelId, elements: Sequence[InFlightElement], recovered: int, barrier_arrived: bool
    ) -> None:
        """Records the elements that are queued on an input when the snapshot is taken. The first `recovered` were
        restored.

        `barrier_arrived`: no later element of the channel belongs to the checkpoint.
        """
        self._hold(Direction.INPUT, channel, elements)
        self._recovered[channel] = recovered
        if not barrier_arrived:
            self._open_inputs.add(channel)

    def arrived(self, channel: ChannelId, elements: Iterable[Element]) -> None:
        """Records new elements of an input channel that belong to the checkpoint, up to its barrier."""
        if channel not in self._open_inputs:
            return
        for element in elements:
            if ends_in_flight(element, self.checkpoint_id):
                self._open_inputs.discard(channel)
                return
            self._hold(Direction.INPUT, channel, (element,))

    def output_overtaken(self, channel: ChannelId, elements: Sequence[InFlightElement]) -> None:
        """Records the elements that the barrier has overtaken in an output queue."""
        self._hold(Direction.OUTPUT, channel, elements)
        self._open_outputs.discard(channel)

    def output_waits(self, channel: ChannelId) -> None:
        """Records that the barrier is queued on an output, where it may still overtake elements."""
        self._open_outputs.add(channel)

    def output_left(self, channel: ChannelId) -> None:
        """Records that the barrier was sent without overtaking elements, so that the output channel has no in-flight
        elements.
        """
        self._open_outputs.discard(channel)

    def channels(self) -> tuple[InFlight, ...]:
        """Returns the recorded elements of each channel that has rows."""
        assert self.complete
        return tuple(
            InFlight(
                channel,
                direction,
                tuple(held),
                self._recovered.get(channel, 0) if direction is Direction.INPUT else 0,
            )
            for (direction, channel), held in self._held.items()
            if has_rows(held)
        )

    def _hold(self, direction: Direction, channel: ChannelId, elements: Sequence[Element]) -> None:
        keep_in_flight(self._held.setdefault((direction, channel), []), elements)
        self.size_bytes += sum(element.nbytes for element in elements if isinstance(element, pa.RecordBatch))
