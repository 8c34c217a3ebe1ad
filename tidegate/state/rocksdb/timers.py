"""`RocksTimers`: timers on disk, with the first ones of each clock in memory.

Within a key group, the database keeps timers in the order in which they fire. Rules:
- Registered and deleted timers are written at once, one call per batch.
- The head of a clock is in memory: the first timers of all key groups together, up to a bound. Timers after its end are
  only in the database. Flink's `RocksDBCachingPriorityQueueSet` has such a cache for each key group.
- When the head is used up, it is read again: a few timers of each key group that may have any. Each read begins where
  the first timer of the group was last seen, and so skips the deleted timers before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import pyarrow as pa
import rocksdict

from tidegate.state.common.backend import DueTimers
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_rows import RocksChanges
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.keys import MOMENT, TimerKeys, end_of_moment, moment_bytes, moment_of
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksForm, RocksState
from tidegate.storage.state.stored_rows import (
    DOMAINS,
    TIMER_COLUMNS,
    TIMER_DOMAIN,
    TIMER_MOMENT,
    TIMERS_STATE,
    domain_numbers,
)

HEAD_TIMERS = 8192
"""Approximate number of timers of one clock in memory; there are never more than twice as many."""
READ_MIN = 16
"""The least number of timers of one key group that are read at a time."""


class RocksTimers:
    """The `KeyedTimers` of the RocksDB backend."""

    def __init__(self, session: RocksSession) -> None:
        self._session = session
        self._state = session.known(TIMERS_STATE)
        self.changes: RocksChanges | None = None
        """The changed timers, if a changelog needs them."""
        self._keys: TimerKeys | None = None
        self._heads: tuple[_Head, ...] = ()
        if self._state is not None:
            self._begin(self._state, of_files=True)

    @property
    def state(self) -> RocksState:
        """Returns the state that stores the timers. Declares it on first use."""
        if self._state is None:
            self._state = self._session.declare(TIMERS_STATE, RocksForm.TIMERS, TIMER_COLUMNS)
            self._begin(self._state, of_files=False)
        return self._state

    def count(self, limit: int) -> int:
        """Returns the number of timers, but at most `limit`. Raises StorageError."""
        return sum(1 for _, _ in zip(self._all(), range(limit), strict=False))

    def change(
        self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int], registered: Sequence[bool]
    ) -> None:
        """Registers or deletes timers. If a timer is changed several times, the last change is applied. Raises
        StorageError.
        """
        last = dict(zip(self._timers(keys, domains, moments), registered, strict=True))
        put = [timer for timer, is_there in last.items() if is_there]
        removed = [timer for timer, is_there in last.items() if not is_there]
        self.put(put)
        self.remove(removed)
        if self.changes is not None:
            self.changes.put(put)
            self.changes.removed(removed)

    def first_ms(self, domain: int) -> int | None:
        """Returns the time, in ms, of the first timer in a time domain, or None if the domain has no timers. Raises
        StorageError.
        """
        if not self._heads:
            return None
        first = self._heads[domain].first()
        return None if first is None else moment_of(first, 0)[1]

    def due(self, domain: int, time_ms: int, timers_max: int) -> DueTimers:
        """Returns the first timers of a time domain up to `time_ms`. Raises StorageError."""
        timers: list[bytes] = []
        more = False
        if self._heads and self._heads[domain].first() is not None:
            timers, more = self._heads[domain].until(end_of_moment(domain, time_ms), timers_max)
        moments = [moment_of(timer, 0)[1] for timer in timers]
        return DueTimers(moments, self._key_form().decode(timers, MOMENT.size), more)

    def database_keys(self, rows: pa.RecordBatch) -> list[bytes]:
        """Returns the database keys of stored timers. Raises CorruptionError for an unknown time domain."""
        keys = rows.select(self._session.key_schema.names)
        domains = domain_numbers(rows.column(TIMER_DOMAIN))
        return self._timers(keys, domains.tolist(), rows.column(TIMER_MOMENT).to_pylist())

    def put(self, timers: Sequence[bytes]) -> None:
        """Writes these timers, given by their database keys. Raises StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for timer in timers:
            batch.put(timer, b"")
        self._session.write(batch)
        for timer in timers:
            self._heads[timer[HEAD.size]].add(timer)

    def remove(self, timers: Sequence[bytes]) -> None:
        """Deletes these timers, given by their database keys, if they exist. Raises StorageError."""
        self._session.remove(timers)
        for timer in timers:
            self._heads[timer[HEAD.size]].discard(timer)

    def has(self, timer: bytes) -> bool:
        """Returns whether this timer is stored, given by its database key. Raises StorageError."""
        return self._session.has(timer)

    def _begin(self, state: RocksState, of_files: bool) -> None:
        self.changes = RocksChanges(self._session, state) if self._session.keeps_changes else None
        self._heads = tuple(_Head(self._session, state.number, domain, of_files) for domain in range(len(DOMAINS)))

    def _key_form(self) -> TimerKeys:
        if self._keys is None:
            self._keys = TimerKeys(self._session.key_schema)
        return self._keys

    def _timers(self, keys: pa.RecordBatch, domains: Sequence[int], moments: Sequence[int]) -> list[bytes]:
        """Returns the database keys of timers, given by their keys, time domains and times in ms."""
        number, form = self.state.number, self._key_form()
        hashes = hash_columns(keys, keys.schema.names)
        groups = key_groups_of(hashes, self._session.max_parallelism).tolist()
        timers = zip(groups, domains, moments, form.encode(keys), strict=True)
        return [HEAD.pack(group, number) + moment_bytes(domain, ms) + key for group, domain, ms, key in timers]

    def _all(self) -> Iterator[bytes]:
        if self._state is None:
            return
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            for group in self._session.key_groups:
                prefix = HEAD.pack(group, self._state.number)
                cursor.seek(prefix)
                while cursor.valid() and (key := cursor.key()).startswith(prefix):
                    yield key
                    cursor.next()
            cursor.status()


class _Head:
    """The first timers of one time domain, cached in memory. A timer is identified by its database key without
    `HEAD`.
    """

    def __init__(self, session: RocksSession, number: int, domain: int, of_files: bool) -> None:
        self._session = session
        self._number = number
        self._domain = domain
        self._heap: list[bytes] = []
        """The timers that are in memory, and some that were deleted."""
        self._there: dict[bytes, int] = {}
        """The timers that are in memory, with their key groups."""
        self._end: bytes | None = None
        """An upper bound: no timer in memory comes after it. None if all timers are in memory."""
        begin = bytes((domain,))
        self._bounds: dict[int, bytes] = dict.fromkeys(session.key_groups, begin) if of_files else {}
        """By key group, a lower bound of its timers in the database. A group without one has no timers."""
        if of_files:
            self._end = b""

    def add(self, timer: bytes) -> None:
        """Adds a timer that was written to the cache, if it is among the first timers."""
        group, _ = HEAD.unpack_from(timer)
        added = timer[HEAD.size :]
        if added < self._bounds.get(group, b"\xff"):
            self._bounds[group] = added
        if (self._end is None or added <= self._end) and added not in self._there:
            self._there[added] = group
            heapq.heappush(self._heap, added)
            if len(self._there) > 2 * HEAD_TIMERS:
                self._keep(sorted(self._there)[:HEAD_TIMERS])

    def discard(self, timer: bytes) -> None:
        """Removes a timer that was deleted from the cache."""
        self._there.pop(timer[HEAD.size :], None)
        if len(self._heap) > 2 * len(self._there) + HEAD_TIMERS:
            self._heap = sorted(self._there)

    def first(self) -> bytes | None:
        """Returns the first timer of the time domain, or None if there is none. Raises StorageError."""
        if not self._skip_gone() and self._end is not None:
            self._read()
            self._skip_gone()
        return self._heap[0] if self._heap else None

    def until(self, end: bytes, timers_max: int) -> tuple[list[bytes], bool]:
        """Returns the first timers before `end` that are cached, at most `timers_max`, and whether there may be
        more.
        """
        found: list[bytes] = []
        while len(found) < timers_max and self._skip_gone() and self._heap[0] < end:
            first = heapq.heappop(self._heap)
            if not found or first != found[-1]:  # a timer that was deleted and registered again is in the heap twice
                found.append(first)
        for timer in found:
            heapq.heappush(self._heap, timer)
        behind = self._end is not None and self._end < end
        return found, behind or len(found) == timers_max

    def _skip_gone(self) -> bool:
        """Removes timers that were deleted from the top of the heap. Returns False if the heap is empty afterwards."""
        while self._heap and self._heap[0] not in self._there:
            heapq.heappop(self._heap)
        return bool(self._heap)

    def _keep(self, first: list[bytes]) -> None:
        """Reduces the cache to these first timers."""
        self._there = {timer: self._there[timer] for timer in first}
        self._heap, self._end = first, first[-1]

    def _read(self) -> None:
        """Fills the cache: reads some timers of each key group.

        Timers after the earliest point up to which a group was read are not cached.
        """
        end: bytes | None = None
        there: dict[bytes, int] = {}
        count = max(READ_MIN, HEAD_TIMERS // max(1, len(self._bounds)))
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            for bound, group in sorted((bound, group) for group, bound in self._bounds.items()):
                if end is not None and bound > end:
                    break
                found = self._of_group(cursor, group, bound, count)
                if not found:
                    del self._bounds[group]
                    continue
                self._bounds[group] = found[0]
                there |= dict.fromkeys(found, group)
                if len(found) == count and (end is None or found[-1] < end):
                    end = found[-1]
        first = sorted(timer for timer in there if end is None or timer <= end)
        self._there = {timer: there[timer] for timer in first}
        self._heap, self._end = first, end
        if len(first) > 2 * HEAD_TIMERS:
            self._keep(first[:HEAD_TIMERS])

    def _of_group(self, cursor: rocksdict.RdictIter, group: int, bound: bytes, count: int) -> list[bytes]:
        """Returns the first `count` timers of a key group, from the database key `bound` on."""
        prefix = HEAD.pack(group, self._number)
        clock = prefix + bytes((self._domain,))
        found: list[bytes] = []
        cursor.seek(prefix + bound)
        while len(found) < count and cursor.valid() and (key := cursor.key()).startswith(clock):
            found.append(key[len(prefix) :])
            cursor.next()
        cursor.status()
        return found
