"""`CoordinatorHost`: drives one coordinator machine. It logs first and acts afterwards.

Rules:

- The instructions that follow from an event are held back until it is durable.
- Events that come in together become one entry of the event log (a group commit). Events without instructions are held:
  nobody has acted on them, so they may be lost with the process, as a message on its way may. They travel with the next
  entry; their number is bounded, and so is the time of all but those that are of use only with what comes after them.
- What changes nothing is not logged at all.
- Every event of the log has a number, and beside it that of its cause (see `Causes`). The machine knows of neither: the
  host stamps what goes out with the event that it follows from.
- After a commit the tables are looked at for small files. The machine does not know of it: what a table shows stays the
  same.
- While storage is away the machine is told that, and nothing else: it decides on nothing that it could not log. A
  coordinator whose log stays away for too long, or is gone, ends the job; a lost create means that a newer generation
  is in charge.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

from tidegate.actors.coordinator.chronicle import Chronicle
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job.outages import STORAGE_OUTAGE_MS
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.narrator import Line, Narrator
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.drivers.causes import Causes
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.decisions_log import say, wants_details
from tidegate.actors.drivers.event_border import fit_for_the_log
from tidegate.actors.drivers.inlined_state import InlinedState
from tidegate.actors.drivers.log_writer import LogPosition, LogWriter, StoredFold
from tidegate.actors.drivers.outage_notes import NotesOfMany, OutageNotes
from tidegate.actors.drivers.ports import CoordinatorPort
from tidegate.actors.drivers.watermark_answers import WatermarkAnswers
from tidegate.actors.task.messages import events as task_ev
from tidegate.connectors.source import SourceSplit
from tidegate.protocol.failure_reasons import CheckpointFailureReason, bounded_text, error_text
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.codec import decode
from tidegate.storage.errors import CodecError, FencedError
from tidegate.storage.ids import EventId, Generation
from tidegate.storage.user_values import WithheldTexts

log = logging.getLogger(__name__)

EVENTS_AN_ENTRY_MAX = 1_000
NAMES_AN_ENTRY_MAX = 10_000
"""Files and states that the acknowledgements of an entry name: they are most of its bytes."""
HOLD_MS = 1_000
"""How long an event without instructions waits for others, but for those that mean nothing alone."""
_TIMEOUT = "timeout:"
"""How the names of the timers begin that end a checkpoint which takes too long."""
_MEANS_NOTHING_ALONE = (ev.CheckpointAcknowledged, ev.CheckpointDiscarded, ev.SavepointDiscarded, ev.TaskReady)
"""A coordinator that takes over drops what was not acknowledged by all, asks for deletions again, deploys anew."""


def replay(event_log: EventLog, chronicle: Chronicle | None = None) -> tuple[CoordinatorMachine, LogPosition]:
    """The machine as the log leaves it, and where the log goes on. What is replayed is written into the chronicle."""
    snapshot = event_log.latest_snapshot()
    state: CoordinatorState | None = None
    index = snapshot_index = 0
    takeovers: tuple[int, ...] = ()
    number, causes = EventId(0), Causes()
    if snapshot is not None:
        index, fold = snapshot
        assert isinstance(fold, StoredFold)
        state, takeovers, snapshot_index = decode(fold.state), fold.takeovers, index
        # A fold of an older version has not counted its events; there was at least one an entry.
        number = EventId(index if fold.next_event is None else fold.next_event)
        causes = Causes(fold.orders)
    machine = CoordinatorMachine(state)
    if chronicle is not None:
        chronicle.begin(machine.state)
    for entry in event_log.entries(index):
        if isinstance(entry.events[0], ev.CoordinatorStarted):
            takeovers = (*takeovers, entry.index)
        number = number if entry.first_event is None else EventId(entry.first_event)
        for event in entry.events:
            instructions = machine.handle(event)
            causes.replayed(number, event, instructions)
            if chronicle is not None:
                chronicle.replayed(event, instructions, machine.state)
            number = EventId(number + 1)
        index = entry.index + 1
    return machine, LogPosition(index, takeovers, snapshot_index, number, causes.stored())


@dataclass(frozen=True, slots=True)
class Ordered:
    """An instruction, stamped: the event that it follows from, and when it is due by the clock that nobody sets."""

    instruction: do.CoordinatorInstruction
    cause: EventId
    due_ms: int


class CoordinatorHost:
    """One coordinator incarnation on some runtime. All methods run on the coordinator's mailbox.

    `incarnation` tells two coordinators apart that both believe to be the next generation.
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
        chronicle: Chronicle | None = None,
        log_rows: bool = False,
    ) -> None:
        self.machine = machine
        self.chronicle = Chronicle(machine.state) if chronicle is None else chronicle
        self.generation = Generation(machine.state.generation + 1)
        self._log_rows = log_rows
        self._withheld = WithheldTexts()
        self._log = LogWriter(event_log, position, self.generation, port, incarnation, entries_a_snapshot)
        self._effects = effects
        self._port = port
        self._watermarks = WatermarkAnswers(port, self.generation)
        self._inlined = InlinedState()
        self._state_notes = OutageNotes("state of checkpoints", port.monotonic_ms)
        self._metadata_notes = OutageNotes("metadata of checkpoints", port.monotonic_ms)
        self._table_notes = OutageNotes("output tables", port.monotonic_ms)
        self._start_notes = OutageNotes("what comes before the tasks of an attempt", port.monotonic_ms)
        self._copy_notes = NotesOfMany("the folder of savepoint {}", port.monotonic_ms)
        self._copy_discard_notes = NotesOfMany("the folder of savepoint {}, which has failed,", port.monotonic_ms)
        self._discard_notes = NotesOfMany("what is to be deleted of checkpoint {}", port.monotonic_ms, logging.DEBUG)
        self._inbox: deque[tuple[ev.CoordinatorEvent, EventId | None, int]] = deque()
        """What has come, its cause, and when it came by the clock that nobody sets."""
        self._held: list[ev.CoordinatorEvent] = []
        """Taken in by the machine, and not logged yet."""
        self._held_causes: list[EventId | None] = []
        self._causes = Causes(position.orders)
        self._timeouts: list[str] = []
        """The timers of checkpoints that may still be pending."""
        self._next_event = position.next_event
        """The number of the next event that the machine takes in."""
        self._held_names = 0
        self._instructions: list[Ordered] = []
        """What follows from the events that are held."""
        self._narrator = Narrator(machine.state, wants_details())
        self._lines: list[tuple[Line, EventId, EventId | None]] = []
        """What there is to say of the events that are held, once they are logged: of which event, with its cause."""
        self._flushes = False
        """Whether the events that are held are going to be logged at some time, whatever comes."""
        self._appending = False
        self._halted = False

    @property
    def in_charge(self) -> bool:
        """Whether the log says that this incarnation has taken over. From any thread."""
        return self._log.in_charge

    @property
    def waits_for(self) -> str | None:
        """What storage the coordinator waits for, and since when; None if it waits for none. From any thread."""
        notes = (self._log, self._metadata_notes, self._state_notes, self._table_notes, self._start_notes)
        return next((found for each in notes if (found := each.waits_for) is not None), None)

    def start(self) -> None:
        """Take over: the first thing a generation logs is that it exists."""
        self.handle(ev.CoordinatorStarted(self._port.now_ms(), self.generation))

    def handle(self, event: ev.CoordinatorEvent) -> None:
        """Take in one fact."""
        if self._halted:
            return
        if isinstance(event, ev.WatermarkReported):
            if self.in_charge:
                self._watermarks.answer(self.machine.state, event)
            return
        if self._log.away and self._refused(event):
            return
        event = self._timed(self._inlined.take(event))
        if isinstance(event, ev.SinksCommitted) and self._effects.compactor.compacts:
            self._port.run_io(self._effects.compactor.step)
        try:
            event = fit_for_the_log(event, self._withhold)
        except CodecError as error:
            text = error_text(error)
            if isinstance(event, ev.CheckpointRequested):
                self._port.complete_request(do.CompleteRequest(event.request, None, text))
            else:
                self._halted = True
                self._port.halt(f"a {type(event).__name__} cannot be written to the event log: {text}", fenced=False)
            return
        # Looked up now: until the event is taken in, its order may have been given again.
        self._inbox.append((event, self._causes.of(event), self._port.monotonic_ms()))
        if not self._appending:
            self._next_entry()

    def whole_text(self, text: str | None) -> str | None:
        """A text of the event log, with the values that were withheld from it where this incarnation has seen them.

        For the program's own driver. From any thread.
        """
        return self._withheld.whole(text)

    def _withhold(self, text: str) -> str:
        return self._withheld.withhold(text, self._log_rows)

    def halt(self) -> None:
        """Stop; nothing is logged or done from now on."""
        self._halted = True

    def _refused(self, event: ev.CoordinatorEvent) -> bool:
        """What is asked for while storage is away does not wait for that, and so the inbox stays bounded.

        Tasks ask for splits again; users are told.
        """
        if isinstance(event, ev.SplitsRequested):
            return True
        if isinstance(event, ev.CheckpointRequested):
            reason = CheckpointFailureReason.STORAGE_AWAY
            self._port.complete_request(do.CompleteRequest(event.request, None, reason.value, reason=reason))
            return True
        return isinstance(event, ev.CancelRequested) and any(isinstance(e, ev.CancelRequested) for e, *_ in self._inbox)

    def _timed(self, event: ev.CoordinatorEvent) -> ev.CoordinatorEvent:
        """The event, with the time for which what it tells of has failed."""
        state, metadata, tables = self._state_notes, self._metadata_notes, self._table_notes
        meanwhile, again = "checkpoints fail meanwhile, the job goes on", "it is tried again, the job goes on"
        spec = self.machine.state.spec
        limit_ms = STORAGE_OUTAGE_MS if spec is None else spec.storage_outage_ms
        match event:
            case ev.CheckpointDeclined(reason=CheckpointFailureReason.STORAGE_AWAY, message=error):
                return replace(event, away_ms=state.failed(error, meanwhile))
            case ev.MetadataWriteFailed(error=error):
                # Of its own: this ends the job, so it does not count from when something else has failed.
                return replace(event, away_ms=metadata.failed(error, meanwhile))
            case ev.SinkCommitFailed(error=error, fenced=False, permanent=False):
                return replace(event, away_ms=tables.failed(error, again))
            case ev.HookRestoreFailed(away_ms=int()) | ev.TablesNotTakenBack(away_ms=int()):
                return replace(event, away_ms=self._start_notes.failed(event.error, "the attempt waits for it"))
            case ev.HooksRestored() | ev.TablesTakenBack():
                self._start_notes.worked()
            case ev.SavepointWriteFailed(checkpoint_id=number, error=error, permanent=False):
                return replace(event, away_ms=self._copy_notes.failed(number, error, again, limit_ms))
            case ev.SavepointWritten(checkpoint_id=number):
                self._copy_notes.worked(number)
            case ev.SavepointDiscardFailed(checkpoint_id=number, error=error):
                return replace(event, away_ms=self._copy_discard_notes.failed(number, error, again, limit_ms))
            case ev.SavepointDiscarded(checkpoint_id=number):
                self._copy_discard_notes.worked(number)
            case ev.CheckpointDiscardFailed(checkpoint_id=number, error=error):
                return replace(event, away_ms=self._discard_notes.failed(number, error, again, limit_ms))
            case ev.CheckpointDiscarded(checkpoint_id=number):
                self._discard_notes.worked(number)
            case ev.MetadataWritten():
                state.worked()
                metadata.worked()
            case ev.CheckpointVoided():
                metadata.worked()
            case ev.SinksCommitted():
                tables.worked()
        return event

    # --- the log --------------------------------------------------------------------------------------------------

    def _next_entry(self) -> None:
        """Let the machine take in what is there, and begin an entry if something follows from that."""
        if self._halted:
            return
        while self._inbox and not self._full:
            self._take_in(*self._inbox.popleft())
        if self._held and (self._instructions or self._full or not self._log.in_charge):
            self._append()
        elif not self._flushes and not all(isinstance(event, _MEANS_NOTHING_ALONE) for event in self._held):
            self._flushes = True
            self._port.call_later(HOLD_MS, self._flush)

    @property
    def _full(self) -> bool:
        return len(self._held) >= EVENTS_AN_ENTRY_MAX or self._held_names >= NAMES_AN_ENTRY_MAX

    def _take_in(self, event: ev.CoordinatorEvent, cause: EventId | None, arrived_ms: int) -> None:
        if self.machine.ignores(event):
            return
        number, self._next_event = self._next_event, EventId(self._next_event + 1)
        self._causes.taken_in(number, event)
        self._held.append(event)
        self._held_causes.append(cause)
        if isinstance(event, ev.CheckpointAcknowledged):
            self._held_names += event.state.names
        instructions = self.machine.handle(event)
        lines = self._narrator.tell(event, instructions, self.machine.state)
        self.chronicle.take_in(event, instructions, lines, self.machine.state)
        self._lines += [(line, number, cause) for line in lines]
        for instruction in instructions:
            # The wall clock may be set until the event is logged; it was right when the event came.
            wait_ms = max(0, instruction.due_at_ms - event.at_ms) if isinstance(instruction, do.SetTimer) else 0
            self._instructions.append(Ordered(instruction, number, arrived_ms + wait_ms))

    def _flush(self) -> None:
        self._flushes = False
        if self._held and not self._appending and not self._halted:
            self._append()

    def _append(self) -> None:
        events, self._held, self._held_names = tuple(self._held), [], 0
        causes, self._held_causes = tuple(self._held_causes), []
        first_event = EventId(self._next_event - len(events))
        instructions, self._instructions = self._instructions, []
        lines, self._lines = self._lines, []
        self._appending = True
        if self.machine.state.spec is not None:
            self._log.outage_ms = self.machine.state.spec.storage_outage_ms

        def written() -> None:
            if self._halted:
                return
            spec = self.machine.state.spec
            say(spec, lines, self._narrator.details)
            for ordered in instructions:
                self._carry_out(ordered)
            self._inlined.keep(self.machine.state.pending)
            if self.machine.state.storage_away:
                back = ev.StorageCameBack(self._port.now_ms())
                self._take_in(back, self._causes.of(back), self._port.monotonic_ms())
            else:
                self._log.store_fold_if_due(self.machine.state, self._next_event, self._causes)
            # Only now: what is reported while instructions are carried out waits for the next entry.
            self._appending = False
            self._next_entry()

        def went_away(error: str) -> None:
            if not self._halted:
                went = ev.StorageWentAway(self._port.now_ms(), bounded_text(error))
                self._take_in(went, None, self._port.monotonic_ms())

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

    def _carry_out(self, ordered: Ordered) -> None:
        instruction = ordered.instruction
        self._causes.carried_out(ordered.cause, instruction)
        if isinstance(instruction, do.SetTimer):
            self._port.set_timer(instruction, max(0, ordered.due_ms - self._port.monotonic_ms()))
            if instruction.timer.startswith(_TIMEOUT):
                self._timeouts.append(instruction.timer)
                self._drop_timeouts()
        else:
            self._perform(instruction)

    def _drop_timeouts(self) -> None:
        """Drop the timeouts of checkpoints that are over: otherwise each would wait for minutes."""
        waiting = []
        for timer in self._timeouts:
            if self.machine.ignores(ev.TimerFired(self._port.now_ms(), timer)):
                self._port.cancel_timer(timer)
                self._causes.dropped(timer)
            else:
                waiting.append(timer)
        self._timeouts = waiting

    def _perform(self, instruction: do.CoordinatorInstruction) -> None:
        port, effects, generation = self._port, self._effects, self.generation
        match instruction:
            case do.DeployAttempt():
                port.deploy(instruction)
            case do.CancelAttempt():
                port.cancel_attempt(instruction)
            case do.KillProcess():
                port.kill_process(instruction)
            case do.StartTasks(tasks=tasks):
                for task in tasks:
                    port.tell(task, task_ev.TasksStarted(port.now_ms(), generation))
            case do.AskTasks(attempt, tasks):
                for task in tasks:
                    port.tell(task, task_ev.CoordinatorTookOver(port.now_ms(), attempt, generation))
            case do.AssignSplits(attempt, task, first, stored):
                splits = tuple(SourceSplit(split.split_id, split.payload, split.rows) for split in stored)
                port.tell(task, task_ev.SplitsAssigned(port.now_ms(), attempt, first, splits, generation))
            case do.TriggerCheckpoint(attempt, checkpoint_id, triggered_at_ms, tasks, options, base):
                for task in tasks:
                    now_ms = port.now_ms()
                    trigger = task_ev.CheckpointTriggered(
                        now_ms, attempt, checkpoint_id, triggered_at_ms, options, base, generation
                    )
                    port.tell(task, trigger)
            case do.NotifyCompleted(attempt, checkpoint_id, tasks):
                for task in tasks:
                    port.tell(task, task_ev.CheckpointCompleted(port.now_ms(), attempt, checkpoint_id, generation))
            case do.NotifyAborted(attempt, checkpoint_id, tasks):
                for task in tasks:
                    port.tell(task, task_ev.CheckpointAborted(port.now_ms(), attempt, checkpoint_id, generation))
            case do.TriggerHooks():
                port.run_io(lambda: effects.trigger_hooks(instruction))
            case do.RestoreHooks():
                port.run_io(lambda: effects.restore_hooks(instruction))
            case do.TakeTablesBack(_, checkpoint_id, reason):
                log.warning("%s: the job goes on from checkpoint %d, before it", reason, checkpoint_id)
                port.run_io(lambda: effects.take_tables_back(instruction))
            case do.WriteSavepoint(metadata=metadata, complete=complete):
                savepoint = instruction if complete else replace(instruction, metadata=self._inlined.put_back(metadata))
                stops = effects.copy_begins(metadata.checkpoint_id)
                port.run_copy(lambda: effects.write_savepoint(savepoint, stops))
            case do.StopCopy(checkpoint_id):
                effects.stop_copy(checkpoint_id)
            case do.DiscardSavepoint():
                port.run_copy(lambda: effects.discard_savepoint(instruction))
            case do.WriteMetadata(metadata, permit=permit):
                whole = self._inlined.put_back(metadata)
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
