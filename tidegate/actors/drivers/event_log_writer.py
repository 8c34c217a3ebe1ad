"""Writes one coordinator's entries to the event log, one after the other, and retries them during outages of storage.

Rules:

- A failed entry is tried again, after growing pauses, for as long as an outage is tolerated. Then the writer gives up.
- The preceding entry is read where another coordinator could have continued the log (see `EventLog`): at the first
  entry of this writer, and at an entry that it writes again. It is also read from time to time, to notice that the log
  was deleted.
- From time to time the state of the coordinator is stored as a snapshot, and entries before the previous snapshot are
  deleted. They are archived first if the job is configured so. Archiving takes a request for each entry, so it happens
  while the log continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import ANSWERED_BY_MANY, STORAGE_AWAY, CoordinatorEvent, OrderName
from tidegate.actors.coordinator.job_spec import FIRST_PAUSE_MS, STORAGE_OUTAGE_MS, pause_ms
from tidegate.actors.drivers.outages import OutageNotes
from tidegate.actors.drivers.ports import CoordinatorPort
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.codec import encode, wire
from tidegate.storage.errors import FencedError, LogDeletedError, StorageError
from tidegate.storage.ids import EventId, Generation

log = logging.getLogger(__name__)
LOOK_MS = 10_000
"""Time in ms after which the writer checks that the log still exists, even if no other coordinator can have
continued it.
"""
ENTRIES_A_SNAPSHOT = 1_000
BYTES_A_SNAPSHOT = 16 * 1024 * 1024
"""Bytes of new entries after which the state is stored as a snapshot and older entries are deleted.

The limit keeps the log from filling a storage in memory.
"""
_FIRST_EVENT = EventId(0)


@wire
@dataclass(frozen=True, slots=True)
class StoredFold:
    """A snapshot of the coordinator's state in storage. `state` is the encoded state after all entries before it.

    `takeovers` are the indices of the entries with which coordinators took over. `next_event` is the number of the
    first event that is not part of the state. `orders` are the orders that `CauseTracker` remembers.
    """

    state: bytes
    takeovers: tuple[int, ...]
    next_event: int
    orders: StoredOrders = ()


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position at which a coordinator continues the event log. `next_index` is the index of its first entry.

    `takeovers` are the indices of the entries with which earlier coordinators took over. `snapshot_index` is the index
    of the newest snapshot. `next_event` is the number of the coordinator's first event.
    """

    next_index: int = 0
    takeovers: tuple[int, ...] = ()
    snapshot_index: int = 0
    next_event: EventId = _FIRST_EVENT
    orders: StoredOrders = ()


class LogWriter:
    """Writes the event log for one coordinator process. All methods run on the coordinator's thread.

    `incarnation` is a unique id, which distinguishes two coordinators that both claim to be the next generation.
    `entries_a_snapshot` is the number of entries after which a snapshot is stored, or None for the default.
    """

    def __init__(
        self,
        event_log: EventLog,
        position: LogPosition,
        generation: Generation,
        port: CoordinatorPort,
        incarnation: str,
        entries_a_snapshot: int | None = None,
    ) -> None:
        self._entries_a_snapshot = ENTRIES_A_SNAPSHOT if entries_a_snapshot is None else entries_a_snapshot
        self.outage_ms = STORAGE_OUTAGE_MS
        self._log = event_log
        self._port = port
        self.generation = generation
        self._incarnation = incarnation
        self._next_index = position.next_index
        self._takeovers = (*position.takeovers, position.next_index)
        self._counted_from = self._stored_index = position.snapshot_index
        """The first entry that counts towards the next snapshot. The next attribute is the index of the newest
        snapshot.
        """
        self._bytes_since_snapshot = 0
        self._looked_ms: int | None = None
        self._notes = OutageNotes("the event log", port.monotonic_ms)

    @property
    def in_charge(self) -> bool:
        """Returns whether the log has an entry of this coordinator. Once it has, no older coordinator can write to the
        log.
        """
        return self._next_index >= self._takeovers[-1] + 1

    @property
    def away(self) -> bool:
        """Returns whether the last attempt to write to the log failed."""
        return self._notes.away

    @property
    def waits_for(self) -> str | None:
        """Returns text about the outage of the log's storage, or None if it answers. May be called from any
        thread.
        """
        return self._notes.waits_for

    def append(
        self,
        events: tuple[CoordinatorEvent, ...],
        causes: tuple[EventId | None, ...],
        first_event: EventId,
        written: Callable[[], None],
        went_away: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Writes an entry with these events, and then calls `written`, or `failed` with the error if it gives up.

        The error is a FencedError if another coordinator has continued the log, and a LogDeletedError if the log was
        deleted. `went_away` is called when the first attempt to write an entry has failed and will be repeated.
        `first_event` is the number of the first event, and `causes` has the number of each event's cause.
        """
        at_ms = self._port.now_ms()
        entry = LogEntry(self._next_index, self.generation, at_ms, self._incarnation, events, first_event, causes)
        self._try(entry, 1, written, went_away, failed)

    def _try(
        self,
        entry: LogEntry,
        attempt: int,
        written: Callable[[], None],
        went_away: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        port = self._port
        begin_ms = port.monotonic_ms()
        look = attempt > 1 or not self.in_charge or self._looked_ms is None or begin_ms - self._looked_ms >= LOOK_MS
        size_bytes = 0

        def write() -> None:
            nonlocal size_bytes
            size_bytes = self._log.append(entry, look=look)

        def done(error: BaseException | None) -> None:
            if error is None:
                if look:
                    self._looked_ms = begin_ms
                self._next_index = entry.index + 1
                self._bytes_since_snapshot += size_bytes
                self._notes.worked()
                written()
            elif isinstance(error, FencedError | LogDeletedError) or not isinstance(error, StorageError):
                failed(error)
            elif (away_ms := self._notes.failed(error, self._meanwhile)) >= self.outage_ms:
                text = f"could not be written for {away_ms / 1000:g} s (storage_outage is {self.outage_ms / 1000:g} s)"
                failed(StorageError(f"the event log {text}: {error}"))
            else:
                if attempt == 1:
                    went_away(str(error))
                again = lambda: self._try(entry, attempt + 1, written, went_away, failed)  # noqa: E731
                port.call_later(min(pause_ms(FIRST_PAUSE_MS, attempt), self.outage_ms - away_ms), again)

        port.append(write, done)

    @property
    def _meanwhile(self) -> str:
        return f"the job goes on without checkpoints, and this is tried again for up to {self.outage_ms / 1000:g} s"

    def store_fold_if_due(self, state: CoordinatorState, next_event: EventId, causes: CauseTracker) -> None:
        """Stores a snapshot of the state if enough entries were written since the last one, and deletes log entries
        before the previous snapshot.
        """
        few = self._next_index - self._counted_from < self._entries_a_snapshot
        if few and self._bytes_since_snapshot < BYTES_A_SNAPSHOT:
            return
        index = self._next_index
        previous = self._stored_index
        self._counted_from = index
        self._bytes_since_snapshot = 0
        fold = StoredFold(encode(state), self._takeovers, next_event, causes.stored())
        takeovers = frozenset(self._takeovers)
        keeps = state.spec is not None and state.spec.checkpoints.keep_events

        def store_fold() -> None:
            self._log.write_snapshot(index, fold)
            if not keeps:
                self._log.truncate(previous, takeovers)

        def put_aside() -> None:
            try:
                self._log.truncate(previous, takeovers, segments=True)
            except StorageError as caught:
                log.warning("what was to be cut from the log before entry %d stays there longer: %s", previous, caught)

        def stored(error: BaseException | None) -> None:
            if error is None:
                self._stored_index = index
                if keeps:
                    self._port.run_io(put_aside)
            else:
                log.warning("the fold at entry %d was not stored, replay stays longer: %s", index, error)

        self._port.append(store_fold, stored)


CHECKPOINTS_MAX = 200
"""Limit of remembered orders to tasks, for each kind of order. An answer to an older order gets no cause."""
StoredOrders = tuple[tuple[str, int | str, int], ...]
"""Remembered orders: the kind of each, its subject, and the number of the event that caused it."""


class CauseTracker:
    """Finds the cause of each event. The cause of an event that answers an order is the event from which the order
    followed.

    Rules:

    - Each event of the log has a number, one more than the event before it.
    - An order counts as given when it is carried out. The event from which it follows is then in the log, so a cause is
      always an earlier event, and no other coordinator has used its number.
    - Events that the machine ignores are not logged and have no number. No instruction follows from them, so they are
      never a cause.
    - Like the machine's state, the tracker is computed from the log. A new coordinator therefore has the orders of the
      earlier ones, and may still get the answers. Orders that only the lost process could answer (its timers, its I/O)
      are dropped.
    - A repeated order to tasks keeps the first event as its cause. It is unknown which of the messages a task answers,
      and the first event is the reason for all of them.
    - Its size is limited. An order with a single answer is dropped once the answer has arrived. Of orders to tasks, the
      newest `CHECKPOINTS_MAX` of each kind are kept. A later answer has no cause.
    """

    def __init__(self, stored: StoredOrders = ()) -> None:
        self._orders: dict[OrderName, EventId] = {}
        for kind, about, number in stored:
            self._remember((kind, about), EventId(number))

    def of(self, event: ev.CoordinatorEvent) -> EventId | None:
        """Returns the number of the event that caused a newly arrived event.

        None if the event has no cause in the log, or if its order is no longer remembered.
        """
        for order in event.answers:
            number = self._orders.get(order)
            if number is not None:
                if order[0] not in ANSWERED_BY_MANY:
                    del self._orders[order]
                return number
        return None

    def taken_in(self, number: EventId, event: ev.CoordinatorEvent) -> None:
        """Records the log number of an event that the machine is about to handle, with its cause."""
        if isinstance(event, ev.CoordinatorStarted):
            self._orders = {order: cause for order, cause in self._orders.items() if order[0] in ANSWERED_BY_MANY}
        elif isinstance(event, ev.StorageWentAway):
            self._remember(STORAGE_AWAY, number)

    def carried_out(self, number: EventId, instruction: do.CoordinatorInstruction) -> None:
        """Records that an instruction is carried out. `number` is the number of the event that caused it."""
        order = instruction.order
        if order is not None:
            self._remember(order, number)

    def replayed(
        self, number: EventId, event: ev.CoordinatorEvent, instructions: Iterable[do.CoordinatorInstruction]
    ) -> None:
        """Records the orders that followed from a logged event. Called during a replay of the log."""
        self.of(event)
        self.taken_in(number, event)
        for instruction in instructions:
            self.carried_out(number, instruction)

    def dropped(self, timer: str) -> None:
        """Records that a timer was dropped before it fired."""
        self._orders.pop(("timer", timer), None)

    def stored(self) -> StoredOrders:
        """Returns the remembered orders, to be stored with a snapshot of the coordinator's state."""
        return tuple((kind, about, number) for (kind, about), number in self._orders.items())

    def _remember(self, order: OrderName, number: EventId) -> None:
        to_tasks = order[0] in ANSWERED_BY_MANY
        if to_tasks and order in self._orders:
            return
        self._orders.pop(order, None)
        self._orders[order] = number
        if to_tasks:
            same = [other for other in self._orders if other[0] == order[0]]
            for old in same[: max(0, len(same) - CHECKPOINTS_MAX)]:
                del self._orders[old]
