"""`EventLog`: the event log of a job, one file per entry. The coordinator that creates entry k decides what happens.

Rules:

- Entries are created with a conditional create and never changed. This fences coordinators: of two that both try to
  write entry k, one gets FencedError.
- A create whose answer was lost may be repeated: finding the very same entry proves that the first create worked.
- A coordinator may be suspended while other coordinators write, snapshot and truncate the log. When it continues, it
  must not mistake the hole that truncation has left for the end of the log:
  - The two newest entries are never truncated. A writer that does not find the entry before its own is fenced.
  - Takeover entries (the first entry of each coordinator) are never truncated; the writer names them in `keep`. One of
    these is the first entry that a suspended coordinator has missed, so it cannot create that entry itself.
  - A writer therefore checks after its first entry, and after an entry that it creates again because an answer was
    lost. For all other entries the create alone decides (`look` False).
- Entries are contiguous. A hole, or damage, is an error, never the end.
- Entries that are cut from a log may be kept in segments (`EventSegments`), which are no longer part of it.
- A listing may lack entries that exist while entries are created. An entry that a listing lacks is looked up by its own
  name before it counts as missing.

Rules of segments, which are stored as `<root>/<job>/events/kept/000000000000-000000000999`:

- A segment is whole before its entries are deleted. After a crash between the two they are in both, and equal.
- A segment has the bytes of its entries unchanged, so an entry that cannot be read spoils no other.
- No coordinator needs a segment. Segments are for people who look into the history of a job.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import (
    AlreadyExistsError,
    CodecError,
    CorruptionError,
    FencedError,
    LogDeletedError,
    NotFoundError,
)
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.ids import Generation, JobId

LOG_VERSION = 1
RACES_MAX = 32
_ENTRY_MAGIC = b"TGEVENT"
_SNAPSHOT_MAGIC = b"TGEVSNAP"
_SNAPSHOT_PREFIX = "snapshot-"
_DIGITS = 12

_logger = logging.getLogger(__name__)


@wire
@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of the event log: the events of one decision of one coordinator generation, at one index.

    `nonce` identifies the write, so that a writer can distinguish its own repeated create from an equal decision of
    another writer. `first_event` is the number of the first event; the next events have the next numbers. `causes` has
    for each event the number of the event that caused it, or None.
    """

    index: int
    generation: Generation
    at_ms: int
    nonce: str
    events: tuple[Any, ...]
    first_event: int
    causes: tuple[int | None, ...]


class EventLog:
    """The event log of one job in its checkpoint storage. The object has no state, and is as thread-safe as its
    store.
    """

    def __init__(self, store: Store, job_id: JobId) -> None:
        self._store = store
        self._folder = CheckpointLayout(job_id).events_dir()
        self.segments = EventSegments(store, self._folder, _DIGITS)
        """The entries that were truncated from the log and stored in segments."""

    def append(self, entry: LogEntry, *, look: bool = True) -> int:
        """Writes the entry durably at the end of the log, and returns its size in bytes. Repeating the call is safe.

        `look` is whether to check that the previous entry exists. The module's docstring explains when that can be
        skipped.

        Raises FencedError if another entry has this index or the log has continued beyond it, LogDeletedError if the
        log was deleted, and CodecError for events that are not wire values. Raises StorageError if it is unknown
        whether the entry was written: repeat the call then.
        """
        path = self._entry_path(entry.index)
        data = seal(_ENTRY_MAGIC, LOG_VERSION, encode(entry))
        try:
            self._store.create(path, data)
            created = True
        except AlreadyExistsError:
            created = False
            if self._store.read(path) != data:
                found = self.read(entry.index)
                raise FencedError(
                    f"entry {entry.index} of {self._where()} was written by coordinator generation "
                    f"{found.generation}, not by generation {entry.generation}: it has taken over, so this "
                    "coordinator has to stop"
                ) from None
        if look and not self._continues(entry.index):
            if created:
                # This file is not needed: a snapshot contains all up to this index, or the log was deleted.
                self._store.delete(path)
            if not any(index > entry.index for index in self.indices()):
                raise LogDeletedError(
                    f"the entries before {entry.index} of {self._where()} are gone, and no coordinator has continued "
                    "the log. Was the folder deleted while the job was running? Start the job again from a savepoint"
                )
            raise FencedError(
                f"entry {entry.index} of {self._where()} has no predecessor: another coordinator has continued the "
                "log and truncated it, so this coordinator has to stop"
            )
        return len(data)

    def read(self, index: int) -> LogEntry:
        """Returns the log entry at an index.

        Raises NotFoundError, CorruptionError, or CodecError for events of unknown types.
        """
        return self.decoded(index, self._store.read(self._entry_path(index)))

    def decoded(self, index: int, data: Buffer) -> LogEntry:
        """Returns the log entry that the bytes of its file encode. Raises CorruptionError or CodecError."""
        where = join_url(self._store.url, self._entry_path(index))
        entry = decode(unseal(_ENTRY_MAGIC, LOG_VERSION, data, where))
        if not isinstance(entry, LogEntry) or entry.index != index:
            raise CorruptionError(
                f"{where} does not hold entry {index} of the log"
                "; restore this file from a copy, or start the job again from a checkpoint under another name"
            )
        return entry

    def indices(self) -> list[int]:
        """Returns the indices of all log entries in the folder, ascending. Lists the folder."""
        found = (_parse_index(name) for name in self._store.list(self._folder))
        return sorted(index for index in found if index is not None)

    def oldest(self) -> int:
        """Returns the smallest index from which the log has no hole.

        Takeover entries with smaller indices, which truncation does not delete, may exist.
        """
        known = set(self.indices())
        oldest = max(known, default=0)
        while oldest - 1 in known or (oldest > 0 and self._has(oldest - 1)):
            oldest -= 1
        return oldest

    def history(self) -> list[LogEntry]:
        """Returns all log entries from the oldest on. Entries that were copied to segments come first, as far as there
        is no hole between them and the log.

        Safe while the log is truncated: the read starts again if truncation deletes entries meanwhile.
        """
        for races in itertools.count(1):
            oldest = self.oldest()
            try:
                newest = list(self.entries(oldest))
            except CorruptionError:
                if races == RACES_MAX or self.oldest() <= oldest:
                    raise
            else:
                return [*self._kept_before(oldest), *newest]
        raise AssertionError(
            "the loop over reads of the event log must return or raise; this is a bug in tidegate, please report it"
        )

    def _kept_before(self, oldest: int) -> list[LogEntry]:
        kept = {index: data for span in self.segments.spans() for index, data in self.segments.read(span).items()}
        found: list[LogEntry] = []
        # Entries of takeovers stay where they are.
        while (index := oldest - 1 - len(found)) in kept or (kept and index >= 0 and self._has(index)):
            found.append(self.decoded(index, kept[index]) if index in kept else self.read(index))
        return found[::-1]

    def entries(self, from_index: int) -> Iterator[LogEntry]:
        """Yields all log entries from `from_index` on, in order.

        Raises CorruptionError for a damaged or missing entry.
        """
        assert from_index >= 0
        known = [index for index in self.indices() if index >= from_index]
        end = known[-1] + 1 if known else from_index
        index = from_index
        while True:
            try:
                entry = self.read(index)
            except NotFoundError as error:
                if index < end:
                    raise CorruptionError(
                        f"{self._where()} has a hole: entry {index} is missing, entry {end - 1} is there"
                        "; restore this file from a copy, or start the job again from a checkpoint under another name"
                    ) from error
                return
            yield entry
            index += 1

    def write_snapshot(self, index: int, state: object) -> None:
        """Stores the coordinator's state (a wire value) as it was before entry `index`.

        Writing an equal state again is safe.
        """
        data = seal(_SNAPSHOT_MAGIC, LOG_VERSION, encode(state))
        self._store.write(self._snapshot_path(index), (data,))

    def latest_snapshot(self) -> tuple[int, Any] | None:
        """Returns the index and the state of the newest undamaged snapshot of the coordinator, or None if there is
        none.

        Damaged snapshots are skipped and logged.
        """
        for index in reversed(self._snapshot_indices()):
            try:
                return index, self._read_snapshot(index)
            except (CorruptionError, NotFoundError) as error:
                _logger.warning("Snapshot %d of %s is skipped: %s", index, self._where(), error)
        return None

    def oldest_snapshot(self, from_index: int) -> tuple[int, Any] | None:
        """Returns the index and the state of the oldest undamaged snapshot at or after `from_index`, or None if there
        is none.
        """
        for index in self._snapshot_indices():
            try:
                if index >= from_index:
                    return index, self._read_snapshot(index)
            except (CorruptionError, NotFoundError) as error:
                _logger.warning("Snapshot %d of %s is skipped: %s", index, self._where(), error)
        return None

    def truncate(self, before_index: int, keep: Set[int] = frozenset(), *, segments: bool = False) -> None:
        """Deletes entries and snapshots that are not needed to replay the log from `before_index`, except the entries
        in `keep`.

        With `segments`, the deleted entries are first copied into segments (`EventSegments`).

        The newest undamaged snapshot is kept, and every entry from the one before it on. Without a snapshot nothing is
        deleted. Files that a crash leaves behind are deleted by the next call.
        """
        latest = self.latest_snapshot()
        if latest is None:
            return
        snapshot_index = latest[0]
        keep_from = min(before_index, snapshot_index) - 1
        entries = [index for index in self.indices() if index < keep_from and index not in keep]
        folds = [index for index in self._snapshot_indices() if index < min(before_index, snapshot_index)]
        for some in _batched(entries, SEGMENT_ENTRIES) if segments else (entries,):
            if segments and (still := self._still_there(some)):
                self.segments.write(still)
            self._store.delete_all(map(self._entry_path, some))
        self._store.delete_all(map(self._snapshot_path, folds))

    def _still_there(self, indices: Iterable[int]) -> dict[int, bytes]:
        """Returns the bytes of the entry files that still exist, by index.

        Another coordinator may truncate the log at the same time, and copy the deleted entries to segments itself.
        """
        found = {}
        for index in indices:
            try:
                found[index] = self._store.read(self._entry_path(index))
            except NotFoundError:
                continue
        return found

    def _continues(self, index: int) -> bool:
        """Returns whether the existing entry `index` belongs to the log, and not to a part that was truncated."""
        known = self.indices()
        # Truncation need not delete in order everywhere: a predecessor alone proves nothing.
        if (known and known[-1] > index) or (index == 0 and self._snapshot_indices()):
            return False
        return all(needed in known or self._has(needed) for needed in range(max(0, index - 1), index + 1))

    def _has(self, index: int) -> bool:
        return self._store.exists(self._entry_path(index))

    def _read_snapshot(self, index: int) -> Any:
        path = self._snapshot_path(index)
        where = join_url(self._store.url, path)
        payload = unseal(_SNAPSHOT_MAGIC, LOG_VERSION, self._store.read(path), where)
        try:
            return decode(payload)
        except CodecError as error:
            raise CodecError(f"{where} cannot be read: {error}") from error

    def _snapshot_indices(self) -> list[int]:
        names = self._store.list(self._folder)
        found = (_parse_index(n.removeprefix(_SNAPSHOT_PREFIX)) for n in names if n.startswith(_SNAPSHOT_PREFIX))
        return sorted(index for index in found if index is not None)

    def _entry_path(self, index: int) -> str:
        return f"{self._folder}/{index:0{_DIGITS}d}"

    def _snapshot_path(self, index: int) -> str:
        return f"{self._folder}/{_SNAPSHOT_PREFIX}{index:0{_DIGITS}d}"

    def _where(self) -> str:
        return join_url(self._store.url, self._folder)


def _batched(indices: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    return (indices[begin : begin + count] for begin in range(0, len(indices), count))


def _parse_index(name: str) -> int | None:
    return int(name) if len(name) >= _DIGITS and name.isascii() and name.isdigit() else None


SEGMENT_ENTRIES = 1_000
_SEGMENT_VERSION = 1
_SEGMENT_MAGIC = b"TGEVKEPT"
_SEGMENTS_FOLDER = "kept"


@wire
@dataclass(frozen=True, slots=True)
class EventSegment:
    """The file format of a segment: the stored bytes of several log entries, by their indices."""

    indices: tuple[int, ...]
    entries: tuple[bytes, ...]


class EventSegments:
    """Reads and writes the segments of one log.

    `events` is the log's folder, `digits` the width of an index in a file name.
    """

    def __init__(self, store: Store, events: str, digits: int) -> None:
        self._store = store
        self._folder = f"{events}/{_SEGMENTS_FOLDER}"
        self._digits = digits

    def write(self, entries: Mapping[int, bytes]) -> None:
        """Stores log entries (file bytes by index) as one segment.

        Writing the same entries again is safe. Raises StorageError.
        """
        indices = tuple(sorted(entries))
        segment = EventSegment(indices, tuple(entries[index] for index in indices))
        span = range(indices[0], indices[-1] + 1)
        self._store.write(self._path(span), [seal(_SEGMENT_MAGIC, _SEGMENT_VERSION, encode(segment))])

    def spans(self, from_index: int = 0) -> list[range]:
        """Returns the index range of each segment that has entries at or after `from_index`, in order.

        Lists the folder.
        """
        found = []
        for name in self._store.list(self._folder):
            first, _, last = name.partition("-")
            if first.isdigit() and last.isdigit() and int(last) >= from_index:
                found.append(range(int(first), int(last) + 1))
        return sorted(found, key=lambda span: (span.start, span.stop))

    def read(self, span: range) -> dict[int, bytes]:
        """Returns the stored bytes of the log entries in the segment `span`, by index.

        Raises CorruptionError, NotFoundError, or CodecError for another version.
        """
        path = self._path(span)
        where = join_url(self._store.url, path)
        segment = decode(unseal(_SEGMENT_MAGIC, _SEGMENT_VERSION, self._store.read(path), where))
        if not isinstance(segment, EventSegment):
            raise CorruptionError(
                f"{where} does not hold entries of an event log"
                "; restore this file from a copy, or start the job again from a checkpoint under another name"
            )
        return dict(zip(segment.indices, segment.entries, strict=True))

    def _path(self, span: range) -> str:
        return f"{self._folder}/{span.start:0{self._digits}d}-{span.stop - 1:0{self._digits}d}"
