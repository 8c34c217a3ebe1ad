"""`Timers` of one operator: moments of event time and of processing time at which a key wants to be called.

Rules (Flink's): a timer is registered once for each key, moment and time domain, however often it is asked for. What
is due fires in order of the moment, then of the key, so that every run fires alike. A timer that is registered while
others fire, and is due, fires among them. Timers are keyed state: one table, with a row a timer.
"""

from __future__ import annotations

import enum
import heapq
import operator
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.actors.operators.state.key_scope import KeyScope
from tidegate.actors.operators.state.keys import Key, KeyCodec, keyed_chunk, sort_key
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.actors.state_backends.common.key_order import sortable_keys
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.state.snapshot import StateChunk, StateTable

TIMERS_STATE = "timers"
"""Name of the table of timers, which lies beside those of the states."""

_DOMAIN, _TIMESTAMP = "timer.domain", "timer.timestamp_ms"
_COLUMNS = pa.schema([(_DOMAIN, pa.string()), (_TIMESTAMP, pa.int64())])
_STALE_MAX = 1024


class TimeDomain(enum.Enum):
    """What a timer waits for: a watermark, or the clock."""

    EVENT_TIME = "event_time"
    PROCESSING_TIME = "processing_time"


@dataclass(frozen=True, slots=True)
class FrozenTimers:
    """A `FrozenState`: the timers as they were."""

    codec: KeyCodec
    timers: dict[TimeDomain, tuple[tuple[int, Key], ...]]
    max_parallelism: int
    in_order: bool = False
    """Whether rows of one key group come by key, domain and moment, and not as they were registered."""
    state: str = TIMERS_STATE
    kind: StateKind = StateKind.KEYED
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """A row a timer, sorted by key group. O(timers); where they come in order, O(timers * log(timers))."""
        rows = [(domain.value, *timer) for domain, timers in self.timers.items() for timer in timers]
        columns = [pa.array([row[position] for row in rows], _COLUMNS.field(position).type) for position in (0, 1)]
        values = pa.RecordBatch.from_arrays(columns, schema=_COLUMNS)
        chunk = keyed_chunk(self.codec, [row[2] for row in rows], values, self.max_parallelism)
        yield self._sorted(chunk) if self.in_order else chunk

    def _sorted(self, chunk: StateChunk) -> StateChunk:
        rows = chunk.rows
        counts = np.diff(np.asarray(chunk.group_rows))
        groups = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
        columns = [sortable_keys(rows.select(self.codec.schema.names), groups), *map(rows.column, _COLUMNS.names)]
        by = pa.table(columns, names=["0", "1", "2"])
        order = pc.sort_indices(by, sort_keys=[(name, "ascending") for name in by.column_names])
        return replace(chunk, rows=rows.take(order))


class TimerQueue:
    """The timers of one time domain."""

    def __init__(self) -> None:
        self._timers: dict[tuple[int, Key], None] = {}
        self._heap: list[tuple[int, tuple[Any, ...], Key]] = []
        """Every timer that is not staged, and some that were deleted since: those are passed over."""
        self._staged: deque[tuple[int, tuple[Any, ...], Key]] = deque()
        """Timers that were taken from the heap, in order, to fire next."""

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, timestamp_ms: int, key: Key) -> None:
        """Register; again is the same as once."""
        if (timestamp_ms, key) not in self._timers:
            self._timers[timestamp_ms, key] = None
            heapq.heappush(self._heap, (timestamp_ms, sort_key(key), key))

    def discard(self, timestamp_ms: int, key: Key) -> None:
        """Delete, if it is registered."""
        self._timers.pop((timestamp_ms, key), None)
        if len(self._heap) > 2 * len(self._timers) + _STALE_MAX:
            self._heap = [(ms, sort_key(of), of) for ms, of in self._timers]
            heapq.heapify(self._heap)
            self._staged.clear()

    def clear(self) -> None:
        """Delete all."""
        self._timers.clear()
        self._heap.clear()
        self._staged.clear()

    def first_ms(self) -> int | None:
        """The moment of the timer that fires next."""
        first = self._first()
        return None if first is None else first[0]

    def is_due(self, time_ms: int) -> bool:
        """Whether the moment of a timer has come."""
        first_ms = self.first_ms()
        return first_ms is not None and first_ms <= time_ms

    def stage(self, time_ms: int, timers_max: int) -> list[Key]:
        """The keys of the timers that fire next, so many at most; they stay registered."""
        for entry in self._staged:
            heapq.heappush(self._heap, entry)
        self._staged.clear()
        while len(self._staged) < timers_max and self._live(self._heap) and self._heap[0][0] <= time_ms:
            self._staged.append(heapq.heappop(self._heap))
        return [key for _, _, key in self._staged]

    def pop_due(self, time_ms: int, keys: Container[Key]) -> tuple[int, Key] | None:
        """Remove the timer that fires next, if its moment has come and it is one of these keys; its moment and key."""
        first = self._first()
        if first is None or first[0] > time_ms or first[2] not in keys:
            return None
        if self._staged and self._staged[0] is first:
            self._staged.popleft()
        else:
            heapq.heappop(self._heap)
        timestamp_ms, _, key = first
        del self._timers[timestamp_ms, key]
        return timestamp_ms, key

    def freeze(self) -> tuple[tuple[int, Key], ...]:
        """All timers as they are now, in the order of registration."""
        return tuple(self._timers)

    def _first(self) -> tuple[int, tuple[Any, ...], Key] | None:
        """The timer that fires next."""
        while self._staged and (self._staged[0][0], self._staged[0][2]) not in self._timers:
            self._staged.popleft()
        if not self._live(self._heap):
            return self._staged[0] if self._staged else None
        return min(self._staged[0], self._heap[0]) if self._staged else self._heap[0]

    def _live(self, heap: list[tuple[int, tuple[Any, ...], Key]]) -> bool:
        """Whether there are timers left in the heap, once deleted ones are gone from its top."""
        while heap and (heap[0][0], heap[0][2]) not in self._timers:
            heapq.heappop(heap)
        return bool(heap)


class Timers:
    """The timers of one operator, in both time domains."""

    def __init__(self) -> None:
        self.queues = {domain: TimerQueue() for domain in TimeDomain}

    def load(self, codec: KeyCodec, table: StateTable) -> None:
        """Take a stored table back. CorruptionError if it holds no timers of these keys, or one twice."""
        expected = pa.schema([*codec.schema, *_COLUMNS])
        if not table.rows.schema.equals(expected):
            raise CorruptionError(f"stored timers have columns {table.rows.schema.names}, not {expected.names}")
        keys = codec.encode(table.rows.select(codec.schema.names))
        domains, moments = (table.rows.column(name).to_pylist() for name in _COLUMNS.names)
        for key, domain, timestamp_ms in zip(keys, domains, moments, strict=True):
            queue = self.queues[TimeDomain(domain)]
            before = len(queue)
            queue.add(timestamp_ms, key)
            if len(queue) == before:
                raise CorruptionError(f"the timer at {timestamp_ms} of the key {codec.as_row(key)} is stored twice")

    def freeze(self, codec: KeyCodec, max_parallelism: int, in_order: bool = False) -> FrozenTimers | None:
        """The timers as they are now. None where there are none. Costs one copy of references."""
        if not any(map(len, self.queues.values())):
            return None
        timers = {domain: queue.freeze() for domain, queue in self.queues.items()}
        return FrozenTimers(codec, timers, max_parallelism, in_order)


class TimerService:
    """Registers timers of the current key. Moments are milliseconds since 1970."""

    def __init__(self, timers: Timers, scope: KeyScope, now_ms: Callable[[], int], watermark_ms: Callable[[], int]):
        self._queues = timers.queues
        self._scope = scope
        self._now_ms = now_ms
        self._watermark_ms = watermark_ms

    def current_processing_time(self) -> int:
        """Processing time of the row or timer that is being processed: when the task took it up."""
        return self._now_ms()

    def current_watermark(self) -> int:
        """The newest watermark; `MIN_WATERMARK_MS` before the first one, also after a restore."""
        return self._watermark_ms()

    def register_event_time_timer(self, timestamp_ms: int) -> None:
        """Call `on_timer` for this key when the watermark gets to the moment; if it is past it, with the next one."""
        self._register(TimeDomain.EVENT_TIME, timestamp_ms)

    def register_processing_time_timer(self, timestamp_ms: int) -> None:
        """Call `on_timer` for this key when the clock has got to the moment; dropped if the input ends before."""
        self._register(TimeDomain.PROCESSING_TIME, timestamp_ms)

    def delete_event_time_timer(self, timestamp_ms: int) -> None:
        """Delete a timer of this key, if it is registered."""
        self._queues[TimeDomain.EVENT_TIME].discard(timestamp_ms, self._scope.current("a timer"))

    def delete_processing_time_timer(self, timestamp_ms: int) -> None:
        """Delete a timer of this key, if it is registered."""
        self._queues[TimeDomain.PROCESSING_TIME].discard(timestamp_ms, self._scope.current("a timer"))

    def _register(self, domain: TimeDomain, timestamp_ms: int) -> None:
        try:
            moment_ms = operator.index(timestamp_ms)
        except TypeError:
            raise ConfigurationError(
                f"a timer is registered for a moment in whole milliseconds since 1970, not {timestamp_ms!r}"
            ) from None
        # Beyond what int64 holds is never, or always: the end of time, or its beginning.
        moment_ms = max(MIN_WATERMARK_MS, min(MAX_WATERMARK_MS, moment_ms))
        self._queues[domain].add(moment_ms, self._scope.current("a timer"))
