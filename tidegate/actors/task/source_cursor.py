"""`SourceCursor`: the positions of a source subtask in its splits, and the choice of the next read.

The task machine requests reads from it, and passes it the results. The cursor does no I/O. Rules:

- The position counts *processed* rows. Rows that were only read ahead are read again after a restore. This works
  because `SourceReader.read` is a function of its arguments.
- An empty result that is not the end means only that there are no rows at the moment.
- The payload of a split, and the splits that a source has found, belong to the position: they take effect when the
  result that contains them is processed, together with its rows. So they are in a checkpoint if and only if these rows
  are. A split that was found is read from then on.
- A source with two parts (`TwoPartSource`) is read like a bounded one first. When all rows of the task's first-part
  splits are processed, it requests more splits: the answer has splits of the second part, or is the end. From then on
  its splits are read in turn. Restored splits of the second part wait until then.
- A split that is too far ahead of its alignment group in event time is not read (`SplitAlignment`). That time does not
  count towards idleness.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from tidegate.actors.task import instructions as do
from tidegate.actors.task.events import SourceBatchRead, SplitsAssigned, TaskRestored, TaskTimer, WatermarkAnnounced
from tidegate.actors.task.instructions import ReadSource, TaskInstruction
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.actors.task.split_positions import FrozenPositions, SplitPosition, positions_from_tables
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.actors.task.turn_pacer import ROWS_UNLIMITED
from tidegate.connectors.source import NotifiedSource, SourceSplit, TwoPartSource, is_unbounded
from tidegate.operators.source_splits import WAITING, SourceSplits
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError, ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import StateTable

log = logging.getLogger(__name__)
PAUSE_MAX_MS = 100
"""The longest pause between reads of a source without rows, in ms. A new row waits no longer than this."""
SHORTER = 4
"""The factor by which a result with rows shortens the next pause. A pause stays above one millisecond."""
PATIENCE_MS = 5_000
"""Time in ms for which one read may wait for rows after the first pause."""
IDLENESS_PARTS = 10
"""A read waits for at most 1/IDLENESS_PARTS of the idleness, because an idle split is noticed only after the
read.
"""
QUIET_MS = 30_000
"""Time in ms without rows after which a split that holds event time back is logged, once, if no idleness was set."""
QUIET_NAMED_MAX = 20
FROZEN_MAX = 64
"""Limit of incomplete checkpoints whose positions a source remembers, if its readers are notified of completed
ones.
"""
TRIED_MAX = 64
"""Limit of the splits that one read tries. A task that is closed waits for one of them at most."""
SPLITS_MAX = 100_000
"""Limit of the splits of one subtask, including splits that were read to their end."""


class Taken(NamedTuple):
    """The result of a read that is being processed.

    Each of the rows, dead letters and induced checkpoint may be None. `lost`: number of records that the source has
    skipped because they were deleted.
    """

    batch: pa.RecordBatch | None
    bad: pa.RecordBatch | None
    lost: int
    induces: CheckpointId | None


class SourceCursor:
    """Chooses the next read, at most `read_ahead` batches ahead of processing, and tracks the positions.

    - Splits are read one after the other. With `in_turn` they are read in turn, a batch of each, and `in_turn` gets the
      split of the rows. A split without rows for `idleness_ms` is then idle, or never if that is None.
    - `event_times`: the greatest timestamps of the splits, which belong to their positions.
    - `requests`: requests more splits from the coordinator, or None.
    - `alignment`: keeps splits from getting too far ahead in event time, or None.
    - `awaited`: the operator that generates watermarks for the splits, if anything waits for them. A split that holds
      them back for QUIET_MS is logged, unless there is an idleness.
    - `notified`: the reader is notified of completed checkpoints.
    - `is_second`: whether a split belongs to the second part of a source, or None for a source with one part. The first
      part is read one split after the other, and `in_turn` applies to the second.

    While no open split has rows the source pauses: a millisecond at first, then twice as long each time, up to
    PAUSE_MAX_MS. Rows make the next pause a quarter as long: a source with occasional rows is read about as often as it
    has some. After a split without rows, and after a pause, one read tries many splits, until one has rows. After the
    first pause a read that tries all splits waits for up to PATIENCE_MS, so that the task is woken up when there are
    rows.
    """

    def __init__(
        self,
        positions: Sequence[SplitPosition],
        rows_max: int,
        read_ahead: int = 2,
        in_turn: SourceSplits | None = None,
        idleness_ms: int | None = None,
        requests: SplitRequests | None = None,
        event_times: SourceSplits | None = None,
        alignment: SplitAlignment | None = None,
        awaited: WatermarkGenerator | None = None,
        notified: bool = False,
        is_second: Callable[[SourceSplit], bool] | None = None,
    ) -> None:
        assert is_second is None or in_turn is not None, "the second part is read in turn"
        self._is_second = is_second
        self._second_part = None if is_second is None else in_turn
        """Receives the splits of the second part. None once the second part has begun, or without one."""
        self._waiting: list[int] = []
        """Indices of the open splits of the second part, until it begins."""
        self._waits_since_ms: int | None = None
        """Time in ms since when the task has no rows of the first part to read, or None."""
        self._requests = requests
        self._notified = notified
        self.frozen: dict[CheckpointId, FrozenPositions] = {}
        """The positions in incomplete checkpoints, if readers are notified of completed ones."""
        self._behind: dict[int, int] = {}
        """For each split, the number of records after its position, as far as known."""
        self.alignment = alignment
        self._all_held = False
        """True if every open split is too far ahead in event time to be read."""
        self._event_times = SourceSplits() if event_times is None else event_times
        for index, position in enumerate(positions):
            in_sequence = in_turn is None or (is_second is not None and not is_second(position.split))
            self._event_times.restore(None if in_sequence else index, position.event_times)
        self._taken: int | None = None
        """Index of the split with the last processed rows, or None."""
        self._positions = list(positions)
        self._offsets = [position.next_offset for position in positions]
        """The offset of each split from which the next read begins."""
        self._read_in = [position.split for position in positions]
        """The splits to pass to the next read, with their newest payloads."""
        self._known = {position.split.split_id for position in positions}
        """Ids of all splits, including splits in results that are not processed yet."""
        self._open = [index for index, position in enumerate(positions) if not position.at_end]
        """Indices of the splits that were not read to their end."""
        self._turn = 0
        """Index in `_open` of the split that is read next."""
        self._ready: deque[tuple[int, SourceBatchRead, bool]] = deque()
        """Results that wait to be processed: the index of the split, the result, and whether the split becomes
        idle.
        """
        self._reads = 0
        self._outstanding: int | None = None
        self._asked: list[int] = []
        """Indices of the splits that the running read tries."""
        self._rows_max = rows_max
        self._read_ahead = read_ahead
        self._splits = in_turn if is_second is None else None
        if is_second is not None and in_turn is not None:
            in_turn.begin_first()
            self._waiting = [index for index in self._open if is_second(positions[index].split)]
            self._open = [index for index in self._open if not is_second(positions[index].split)]
        elif in_turn is not None:
            in_turn.begin(
                (index for index in self._open if positions[index].split.rows),
                (index for index in self._open if not positions[index].split.rows),
            )
        self._idleness_ms = idleness_ms
        self._awaited = awaited
        self._quiet: set[int] = set()
        """Splits that were logged because they hold event time back."""
        self._quiet_due_ms = 0
        """The time, in ms since 1970, of the next check for splits that hold event time back."""
        self._rows_at_ms: dict[int, int] = {}
        """For each split, the time in ms since 1970 when it last had rows, was first read, or was kept from being
        read.
        """
        self._idling: set[int] = set()
        """Splits that are idle and have had no rows since."""
        self._misses = 0
        """Number of empty results since the last result with rows, or since the last pause."""
        self._next_pause_ms = 1
        self._pause_ms: int | None = None
        """The length of the current pause in ms, or None without a pause."""

    @property
    def has_batch(self) -> bool:
        """Returns whether a result of a read waits to be processed."""
        return bool(self._ready)

    @property
    def at_end(self) -> bool:
        """Returns whether every row of every split has been processed."""
        over = (self._requests is None or self._requests.over) and self._second_part is None
        return over and not self._open and not self._ready and self._outstanding is None

    @property
    def split_ids(self) -> tuple[str, ...]:
        """Returns the ids of the subtask's splits, including splits that were read to their end."""
        return tuple(position.split.split_id for position in self._positions)

    @property
    def rows_read(self) -> int:
        """Returns the number of processed rows, over all splits. A split with an unknown position (-1) counts 0."""
        return sum(max(0, position.next_offset) for position in self._positions)

    @property
    def behind(self) -> Collection[int]:
        """Returns the number of unprocessed records of each split for which that number is known."""
        return self._behind.values()

    def next_steps(self, rows_max: int | None, at_ms: int) -> Sequence[TaskInstruction]:
        """Returns the next read, or else the request for more splits, and the report of the watermark if it is due.

        `rows_max`: limit of the rows to read. With None there is no room for rows, and nothing is read.
        """
        steps = () if rows_max is None else self._reading(rows_max, at_ms)
        return steps if self.alignment is None else (*steps, *self.alignment.steps(at_ms, self._all_held, self.at_end))

    def _reading(self, rows_max: int, at_ms: int) -> tuple[TaskInstruction, ...]:
        if self._second_part is not None and not self._open and self._outstanding is None:
            return self._wait_for_second(self._second_part, at_ms)
        if self._requests is not None and not self._open and self._outstanding is None:
            return self._requests.ask(at_ms)
        read = self.next_read(rows_max)
        return () if read is None else (read,)

    def told(self, event: SplitsAssigned | WatermarkAnnounced) -> None:
        """Handles a message of the coordinator to the source: assigned splits, or the watermark of the alignment
        group.
        """
        if isinstance(event, WatermarkAnnounced):
            assert self.alignment is not None, "a task that waits for nobody is told of nobody"
            self.alignment.announced(event.watermark_ms)
            return
        assert self._requests is not None, "a task that does not ask for splits gets none"
        new = self._requests.answered(event)
        for split in new:
            self._add(split)
        if self._second_part is None:
            return
        if self._begins_second(new):
            self.begin_second(self._second_part)
        elif new:
            self._waits_since_ms = None
            self._second_part.stops_waiting()

    def _begins_second(self, new: Sequence[SourceSplit]) -> bool:
        """Returns whether the second part of a two-part source (`TwoPartSource`) begins with newly assigned splits: one
        of them belongs to the second part, or no splits are left.
        """
        assert self._requests is not None
        assert self._is_second is not None
        return self._requests.over or any(map(self._is_second, new))

    def _wait_for_second(self, second: SourceSplits, at_ms: int) -> tuple[TaskInstruction, ...]:
        """Requests splits of the second part of a two-part source, once all rows that were read are processed."""
        self._all_held = False
        if self._ready:
            return ()
        if self._requests is None:
            self.begin_second(second)
            read = self.next_read()
            return () if read is None else (read,)
        if self._waits_since_ms is None:
            self._waits_since_ms = at_ms
            second.begins_waiting()
        waited_ms = at_ms - self._waits_since_ms
        if self._idleness_ms is not None and waited_ms >= self._idleness_ms and not second.idle:
            second.waits_too_long()
            self._splits_moved()
            return ()
        return self._requests.ask(at_ms)

    def begin_second(self, second: SourceSplits) -> None:
        """Starts to read the splits of the second part of a two-part source, round-robin."""
        if self._event_times.newest_ms:
            self._note_event_times()
        self._second_part = None
        self._splits = second
        self._open = self._waiting
        self._waiting = []
        self._turn = 0
        self._misses = 0
        second.begin_second(
            (index for index in self._open if self._read_in[index].rows),
            (index for index in self._open if not self._read_in[index].rows),
        )
        self._splits_moved()

    def _splits_moved(self) -> None:
        """Queues an empty result, by which operators notice that other splits now limit the event time."""
        self._ready.append((WAITING, SourceBatchRead(0, self._reads, None, 0, at_end=False), False))

    def timer_due(self, timer: TaskTimer) -> None:
        """Handles a timer: the pause is over, a request for splits may be repeated, or a report of the watermark
        is due.
        """
        if timer is TaskTimer.SOURCE:
            self.resume()
        elif timer is TaskTimer.SPLITS and self._requests is not None:
            self._requests.ask_again()
        elif timer is TaskTimer.WATERMARKS and self.alignment is not None:
            self.alignment.timer_due()

    def next_read(self, rows_max: int = ROWS_UNLIMITED) -> ReadSource | None:
        """Returns the read to order now, of at most `rows_max` rows, or None."""
        waits = self._pause_ms is not None or self._outstanding is not None
        if not self._open:
            self._all_held = False
        if not self._open or waits or len(self._ready) >= self._read_ahead or not self._choose():
            return None
        self._outstanding = self._reads
        self._reads += 1
        self._asked = self._next_asked()
        (split, offset), *others = [(self._read_in[index], self._offsets[index]) for index in self._asked]
        rows_max = min(rows_max, self._rows_max)
        patience_ms = self._patience_ms()
        pause_ms = self._next_pause_ms
        return ReadSource(self._outstanding, split, offset, rows_max, tuple(others), patience_ms, pause_ms)

    def _patience_ms(self) -> int:
        """Returns the time in ms for which the read may wait for rows.

        It is 0 if the read does not try all splits, because the other splits may get rows meanwhile.
        """
        if self._next_pause_ms == 1 or self.alignment is not None or len(self._asked) < self._asked_in_turn:
            return 0
        return PATIENCE_MS if self._idleness_ms is None else min(PATIENCE_MS, self._idleness_ms // IDLENESS_PARTS)

    def _next_asked(self) -> list[int]:
        """Returns the indices of the splits that the next read tries: one split, or several after a pause or after a
        split without rows.
        """
        if (self._next_pause_ms == 1 and not self._misses) or self._splits is None:
            return [self._open[self._turn]]
        steps = range(min(len(self._open), TRIED_MAX))
        tried = (self._open[(self._turn + step) % len(self._open)] for step in steps)
        return [index for index in tried if not self._held(index)]

    def _choose(self) -> bool:
        """Advances `_turn` to a split that may be read. Returns False if all open splits are too far ahead in
        event time.
        """
        if self.alignment is None:
            return True
        for step in range(len(self._open)):
            turn = (self._turn + step) % len(self._open)
            if not self._held(self._open[turn]):
                self._turn = turn
                self._all_held = False
                return True
            self._rows_at_ms.pop(self._open[turn], None)
        self._all_held = True
        return False

    @property
    def _asked_in_turn(self) -> int:
        """Returns the number of splits that must be without rows before the source pauses."""
        if self._splits is None:
            return 1
        return len(self._open) if self.alignment is None else sum(not self._held(index) for index in self._open)

    def _held(self, index: int) -> bool:
        return self.alignment is not None and self.alignment.holds(None if self._splits is None else index)

    def batch_read(self, event: SourceBatchRead) -> int | None:
        """Handles the result of a read. Returns the time in ms to pause, until `resume`, or None for no pause.

        A repeated result is dropped. An empty result is queued behind results that were read before, so an empty split
        is read again only when these are processed. Raises ConfigurationError for a split that was found a second time,
        and for too many splits.
        """
        if event.read != self._outstanding:
            if event.read < self._reads:
                return None
            raise ProtocolError(
                f"the result of read {event.read} arrived, but that read was never ordered; this is a bug in "
                "tidegate, please report it"
            )
        self._outstanding = None
        for index in self._asked[: event.empty]:
            self._misses += 1
            if self._begins_idling(index, event):
                alone = SourceBatchRead(event.at_ms, event.read, None, self._offsets[index], at_end=False)
                self._ready.append((index, alone, True))
        index = self._asked[event.empty]
        self._turn = self._open.index(index) if event.empty else self._turn
        self._check_found(index, event)
        if event.payload is not None:
            self._read_in[index] = replace(self._read_in[index], payload=event.payload)
        told = event.at_end or event.found or event.induces is not None
        rowless = event.next_offset == self._offsets[index] and not told
        says_nothing = rowless and event.payload is None
        self._offsets[index] = event.next_offset
        if event.at_end:
            del self._open[self._turn]
        elif self._splits is not None:
            self._turn += 1
        self._turn = self._turn % len(self._open) if self._open else 0
        idle = rowless and self._begins_idling(index, event)
        if says_nothing and not self._ready and not idle:
            self._taken = index  # Nothing changes, so it needs no turn.
            self._note_behind(index, event)
            return self._missed()
        self._ready.append((index, event, idle))
        if rowless:
            return self._missed()
        self._rows_at_ms[index] = event.at_ms
        self._idling.discard(index)
        self._misses = 0
        self._next_pause_ms = max(min(2, self._next_pause_ms), self._next_pause_ms // SHORTER)
        return None

    def resume(self) -> None:
        """Ends the pause after reads without rows, so that `next_read` may order a read again."""
        self._pause_ms = None

    def take(self) -> Taken:
        """Removes and returns the next result. Its rows count as processed from now on."""
        index, event, idle = self._ready.popleft()
        if index == WAITING:
            return Taken(None, None, 0, None)
        self._taken = index
        position = self._positions[index]
        assert not position.at_end and event.next_offset >= position.next_offset
        split = position.split if event.payload is None else replace(position.split, payload=event.payload)
        self._positions[index] = SplitPosition(split, event.next_offset, event.at_end, position.event_times)
        for found in event.found:
            self._add(found)
        self._note_behind(index, event)
        batch = event.batch if event.batch is not None and event.batch.num_rows else None
        if self._splits is not None:
            if batch is not None:
                self._splits.has_rows(index)
            if idle:
                self._splits.has_nothing(index)
            if event.at_end:
                self._splits.has_ended(index)
        return Taken(batch, event.bad, event.lost, event.induces)

    def freeze(self, checkpoint_id: CheckpointId) -> FrozenPositions:
        """Returns the positions of all splits of this subtask, and stores them as belonging to this checkpoint."""
        if self._event_times.newest_ms:
            self._note_event_times()
        frozen = FrozenPositions(tuple(self._positions))
        if self._notified:
            self.frozen[checkpoint_id] = frozen
            if len(self.frozen) > FROZEN_MAX:
                del self.frozen[min(self.frozen)]
        return frozen

    def completed(self, checkpoint_id: CheckpointId) -> tuple[TaskInstruction, ...]:
        """Returns the instruction to notify the source's reader of a completed checkpoint. Empty if no positions were
        stored for the checkpoint.
        """
        frozen = self.frozen.get(checkpoint_id)
        self.frozen = {number: each for number, each in self.frozen.items() if number > checkpoint_id}
        if frozen is None:
            return ()
        return (do.NotifySource(checkpoint_id, tuple(position.split for position in frozen.positions)),)

    def _note_behind(self, index: int, event: SourceBatchRead) -> None:
        if event.at_end:
            self._behind.pop(index, None)
        elif event.behind is not None:
            self._behind[index] = event.behind

    def _note_event_times(self) -> None:
        """Stores event times in the positions.

        If splits are read one after the other, only the position of the last split gets them.
        """
        read: Iterable[int] = range(len(self._positions))
        if self._splits is None:
            read = () if self._taken is None else (self._taken,)
        elif (is_second := self._is_second) is not None:
            read = (index for index in read if is_second(self._positions[index].split))
        for index in read:
            times = self._event_times.event_times(None if self._splits is None else index)
            self._positions[index] = replace(self._positions[index], event_times=times)

    def _check_found(self, index: int, event: SourceBatchRead) -> None:
        finder = self._read_in[index].split_id
        ids = [split.split_id for split in event.found]
        if twice := [split_id for split_id in ids if split_id in self._known or ids.count(split_id) > 1]:
            raise ConfigurationError(
                f"split {finder!r} has found {twice[0]!r}, which this subtask reads already; store the found splits in "
                "the payload of the split, so that each is found once"
            )
        if len(self._known) + len(ids) > SPLITS_MAX:
            raise ConfigurationError(
                f"split {finder!r} has found too many splits: a subtask reads at most {SPLITS_MAX:,}; make "
                "fewer, larger splits"
            )
        self._known.update(ids)

    def _add(self, split: SourceSplit) -> None:
        """Adds a split that was found or assigned, to be read from its first row."""
        index = len(self._positions)
        self._positions.append(SplitPosition(split))
        self._read_in.append(split)
        self._offsets.append(0)
        if self._second_part is not None and self._is_second is not None and self._is_second(split):
            self._waiting.append(index)
            return
        self._open.append(index)
        if self._splits is not None:
            self._splits.joins(index, has_rows=split.rows != 0)

    def _begins_idling(self, index: int, event: SourceBatchRead) -> bool:
        """Returns whether a split without rows becomes idle with this result."""
        if self._splits is None or index in self._idling or index in self._quiet:
            return False
        if not self._read_in[index].rows:
            return False  # It has never held event time back.
        if event.held:
            self._rows_at_ms[index] = event.at_ms
            return False
        quiet_ms = event.at_ms - self._rows_at_ms.setdefault(index, event.at_ms)
        if self._idleness_ms is None:
            if self._awaited is not None and quiet_ms >= QUIET_MS and event.at_ms >= self._quiet_due_ms:
                self._quiet_due_ms = event.at_ms + QUIET_MS // 10
                self._report_quiet(self._awaited, event.at_ms)
            return False
        if quiet_ms < self._idleness_ms:
            return False
        self._idling.add(index)
        return True

    def _report_quiet(self, awaited: WatermarkGenerator, at_ms: int) -> None:
        """Logs the splits that hold back event time because they have had no rows for a long time. Each split is logged
        once.
        """
        # Splits that became quiet together are in one line, although they are read one after the other.
        since_ms = at_ms - QUIET_MS // 2
        quiet = [
            index
            for index in sorted(awaited.holding_splits() - self._quiet)
            if self._rows_at_ms.get(index, at_ms) <= since_ms
        ]
        if not quiet:
            return
        self._quiet.update(quiet)
        names = [self._read_in[index].split_id for index in quiet]
        more = f" and {len(names) - QUIET_NAMED_MAX:,} more" if len(names) > QUIET_NAMED_MAX else ""
        log.warning(
            "no rows for %d s from %s%s, so event time stands still at %s (uid %r), and windows, joins and timers "
            "behind it wait. If that may last, give idleness='1min' where timestamp= is given",
            QUIET_MS // 1000,
            ", ".join(names[:QUIET_NAMED_MAX]),
            more,
            awaited.context.name,
            awaited.context.uid,
        )

    def _missed(self) -> int | None:
        self._misses += 1
        if self._misses < self._asked_in_turn:
            return None
        self._misses = 0
        self._pause_ms = self._next_pause_ms
        self._next_pause_ms = min(2 * self._next_pause_ms, PAUSE_MAX_MS)
        return self._pause_ms


def begin_source(
    d: TaskDescriptor, chain: OperatorChain, restored: Mapping[OperatorUid, Sequence[StateTable]], finished: bool
) -> SourceCursor | None:
    """Returns the cursor of a source task at its restored positions, or None for a task without a source.

    It begins at the start if the checkpoint lacks the source, and at the end if the task had finished. It requests more
    splits if the coordinator assigns them. The splits of an unbounded source are read in turn, and the chain gets the
    split of the rows.
    """
    if d.source is None:
        return None
    positions = () if finished else d.splits
    if d.source.uid in restored and not finished:
        positions = positions_from_tables(restored[d.source.uid])
    told = chain.splits if is_unbounded(d.source.source) else None
    requests = SplitRequests(d.attempt) if d.asks_for_splits and not finished else None
    found = None if finished else chain.aligned_generator
    alignment = None if found is None else SplitAlignment(d.attempt, *found, chain.splits)
    return SourceCursor(
        positions,
        d.source_rows_max,
        in_turn=told,
        idleness_ms=chain.idleness_ms,
        requests=requests,
        event_times=chain.splits,
        alignment=alignment,
        awaited=chain.awaited_generator(any(edge.event_time for edge in d.outputs)),
        notified=isinstance(d.source.source, NotifiedSource) and d.source.source.notified,
        is_second=d.source.source.is_second if isinstance(d.source.source, TwoPartSource) and not finished else None,
    )


def report_ready(d: TaskDescriptor, source: SourceCursor | None, event: TaskRestored) -> do.ReportReady:
    """Returns the report that a task is ready, with the ids of its splits if the coordinator assigns them."""
    splits: tuple[str, ...] | None = ()
    if source is not None and d.asks_for_splits:
        splits = None if event.finished else source.split_ids
    return do.ReportReady(d.attempt, event.origin, splits, 0 if source is None else source.rows_read)


ASK_AGAIN_MS = 1_000
"""Time in ms after which a request for splits without an answer is repeated."""


class SplitRequests:
    """Requests splits from the coordinator, one request at a time.

    Rules:

    - It sends a request when the last row of its last split was read, so that a fast task gets more splits than a slow
      one.
    - A request and its answer have a number: how many splits were assigned to the task in its attempt before. An answer
      counts once, however often it arrives.
    - Requests and answers may get lost, also with their coordinator. So a request is repeated until it is answered.
    - An answer without splits means that there are no more. Only then the source ends for this task.
    """

    def __init__(self, attempt: AttemptNumber) -> None:
        self._attempt = attempt
        self._given = 0
        self._asked = False
        self.over = False
        """True once the coordinator has answered that there are no more splits."""

    def ask(self, at_ms: int) -> tuple[do.TaskInstruction, ...]:
        """Returns the request for more splits and its timer, or nothing if a request is pending or there are no
        more splits.
        """
        if self.over or self._asked:
            return ()
        self._asked = True
        again = do.SetTaskTimer(TaskTimer.SPLITS, at_ms + ASK_AGAIN_MS)
        return do.RequestSplits(self._attempt, self._given), again

    def ask_again(self) -> None:
        """Allows the request to be repeated, because it or its answer may be lost."""
        self._asked = False

    def answered(self, event: SplitsAssigned) -> Sequence[SourceSplit]:
        """Returns the splits of an answer that are new to the task. Raises ProtocolError if splits before them
        are missing.
        """
        if event.first > self._given:
            raise ProtocolError(
                f"splits from number {event.first} on were assigned to a task with {self._given} splits: some are "
                "missing; this is a bug in tidegate, please report it"
            )
        if event.first < self._given:
            return ()
        self._asked = False
        self._given += len(event.splits)
        self.over = not event.splits
        return event.splits


class SplitAlignment:
    """Keeps splits of a source task from getting too far ahead of their alignment group in event time.

    `SourceCursor` checks it before each read. The coordinator announces the watermark of the slowest split of the group
    (`tidegate/actors/coordinator/source_coordinator.py`). Rules (Flink's, for watermark alignment):

    - A split is not read while its watermark is more than `max_drift` ahead of the lowest one of the group. The slowest
      split is always read, so the group advances.
    - Only reading stops: rows that were read before are processed, and barriers, savepoints and the end of the job pass
      as usual.
    - Splits that are idle, or at their end, do not count. A split that is too far ahead is not idle.
    - At the start the other watermarks are unknown. A split that has a watermark by then waits for the first answer.
    - The task reports its own lowest watermark regularly, and at once when it has nothing to read. Rows that were read
      ahead advance it afterwards: that is reported at once as well, or other tasks would wait for an old watermark.
    - A task that has reached its end reports that at once, so that other tasks need not wait for its next report.
    - A lost message, or a lost coordinator, delays a split and never stops it, because reports are repeated.
    - None of this is in a checkpoint. It decides when rows are read, and not which.
    """

    def __init__(
        self,
        attempt: AttemptNumber,
        alignment: WatermarkAlignment,
        generator: WatermarkGenerator,
        splits: SourceSplits,
    ) -> None:
        self._attempt = attempt
        self._alignment = alignment
        self._generator = generator
        self._splits = splits
        self.group_ms: int | None = None
        """The lowest watermark of the group, in ms, that the coordinator announced last, or None."""
        self._due = True
        """True if a report of the watermark is due."""
        self._waits_at: tuple[int | None] | None = None
        """The reported watermark while the task has nothing to read because of the alignment. None if it has
        something to read.
        """
        self._ended = False
        """True once the task has reported the end of its splits, so that other tasks no longer wait for it."""

    @property
    def lowest_ms(self) -> int | None:
        """Returns the watermark, in ms since 1970, of the slowest split that is not idle.

        MIN_WATERMARK_MS if a split has no watermark yet. None if all splits are idle or the task waits for the second
        part of its source.
        """
        if self._splits.waits:
            return None
        if not self._splits.in_turn or self._splits.in_first_part:
            return self._generator.split_watermark_ms(None)
        if self._splits.active:
            return min(self._generator.split_watermark_ms(split) for split in self._splits.active)
        return None if self._splits.idle else MAX_WATERMARK_MS

    @property
    def drift_ms(self) -> int | None:
        """Returns how far the task is ahead of the slowest member of its group, in ms. None if that is unknown."""
        known = (MIN_WATERMARK_MS, MAX_WATERMARK_MS, None)
        lowest_ms = self.lowest_ms
        if lowest_ms is None or self.group_ms is None or {lowest_ms, self.group_ms} & set(known):
            return None
        return max(0, lowest_ms - self.group_ms)

    def holds(self, split: int | None) -> bool:
        """Returns whether a split is too far ahead in event time to be read now. `split` is None if the splits are read
        one after the other.
        """
        ahead_ms = self._generator.split_watermark_ms(split)
        if self.group_ms is None:
            return ahead_ms > MIN_WATERMARK_MS
        return ahead_ms > self.group_ms + self._alignment.max_drift_ms

    def announced(self, group_ms: int) -> None:
        """Stores the lowest watermark of the group, in ms, which the coordinator announced."""
        self.group_ms = group_ms

    def timer_due(self) -> None:
        """Records that the interval between two reports is over."""
        self._due = True

    def steps(self, at_ms: int, waits: bool, at_end: bool) -> tuple[do.TaskInstruction, ...]:
        """Returns the report of the watermark to send now, and its timer, or nothing.

        `waits`: all open splits are too far ahead. `at_end`: all splits were read.
        """
        if at_end:
            ended = self._ended
            self._ended = True
            return () if ended else (do.ReportWatermark(self._attempt, None, False),)
        told = self._waits_at
        self._waits_at = (self.lowest_ms,) if waits else None
        if not self._due:
            return (self._report(waits),) if waits and self._waits_at != told else ()
        self._due = False
        again = do.SetTaskTimer(TaskTimer.WATERMARKS, at_ms + self._alignment.update_interval_ms)
        return self._report(waits), again

    def _report(self, waits: bool) -> do.ReportWatermark:
        return do.ReportWatermark(self._attempt, self.lowest_ms, waits)
