"""Drives one coordinator machine: logs first, acts afterwards.

Events that come in together become one entry of the event log (a group commit). The instructions that follow from
them are held back until the entry is durable. An entry that cannot be written stops the coordinator, a lost create
means that a newer generation is in charge.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.machine import CoordinatorMachine
from tidegate.actors.coordinator.state import CoordinatorState
from tidegate.actors.failures import error_text
from tidegate.actors.runtimes.coordinator_effects import CoordinatorEffects
from tidegate.actors.runtimes.event_border import fit_for_the_log
from tidegate.actors.runtimes.ports import CoordinatorPort
from tidegate.actors.task import events as task_ev
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import CodecError, FencedError, StorageError
from tidegate.storage.event_log import EventLog, LogEntry
from tidegate.storage.ids import Generation

log = logging.getLogger(__name__)

APPEND_ATTEMPTS_MAX = 20
APPEND_RETRY_MS = 200
EVENTS_AN_ENTRY_MAX = 1_000
ENTRIES_A_SNAPSHOT = 1_000
BYTES_A_SNAPSHOT = 16 * 1024 * 1024
"""Acknowledgements hold the state that is inlined: the log is cut before it outgrows a storage in memory."""


def replay(event_log: EventLog) -> tuple[CoordinatorMachine, int]:
    """The machine as the log leaves it, and the index of the next entry."""
    snapshot = event_log.latest_snapshot()
    state: CoordinatorState | None = None
    index = 0
    if snapshot is not None:
        index, encoded = snapshot
        assert isinstance(encoded, bytes)
        state = decode(encoded)
    machine = CoordinatorMachine(state)
    for entry in event_log.entries(index):
        for event in entry.events:
            machine.handle(event)
        index = entry.index + 1
    return machine, index


class CoordinatorHost:
    """One coordinator incarnation on some runtime. All methods run on the coordinator's mailbox.

    `incarnation` tells two coordinators apart that both believe to be the next generation.
    """

    def __init__(
        self,
        machine: CoordinatorMachine,
        next_index: int,
        event_log: EventLog,
        effects: CoordinatorEffects,
        port: CoordinatorPort,
        incarnation: str,
    ) -> None:
        self.machine = machine
        self.generation = Generation(machine.state.generation + 1)
        self._log = event_log
        self._next_index = next_index
        self._incarnation = incarnation
        self._snapshot_index = next_index
        self._bytes_since_snapshot = 0
        self._effects = effects
        self._port = port
        self._inbox: deque[ev.CoordinatorEvent] = deque()
        self._appending = False
        self._in_charge = False
        """Whether an entry of this incarnation is in the log: then nobody older can fence it."""
        self._halted = False

    def start(self) -> None:
        """Take over: the first thing a generation logs is that it exists."""
        self.handle(ev.CoordinatorStarted(self._port.now_ms(), self.generation))

    def handle(self, event: ev.CoordinatorEvent) -> None:
        """Take in one fact."""
        if self._halted:
            return
        try:
            event = fit_for_the_log(event)
        except CodecError as error:
            text = error_text(error)
            if isinstance(event, ev.CheckpointRequested):
                self._port.complete_request(do.CompleteRequest(event.request, None, text))
            else:
                self._stop(f"a {type(event).__name__} cannot be written to the event log: {text}")
            return
        self._inbox.append(event)
        if not self._appending:
            self._next_entry()

    def halt(self) -> None:
        """Stop; nothing is logged or done from now on."""
        self._halted = True

    def _next_entry(self) -> None:
        if self._halted or not self._inbox:
            return
        events = tuple(self._inbox.popleft() for _ in range(min(len(self._inbox), EVENTS_AN_ENTRY_MAX)))
        instructions = [i for event in events for i in self.machine.handle(event)]
        entry = LogEntry(self._next_index, self.generation, self._port.now_ms(), self._incarnation, events)
        self._appending = True
        self._append(entry, instructions, attempt=1)

    def _append(self, entry: LogEntry, instructions: Sequence[do.CoordinatorInstruction], attempt: int) -> None:
        size_bytes = 0

        def write() -> None:
            nonlocal size_bytes
            size_bytes = self._log.append(entry)

        def done(error: BaseException | None) -> None:
            if self._halted:
                return
            if error is None:
                self._next_index = entry.index + 1
                self._bytes_since_snapshot += size_bytes
                self._in_charge = True
                for instruction in instructions:
                    self._perform(instruction)
                self._store_fold_if_due()
                # Only now: what is reported while instructions are carried out waits for the next entry.
                self._appending = False
                self._next_entry()
            elif isinstance(error, FencedError) and not self._in_charge:
                # What the predecessor had on its way landed after the replay: it did not take over, it was late.
                self._halted = True
                self._port.replay_again(str(error))
            elif isinstance(error, FencedError):
                self._stop(f"a newer coordinator is in charge: {error}")
            elif isinstance(error, StorageError) and attempt < APPEND_ATTEMPTS_MAX:
                self._port.call_later(
                    APPEND_RETRY_MS * min(attempt, 10), lambda: self._append(entry, instructions, attempt + 1)
                )
            else:
                self._stop(f"entry {entry.index} of the event log cannot be written: {error}")

        if not self._halted:
            self._port.append(write, done)

    def _stop(self, reason: str) -> None:
        self._halted = True
        self._port.halt(reason)

    def _store_fold_if_due(self) -> None:
        few = self._next_index - self._snapshot_index < ENTRIES_A_SNAPSHOT
        if few and self._bytes_since_snapshot < BYTES_A_SNAPSHOT:
            return
        index, previous = self._next_index, self._snapshot_index
        self._snapshot_index, self._bytes_since_snapshot = index, 0
        encoded = encode(self.machine.state)

        def store_fold() -> None:
            self._log.write_snapshot(index, encoded)
            self._log.truncate(previous)

        def stored(error: BaseException | None) -> None:
            if error is not None:
                log.warning("the fold at entry %d was not stored, replay stays longer: %s", index, error)

        self._port.append(store_fold, stored)

    def _perform(self, instruction: do.CoordinatorInstruction) -> None:
        port, effects = self._port, self._effects
        match instruction:
            case do.DeployAttempt():
                port.deploy(instruction)
            case do.CancelAttempt():
                port.cancel_attempt(instruction)
            case do.StartTasks(tasks=tasks):
                for task in tasks:
                    port.tell(task, task_ev.TasksStarted(port.now_ms()))
            case do.TriggerCheckpoint(attempt, checkpoint_id, triggered_at_ms, tasks, options, base):
                for task in tasks:
                    now_ms = port.now_ms()
                    trigger = task_ev.CheckpointTriggered(
                        now_ms, attempt, checkpoint_id, triggered_at_ms, options, base
                    )
                    port.tell(task, trigger)
            case do.NotifyCompleted(attempt, checkpoint_id, tasks):
                for task in tasks:
                    port.tell(task, task_ev.CheckpointCompleted(port.now_ms(), attempt, checkpoint_id))
            case do.NotifyAborted(attempt, checkpoint_id, tasks):
                for task in tasks:
                    port.tell(task, task_ev.CheckpointAborted(port.now_ms(), attempt, checkpoint_id))
            case do.TriggerHooks():
                port.run_io(lambda: effects.trigger_hooks(instruction))
            case do.RestoreHooks():
                port.run_io(lambda: effects.restore_hooks(instruction))
            case do.WriteSavepoint():
                port.run_io(lambda: effects.write_savepoint(instruction))
            case do.DiscardSavepoint():
                port.run_io(lambda: effects.discard_savepoint(instruction))
            case do.WriteMetadata(metadata) | do.VoidCheckpoint(metadata):
                port.run_io(lambda: effects.write_metadata(metadata))
            case do.CommitSinks():
                port.run_io(lambda: effects.commit_sinks(instruction))
            case do.DiscardCheckpoint():
                port.run_io(lambda: effects.discard_checkpoint(instruction))
            case do.DiscardFiles():
                port.run_io(lambda: effects.discard_files(instruction))
            case do.SetTimer(timer, due_at_ms):
                port.set_timer(timer, due_at_ms)
            case do.CompleteRequest():
                port.complete_request(instruction)
            case do.EndJob():
                port.end_job(instruction)
