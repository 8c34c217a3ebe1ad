"""`CoordinatorDriver`: runs one coordinator machine. It logs each event first, and acts afterwards.

Rules:

- The instructions that follow from an event are carried out once the event is durable.
- Events that arrive together become one entry of the event log (a group commit). Events without instructions wait in
  memory for the next entry. Such an event may be lost with the process, as a message may be. The number of waiting
  events is limited. Their time is limited too, except for events that are useful only together with later ones.
- An event that changes nothing is not logged.
- Every event of the log has a number, and the number of its cause (see `CauseTracker`). The machine uses neither: the
  driver adds to each instruction the number of the event that caused it.
- After a commit, small files of the tables are compacted. The machine is not involved, because the content of the table
  stays the same.
- While storage does not answer, the machine gets that event and no other: it decides nothing that it could not log. A
  coordinator whose log does not answer for too long, or is deleted, ends the job. If another process created the next
  log entry, a newer generation controls the job.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import WatermarkReported
from tidegate.actors.coordinator.job_history import DecisionLog, JobHistory, Line
from tidegate.actors.coordinator.job_spec import STORAGE_OUTAGE_MS, JobSpec
from tidegate.actors.coordinator.source_coordinator import WatermarkAligner
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.event_log_writer import CauseTracker, LogPosition, LogWriter, StoredFold
from tidegate.actors.drivers.log_lines import log_fields
from tidegate.actors.drivers.outages import NotesOfMany, OutageNotes
from tidegate.actors.drivers.ports import CoordinatorPort
from tidegate.actors.task import events as task_ev
from tidegate.actors.task.events import WatermarkAnnounced
from tidegate.connectors.source import SourceSplit
from tidegate.protocol.failures import CheckpointFailureReason, bounded_text, error_text
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, StateHandle, SubtaskState
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import CodecError, FencedError
from tidegate.storage.ids import CheckpointId, EventId, Generation, SubtaskIndex, VertexId
from tidegate.storage.user_values import WithheldTexts

log = logging.getLogger(__name__)
EVENTS_AN_ENTRY_MAX = 1_000
NAMES_AN_ENTRY_MAX = 10_000
"""Limit of the files and states named by the acknowledgements in one log entry. These names are most of its
bytes.
"""
HOLD_MS = 1_000
"""Time in ms after which an event without instructions is logged, unless it is useful only together with later
events.
"""
_TIMEOUT = "timeout:"
"""Prefix of the names of timers that abort a checkpoint which takes too long."""
_MEANS_NOTHING_ALONE = (ev.CheckpointAcknowledged, ev.CheckpointDiscarded, ev.SavepointDiscarded, ev.TaskReady)
"""Events that are useful only together with later ones, and may wait in memory without a time limit.

A new coordinator makes up for lost ones: it aborts incomplete checkpoints, repeats deletions, and deploys again.
"""


def replay(event_log: EventLog, job_history: JobHistory | None = None) -> tuple[CoordinatorMachine, LogPosition]:
    """Replays the event log. Returns the machine, and the position at which the log continues.

    Adds the events to `job_history`, unless that is None.
    """
    snapshot = event_log.latest_snapshot()
    state: CoordinatorState | None = None
    index = snapshot_index = 0
    takeovers: tuple[int, ...] = ()
    number = EventId(0)
    causes = CauseTracker()
    if snapshot is not None:
        index, fold = snapshot
        assert isinstance(fold, StoredFold)
        state = decode(fold.state)
        takeovers = fold.takeovers
        snapshot_index = index
        number = EventId(fold.next_event)
        causes = CauseTracker(fold.orders)
    machine = CoordinatorMachine(state)
    if job_history is not None:
        job_history.reset(machine.state)
    for entry in event_log.entries(index):
        if isinstance(entry.events[0], ev.CoordinatorStarted):
            takeovers = (*takeovers, entry.index)
        number = EventId(entry.first_event)
        for event in entry.events:
            instructions = machine.handle(event)
            causes.replayed(number, event, instructions)
            if job_history is not None:
                job_history.replay(event, instructions, machine.state)
            number = EventId(number + 1)
        index = entry.index + 1
    return machine, LogPosition(index, takeovers, snapshot_index, number, causes.stored())


@dataclass(frozen=True, slots=True)
class Ordered:
    """An instruction, the event that caused it, and the time at which it is due, in ms of the monotonic clock."""

    instruction: do.CoordinatorInstruction
    cause: EventId
    due_ms: int


class CoordinatorDriver:
    """Runs one coordinator process's machine, in any runtime. All methods run on the coordinator's thread.

    `incarnation` is a unique id, which distinguishes two coordinators that both claim to be the next generation.
    """

    def __init__(
        self,
        machine: CoordinatorMachine,
        position: LogPosition,
        event_log: EventLog,
        effects: CoordinatorEffects,
        port: CoordinatorPort,
        incarnation: str,
        entries_a_snapshot: int | None = None,
        job_history: JobHistory | None = None,
        log_rows: bool = False,
    ) -> None:
        self.machine = machine
        self.job_history = JobHistory(machine.state) if job_history is None else job_history
        self.generation = Generation(machine.state.generation + 1)
        self._log_rows = log_rows
        self._withheld = WithheldTexts()
        self._log = LogWriter(event_log, position, self.generation, port, incarnation, entries_a_snapshot)
        self.effects = effects
        self._port = port
        self._watermarks = WatermarkAnswers(port, self.generation)
        self.inlined = InlinedState()
        self.outages = StorageOutages(port.monotonic_ms)
        self._inbox: deque[tuple[ev.CoordinatorEvent, EventId | None, int]] = deque()
        """Events that the machine has not handled yet, each with its cause and its arrival time in ms of the
        monotonic clock.
        """
        self._held: list[ev.CoordinatorEvent] = []
        """Events that the machine has handled and that are not in the event log yet."""
        self._held_causes: list[EventId | None] = []
        self.causes = CauseTracker(position.orders)
        self._timeouts: list[str] = []
        """Names of the timeout timers of checkpoints that may still be pending."""
        self.next_event = position.next_event
        """Number of the next event that the machine handles."""
        self._held_names = 0
        self._instructions: list[Ordered] = []
        """Instructions to carry out once the events in `_held` are logged."""
        self._decision_log = DecisionLog(machine.state, wants_details())
        self._lines: list[tuple[Line, EventId, EventId | None]] = []
        """Lines to print once the events in `_held` are logged: each line, the number of its event, and of the
        cause.
        """
        self._flushes = False
        """True if a timer is set that logs the events in `_held`."""
        self._appending = False
        self._halted = False

    @property
    def in_charge(self) -> bool:
        """Returns whether the log records that this coordinator has taken over the job. May be called from any
        thread.
        """
        return self._log.in_charge

    @property
    def waits_for(self) -> str | None:
        """Returns text about the storage that does not answer, and since when, or None. May be called from any
        thread.
        """
        return self._log.waits_for or self.outages.waits_for

    def start(self) -> None:
        """Takes over the job: writes the first log entry of this generation."""
        self.handle(ev.CoordinatorStarted(self._port.now_ms(), self.generation))

    def handle(self, event: ev.CoordinatorEvent) -> None:
        """Logs an event, passes it to the machine, and carries out the instructions. While storage does not answer,
        requests are refused.
        """
        if self._halted:
            return
        if isinstance(event, ev.WatermarkReported):
            if self.in_charge:
                self._watermarks.answer(self.machine.state, event)
            return
        if self._log.away and self._refused(event):
            return
        spec = self.machine.state.spec
        limit_ms = STORAGE_OUTAGE_MS if spec is None else spec.storage_outage_ms
        event = self.outages.timed(self.inlined.take(event), limit_ms)
        if isinstance(event, ev.SinksCommitted) and self.effects.compactor.compacts:
            self._port.run_io(self.effects.compactor.step)
        try:
            event = sanitize_event(event, self._withhold)
        except CodecError as error:
            text = error_text(error)
            if isinstance(event, ev.CheckpointRequested):
                self._port.complete_request(do.CompleteRequest(event.request, None, text))
            else:
                self._halted = True
                self._port.halt(f"a {type(event).__name__} cannot be written to the event log: {text}", fenced=False)
            return
        # Looked up now: before the machine handles the event, its order may be given again.
        self._inbox.append((event, self.causes.of(event), self._port.monotonic_ms()))
        if not self._appending:
            self._next_entry()

    def whole_text(self, text: str | None) -> str | None:
        """Returns a text of the event log, with the row values that were withheld from the log if this process has seen
        them.

        The text is for the driver program of the user. May be called from any thread.
        """
        return self._withheld.whole(text)

    def _withhold(self, text: str) -> str:
        return self._withheld.withhold(text, self._log_rows)

    def halt(self) -> None:
        """Stops the driver: it neither logs nor does anything from now on."""
        self._halted = True

    def _refused(self, event: ev.CoordinatorEvent) -> bool:
        """Refuses a request while storage does not answer, so that the inbox stays small. Returns False for other
        events.

        Tasks repeat requests for splits, and users get the reason.
        """
        if isinstance(event, ev.SplitsRequested):
            return True
        if isinstance(event, ev.CheckpointRequested):
            reason = CheckpointFailureReason.STORAGE_AWAY
            self._port.complete_request(do.CompleteRequest(event.request, None, reason.value, reason=reason))
            return True
        return isinstance(event, ev.CancelRequested) and any(isinstance(e, ev.CancelRequested) for e, *_ in self._inbox)

    # --- the log --------------------------------------------------------------------------------------------------

    def _next_entry(self) -> None:
        """Passes the events of the inbox to the machine, and writes a log entry if an instruction follows from
        them.
        """
        if self._halted:
            return
        while self._inbox and not self._full:
            self.take_in(*self._inbox.popleft())
        if self._held and (self._instructions or self._full or not self._log.in_charge):
            self.append_held()
        elif not self._flushes and not all(isinstance(event, _MEANS_NOTHING_ALONE) for event in self._held):
            self._flushes = True
            self._port.call_later(HOLD_MS, self._flush)

    @property
    def _full(self) -> bool:
        return len(self._held) >= EVENTS_AN_ENTRY_MAX or self._held_names >= NAMES_AN_ENTRY_MAX

    @property
    def num_waiting(self) -> int:
        """Returns the number of events that have arrived and that the machine has not handled yet."""
        return len(self._inbox)

    def take_in(self, event: ev.CoordinatorEvent, cause: EventId | None, arrived_ms: int) -> None:
        """Passes an event to the machine, and holds back the event and its instructions until they are logged.

        `arrived_ms` is by the monotonic clock.
        """
        if self.machine.ignores(event):
            return
        number = self.next_event
        self.next_event = EventId(self.next_event + 1)
        self.causes.taken_in(number, event)
        self._held.append(event)
        self._held_causes.append(cause)
        if isinstance(event, ev.CheckpointAcknowledged):
            self._held_names += event.state.names
        instructions = self.machine.handle(event)
        lines = self._decision_log.lines_about(event, instructions, self.machine.state)
        self.job_history.add(event, instructions, lines, self.machine.state)
        self._lines += [(line, number, cause) for line in lines]
        for instruction in instructions:
            # The wall clock may be set until the event is logged; it was right when the event came.
            wait_ms = max(0, instruction.due_at_ms - event.at_ms) if isinstance(instruction, do.SetTimer) else 0
            self._instructions.append(Ordered(instruction, number, arrived_ms + wait_ms))

    def _flush(self) -> None:
        self._flushes = False
        if self._held and not self._appending and not self._halted:
            self.append_held()

    def append_held(self) -> None:
        """Writes the events that wait for the log as one entry. Their instructions are carried out once the entry is
        durable.
        """
        events = tuple(self._held)
        self._held = []
        self._held_names = 0
        causes = tuple(self._held_causes)
        self._held_causes = []
        first_event = EventId(self.next_event - len(events))
        instructions = self._instructions
        self._instructions = []
        lines = self._lines
        self._lines = []
        self._appending = True
        if self.machine.state.spec is not None:
            self._log.outage_ms = self.machine.state.spec.storage_outage_ms

        def written() -> None:
            if self._halted:
                return
            spec = self.machine.state.spec
            say(spec, lines, self._decision_log.details)
            for ordered in instructions:
                self.carry_out(ordered)
            self.inlined.keep(self.machine.state.pending)
            if self.machine.state.storage_away:
                back = ev.StorageCameBack(self._port.now_ms())
                self.take_in(back, self.causes.of(back), self._port.monotonic_ms())
            else:
                self._log.store_fold_if_due(self.machine.state, self.next_event, self.causes)
            # Only now: what is reported while instructions are carried out waits for the next entry.
            self._appending = False
            self._next_entry()

        def went_away(error: str) -> None:
            if not self._halted:
                went = ev.StorageWentAway(self._port.now_ms(), bounded_text(error))
                self.take_in(went, None, self._port.monotonic_ms())

        def failed(error: BaseException) -> None:
            if self._halted:
                return
            self._halted = True
            if not isinstance(error, FencedError):
                self._port.halt(str(error), fenced=False)
            elif self._log.in_charge:
                self._port.halt(f"a newer coordinator is in charge: {error}", fenced=True)
            else:
                # What the predecessor had on its way landed after the replay: it did not take over, it was late.
                self._port.replay_again(str(error))

        self._log.append(events, causes, first_event, written, went_away, failed)

    # --- instructions ---------------------------------------------------------------------------------------------

    def carry_out(self, ordered: Ordered) -> None:
        """Carries out an instruction of a logged event, and records it as an order that may be answered."""
        instruction = ordered.instruction
        self.causes.carried_out(ordered.cause, instruction)
        if isinstance(instruction, do.SetTimer):
            self._port.set_timer(instruction, max(0, ordered.due_ms - self._port.monotonic_ms()))
            if instruction.timer.startswith(_TIMEOUT):
                self._timeouts.append(instruction.timer)
                self._drop_timeouts()
        else:
            self.perform(instruction)

    def _drop_timeouts(self) -> None:
        """Cancels the timeout timers of checkpoints that have ended, which would otherwise stay for minutes."""
        waiting = []
        for timer in self._timeouts:
            if self.machine.ignores(ev.TimerFired(self._port.now_ms(), timer)):
                self._port.cancel_timer(timer)
                self.causes.dropped(timer)
            else:
                waiting.append(timer)
        self._timeouts = waiting

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        """Carries out one instruction through the port or the effects. Timers are handled elsewhere."""
        port = self._port
        effects = self.effects
        generation = self.generation
        match instruction:
            case do.DeployAttempt():
                port.deploy(instruction)
            case do.CancelAttempt():
                port.cancel_attempt(instruction)
            case do.KillProcess():
                port.kill_process(instruction)
            case do.StartTasks(tasks=tasks):
                for task in tasks:
                    port.send(task, task_ev.TasksStarted(port.now_ms(), generation))
            case do.AskTasks(attempt, tasks):
                for task in tasks:
                    port.send(task, task_ev.CoordinatorTookOver(port.now_ms(), attempt, generation))
            case do.AssignSplits(attempt, task, first, stored):
                splits = tuple(SourceSplit(split.split_id, split.payload, split.rows) for split in stored)
                port.send(task, task_ev.SplitsAssigned(port.now_ms(), attempt, first, splits, generation))
            case do.TriggerCheckpoint(attempt, checkpoint_id, triggered_at_ms, tasks, options, base):
                for task in tasks:
                    now_ms = port.now_ms()
                    trigger = task_ev.CheckpointTriggered(
                        now_ms, attempt, checkpoint_id, triggered_at_ms, options, base, generation
                    )
                    port.send(task, trigger)
            case do.NotifyCompleted(attempt, checkpoint_id, tasks):
                for task in tasks:
                    port.send(task, task_ev.CheckpointCompleted(port.now_ms(), attempt, checkpoint_id, generation))
            case do.NotifyAborted(attempt, checkpoint_id, tasks):
                for task in tasks:
                    port.send(task, task_ev.CheckpointAborted(port.now_ms(), attempt, checkpoint_id, generation))
            case do.TriggerHooks():
                port.run_io(lambda: effects.trigger_hooks(instruction))
            case do.RestoreHooks():
                port.run_io(lambda: effects.restore_hooks(instruction))
            case do.TakeTablesBack(_, checkpoint_id, reason):
                log.warning("%s: the job goes on from checkpoint %d, before it", reason, checkpoint_id)
                port.run_io(lambda: effects.take_tables_back(instruction))
            case do.WriteSavepoint(metadata=metadata, complete=complete):
                savepoint = instruction if complete else replace(instruction, metadata=self.inlined.put_back(metadata))
                stops = effects.copy_begins(metadata.checkpoint_id)
                port.run_copy(lambda: effects.write_savepoint(savepoint, stops))
            case do.StopCopy(checkpoint_id):
                effects.stop_copy(checkpoint_id)
            case do.DiscardSavepoint():
                port.run_copy(lambda: effects.discard_savepoint(instruction))
            case do.WriteMetadata(metadata, permit=permit):
                whole = self.inlined.put_back(metadata)
                port.run_io(lambda: effects.write_metadata(whole, permit))
            case do.VoidCheckpoint(tombstone):
                port.run_io(lambda: effects.void_checkpoint(tombstone))
            case do.CommitSinks():
                port.run_io(lambda: effects.commit_sinks(instruction))
            case do.DiscardCheckpoint():
                port.run_io(lambda: effects.discard_checkpoint(instruction))
            case do.DiscardFiles():
                port.run_io(lambda: effects.discard_files(instruction))
            case do.CompleteRequest():
                port.complete_request(instruction)
            case do.EndJob():
                port.end_job(instruction)


class StorageOutages:
    """Measures for how long each kind of storage operation has been failing, and logs that. Times are monotonic.

    Each kind of operation has its own outage time. Failed writes of `_metadata` end the job after a while, and that
    time must not include failures of other operations.
    """

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._state = OutageNotes("state of checkpoints", monotonic_ms)
        self._metadata = OutageNotes("metadata of checkpoints", monotonic_ms)
        self._tables = OutageNotes("output tables", monotonic_ms)
        self._start = OutageNotes("what comes before the tasks of an attempt", monotonic_ms)
        self._copies = NotesOfMany("the folder of savepoint {}", monotonic_ms)
        self._discarded_copies = NotesOfMany("the folder of savepoint {}, which has failed,", monotonic_ms)
        self._discards = NotesOfMany("what is to be deleted of checkpoint {}", monotonic_ms, logging.DEBUG)

    @property
    def waits_for(self) -> str | None:
        """Returns which storage operation the job waits for, and since when, or None. May be called from any thread."""
        notes = (self._metadata, self._state, self._tables, self._start)
        return next((found for each in notes if (found := each.waits_for) is not None), None)

    def timed(self, event: ev.CoordinatorEvent, limit_ms: int) -> ev.CoordinatorEvent:
        """Returns a failure event with `away_ms` set: how long, in ms, its operation has been failing. Returns other
        events unchanged.

        `limit_ms`: the longest outage of one target. A target that fails for longer is no longer tracked.
        """
        meanwhile = "checkpoints fail meanwhile, the job continues"
        again = "it is tried again, the job continues"
        match event:
            case ev.CheckpointDeclined(reason=CheckpointFailureReason.STORAGE_AWAY, message=error):
                return replace(event, away_ms=self._state.failed(error, meanwhile))
            case ev.MetadataWriteFailed(error=error):
                return replace(event, away_ms=self._metadata.failed(error, meanwhile))
            case ev.SinkCommitFailed(error=error, fenced=False, permanent=False):
                return replace(event, away_ms=self._tables.failed(error, again))
            case ev.HookRestoreFailed(away_ms=int()) | ev.TablesNotTakenBack(away_ms=int()):
                return replace(event, away_ms=self._start.failed(event.error, "the attempt waits for it"))
            case ev.HooksRestored() | ev.TablesTakenBack():
                self._start.worked()
            case ev.SavepointWriteFailed(checkpoint_id=number, error=error, permanent=False):
                return replace(event, away_ms=self._copies.failed(number, error, again, limit_ms))
            case ev.SavepointWritten(checkpoint_id=number):
                self._copies.worked(number)
            case ev.SavepointDiscardFailed(checkpoint_id=number, error=error):
                return replace(event, away_ms=self._discarded_copies.failed(number, error, again, limit_ms))
            case ev.SavepointDiscarded(checkpoint_id=number):
                self._discarded_copies.worked(number)
            case ev.CheckpointDiscardFailed(checkpoint_id=number, error=error):
                return replace(event, away_ms=self._discards.failed(number, error, again, limit_ms))
            case ev.CheckpointDiscarded(checkpoint_id=number):
                self._discards.worked(number)
            case ev.MetadataWritten():
                self._state.worked()
                self._metadata.worked()
            case ev.CheckpointVoided():
                self._metadata.worked()
            case ev.SinksCommitted():
                self._tables.worked()
        return event


class WatermarkAnswers:
    """Sends source tasks the lowest watermark of their alignment group.

    This bypasses the event log and the machine, because no lasting decision follows, and it continues while storage
    does not answer. Only a coordinator that controls the job answers.
    """

    def __init__(self, port: CoordinatorPort, generation: Generation) -> None:
        self._port = port
        self._generation = generation
        self._alignment = WatermarkAligner()

    def answer(self, state: CoordinatorState, event: WatermarkReported) -> None:
        """Answers the watermark report of a task, and notifies waiting tasks that may continue."""
        for told in self._alignment.reported(state, event):
            at_ms = self._port.now_ms()
            announced = WatermarkAnnounced(at_ms, told.attempt, told.watermark_ms, self._generation)
            self._port.send(told.task, announced)


_Key = tuple[VertexId, SubtaskIndex, str, int]
"""Key of an inlined state: the vertex and index of its subtask, and the checksum and size of the bytes."""


class InlinedState:
    """Stores the bytes of inlined state in memory from the acknowledgement until `_metadata` is written.

    The event log therefore does not contain them. Rules:

    - The machine and the log get a handle without its bytes, so the stored state has none either, and a replay gives
      the same.
    - The bytes are put back when `_metadata` is written, and dropped when their checkpoint is not pending any more.
    - They are lost with the coordinator. A new coordinator writes no `_metadata` of a checkpoint that it finds pending:
      it aborts the checkpoint, or voids it with a tombstone.
    """

    def __init__(self) -> None:
        self._bytes: dict[CheckpointId, dict[_Key, bytes]] = {}

    @property
    def checkpoints(self) -> Collection[CheckpointId]:
        """Returns the ids of the checkpoints whose inlined state bytes are in memory."""
        return self._bytes.keys()

    def take(self, event: ev.CoordinatorEvent) -> ev.CoordinatorEvent:
        """Stores the state bytes that an acknowledgement contains, and returns the event without these bytes."""
        if not isinstance(event, ev.CheckpointAcknowledged) or not _inlined(event.state):
            return event
        known = self._bytes.setdefault(event.checkpoint_id, {})

        def without(handle: StateHandle) -> StateHandle:
            assert handle.inline is not None
            known[_key(event.state, handle)] = handle.inline
            return replace(handle, inline=b"")

        return replace(event, state=_with_handles(event.state, without))

    def put_back(self, metadata: CheckpointMetadata) -> CheckpointMetadata:
        """Returns the metadata with the stored bytes put back into its inlined state."""
        known = self._bytes.get(metadata.checkpoint_id, {})
        subtasks = tuple(
            _with_handles(s, lambda handle, s=s: replace(handle, inline=known[_key(s, handle)]))  # type: ignore[misc]
            for s in metadata.subtasks
        )
        return replace(metadata, subtasks=subtasks)

    def keep(self, pending: Collection[CheckpointId]) -> None:
        """Drops the state bytes of all checkpoints except the pending ones."""
        for checkpoint_id in [number for number in self._bytes if number not in pending]:
            del self._bytes[checkpoint_id]


def _inlined(state: SubtaskState) -> bool:
    return any(handle.inline is not None for handle in state.handles)


def _key(state: SubtaskState, handle: StateHandle) -> _Key:
    return state.vertex, state.subtask, handle.checksum, handle.size_bytes


def _with_handles(state: SubtaskState, change: Callable[[StateHandle], StateHandle]) -> SubtaskState:
    """Returns the subtask's state with `change` applied to every handle that has inlined bytes."""
    if not _inlined(state):
        return state

    def changed(handle: StateHandle | None) -> StateHandle | None:
        return handle if handle is None or handle.inline is None else change(handle)

    layers = tuple(layer for layer in map(changed, state.layers) if layer is not None)
    return replace(state, handle=changed(state.handle), in_flight=changed(state.in_flight), layers=layers)


def sanitize_event(event: co.CoordinatorEvent, withhold: Callable[[str], str]) -> co.CoordinatorEvent:
    """Returns an event in a form that can be logged, because data that cannot be encoded must not stop the coordinator.

    Free texts are shortened and escaped. Values of users' rows in them are withheld unless `log_rows` is on. An event
    that the codec cannot encode is replaced by the failure of its task or checkpoint, with the cause.

    `withhold` removes values of rows from a text. Raises CodecError if the event cannot be replaced either.
    """

    def fit(text: str) -> str:
        return withhold(bounded_text(text))

    match event:
        case co.TaskFailed(reason=text) | co.CheckpointDamaged(reason=text) | co.ProcessGivenUp(reason=text):
            return replace(event, reason=fit(text))
        case co.CheckpointDeclined(message=text):
            return replace(event, message=fit(text))
        case (
            co.HookFailed(error=text)
            | co.HookRestoreFailed(error=text)
            | co.SavepointWriteFailed(error=text)
            | co.SavepointDiscardFailed(error=text)
            | co.MetadataWriteFailed(error=text)
            | co.SinkCommitFailed(error=text)
            | co.CheckpointDiscardFailed(error=text)
            | co.TablesNotTakenBack(error=text)
            | co.StorageWentAway(error=text)
        ):
            return replace(event, error=fit(text))
        case co.CheckpointAcknowledged() | co.HooksTriggered() | co.JobSubmitted() | co.CheckpointRequested():
            return _encodable(event)
        case _:
            return event


def _encodable(event: co.CoordinatorEvent) -> co.CoordinatorEvent:
    """Returns the event or, if the codec cannot encode it, the event that its task or master hook has failed.

    Events contain values from user code, such as states, names and paths. Raises CodecError if no task or hook can be
    named.
    """
    try:
        encode(event)
    except CodecError as error:
        text = f"its {type(event).__name__} cannot be written to the event log: {error_text(error)}"
        match event:
            case co.CheckpointAcknowledged():
                return co.TaskFailed(event.at_ms, event.attempt, event.task, bounded_text(text))
            case co.HooksTriggered():
                return co.HookFailed(event.at_ms, event.checkpoint_id, bounded_text(text))
            case _:
                raise
    return event


decisions_log = logging.getLogger("tidegate.actors.coordinator")
"""Logger of the decisions of coordinators, one line each. At DEBUG it also logs lines for every task at every
checkpoint.
"""
checkpoints_log = decisions_log.getChild("checkpoints")
"""Logger of successful checkpoints, of which there may be many in a second."""


def wants_details() -> bool:
    """Returns whether the level of the decision logger is DEBUG, so that details of every checkpoint are logged."""
    return decisions_log.isEnabledFor(logging.DEBUG)


def say(spec: JobSpec | None, lines: Iterable[tuple[Line, EventId, EventId | None]], details: bool) -> None:
    """Logs the given lines about a job, each with the number of its event and of the event's cause.

    `details`: whether detailed lines are logged at DEBUG.
    """
    name, job_id = ("a job", None) if spec is None else (spec.job_name, spec.job_id)
    for line, number, cause in lines:
        known = {"attempt": line.attempt, "checkpoint": line.checkpoint, "event": number, "cause": cause}
        level = logging.DEBUG if line.detail and details else logging.INFO
        if line.waits:  # else the terminal shows one failure after the other, and not that the job restarts
            hint = "RestartStrategy.none() fails at once"
            decisions_log.warning(
                "%s: %s; %s", name, line.text, hint, extra=log_fields(job=name, job_id=job_id, **known)
            )
            continue
        to = decisions_log if line.checkpoint is None or line.trouble else checkpoints_log
        to.log(level, "%s: %s", name, line.text, extra=log_fields(job=name, job_id=job_id, **known))
