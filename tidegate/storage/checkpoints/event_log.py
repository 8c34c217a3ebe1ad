"""`EventLog`: the event log of a job: one file per entry. The coordinator that creates entry k decides what happens.

Rules:

- Entries are made by conditional create and never changed. That is the fence: of two coordinators that both want to
  write entry k, one gets FencedError.
- A create whose answer was lost may be repeated: finding the very same entry proves that the first create worked.
- A coordinator may sleep while others write, fold and truncate the log. When it wakes, it must not mistake the hole
  that truncation has left for the end of the log:
  - The two newest entries are never truncated. A writer that does not find the entry before its own is fenced.
  - Entries with which a coordinator took over are never truncated (the writer names them, `keep`). One of these is the
    first entry that a sleeper has missed, so it cannot create that entry itself.
  - A writer therefore checks after its first entry, and after an entry that it creates again because an answer was
    lost. For all other entries the create alone decides (`look` False).
- Entries are contiguous. A hole, or damage, is an error, never the end.
- Entries that are cut from a log may be kept in segments (`EventSegments`), which are no longer part of it.
- A listing may lack entries that exist while entries are created. An entry that a listing lacks is looked up by its own
  name before it counts as gone.

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
    """What one coordinator generation decided at one index: wire values that its state is folded from.

    `nonce` is the writer's own, so that its repeated attempts are told from somebody else's equal decision.
    `first_event` is the number of the first event, the next one has the next number. `causes`: for each event the
    number of the one that it follows from, or None. Entries of older versions have neither.
    """

    index: int
    generation: Generation
    at_ms: int
    nonce: str
    events: tuple[Any, ...]
    first_event: int | None = None
    causes: tuple[int | None, ...] = ()


class EventLog:
    """The log of one job in its checkpoint storage. Has no state of its own; thread-safe if the store is."""

    def __init__(self, store: Store, job_id: JobId) -> None:
        self._store = store
        self._folder = CheckpointLayout(job_id).events_dir()
        self.segments = EventSegments(store, self._folder, _DIGITS)
        """What was cut from the log and is kept."""

    def append(self, entry: LogEntry, *, look: bool = True) -> int:
        """Make the entry part of the log, durably; returns its bytes. Repeating it with the same entry is safe.

        `look`: whether its predecessor is looked for; it may be left out as the module says.

        Raises FencedError if another entry is there or the log has moved on beyond it, LogDeletedError if the log is
        gone, CodecError for events that are not wire values, and StorageError if it is unknown whether the entry is
        there: repeat it then.
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
                    f"{found.generation}, not by generation {entry.generation}: it has taken over"
                ) from None
        if look and not self._continues(entry.index):
            if created:
                # Nobody can need this file: what is at or below it has been folded into a snapshot, or is deleted.
                self._store.delete(path)
            if not any(index > entry.index for index in self.indices()):
                raise LogDeletedError(
                    f"the entries before {entry.index} of {self._where()} are gone and nobody has continued the log: "
                    "was the folder deleted while the job was running?"
                )
            raise FencedError(
                f"entry {entry.index} of {self._where()} has no predecessor: another coordinator has "
                "continued the log and truncated it"
            )
        return len(data)

    def read(self, index: int) -> LogEntry:
        """One entry. NotFoundError, CorruptionError, or CodecError for events that are not known here."""
        return self.decoded(index, self._store.read(self._entry_path(index)))

    def decoded(self, index: int, data: Buffer) -> LogEntry:
        """An entry out of the bytes of its file. Errors as of `read`."""
        where = join_url(self._store.url, self._entry_path(index))
        entry = decode(unseal(_ENTRY_MAGIC, LOG_VERSION, data, where))
        if not isinstance(entry, LogEntry) or entry.index != index:
            raise CorruptionError(f"{where} does not hold entry {index} of the log")
        return entry

    def indices(self) -> list[int]:
        """Indices of all entries that are there, ascending. Lists the folder."""
        found = (_parse_index(name) for name in self._store.list(self._folder))
        return sorted(index for index in found if index is not None)

    def oldest(self) -> int:
        """The index from which on every entry is there; what was kept of a truncated part comes before it."""
        known = set(self.indices())
        oldest = max(known, default=0)
        while oldest - 1 in known or (oldest > 0 and self._has(oldest - 1)):
            oldest -= 1
        return oldest

    def history(self) -> list[LogEntry]:
        """All entries from the oldest on, and what was cut before it and is kept, as far as there is no hole.

        Safe while the log is truncated: it begins again where that has gone on.
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
        raise AssertionError("it returns or raises")

    def _kept_before(self, oldest: int) -> list[LogEntry]:
        kept = {index: data for span in self.segments.spans() for index, data in self.segments.read(span).items()}
        found: list[LogEntry] = []
        # Entries of takeovers stay where they are.
        while (index := oldest - 1 - len(found)) in kept or (kept and index >= 0 and self._has(index)):
            found.append(self.decoded(index, kept[index]) if index in kept else self.read(index))
        return found[::-1]

    def entries(self, from_index: int) -> Iterator[LogEntry]:
        """All entries from an index on, in order. CorruptionError for a damaged entry or a hole."""
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
                    ) from error
                return
            yield entry
            index += 1

    def write_snapshot(self, index: int, state: object) -> None:
        """Store the fold of all entries before `index`, a wire value. Equal folds may be written again."""
        data = seal(_SNAPSHOT_MAGIC, LOG_VERSION, encode(state))
        self._store.write(self._snapshot_path(index), (data,))

    def latest_snapshot(self) -> tuple[int, Any] | None:
        """Index and state of the newest undamaged snapshot; damaged ones are passed over and logged."""
        for index in reversed(self._snapshot_indices()):
            try:
                return index, self._read_snapshot(index)
            except (CorruptionError, NotFoundError) as error:
                _logger.warning("Snapshot %d of %s is passed over: %s", index, self._where(), error)
        return None

    def oldest_snapshot(self, from_index: int) -> tuple[int, Any] | None:
        """Index and state of the oldest undamaged snapshot that folds the entries before `from_index`, or more."""
        for index in self._snapshot_indices():
            try:
                if index >= from_index:
                    return index, self._read_snapshot(index)
            except (CorruptionError, NotFoundError) as error:
                _logger.warning("Snapshot %d of %s is passed over: %s", index, self._where(), error)
        return None

    def truncate(self, before_index: int, keep: Set[int] = frozenset(), *, segments: bool = False) -> None:
        """Delete what is not needed to fold the log from `before_index` on, but for the entries to `keep`.

        `segments`: what is deleted is kept in segments. Each entry is read for that.

        The newest undamaged snapshot stays, and every entry from the one before it on; nothing is deleted
        without a snapshot. What a crash leaves is deleted the next time.
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
        """The files of these entries; another coordinator may truncate the log as well, and keep what it deletes."""
        found = {}
        for index in indices:
            try:
                found[index] = self._store.read(self._entry_path(index))
            except NotFoundError:
                continue
        return found

    def _continues(self, index: int) -> bool:
        """Whether an entry that is there now belongs to the log, rather than to a part that was truncated."""
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
            raise CodecError(f"{where}: {error}") from error

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
    """Entries of a log as they lay there, by their indices."""

    indices: tuple[int, ...]
    entries: tuple[bytes, ...]


class EventSegments:
    """The segments of one log, whose folder is `events`. `digits`: of an index in the name of a file."""

    def __init__(self, store: Store, events: str, digits: int) -> None:
        self._store = store
        self._folder = f"{events}/{_SEGMENTS_FOLDER}"
        self._digits = digits

    def write(self, entries: Mapping[int, bytes]) -> None:
        """Keep entries; no order is asked for. Writing them again is safe. StorageError."""
        indices = tuple(sorted(entries))
        segment = EventSegment(indices, tuple(entries[index] for index in indices))
        span = range(indices[0], indices[-1] + 1)
        self._store.write(self._path(span), [seal(_SEGMENT_MAGIC, _SEGMENT_VERSION, encode(segment))])

    def spans(self, from_index: int = 0) -> list[range]:
        """From which index to which there are segments that reach beyond `from_index`; in order. Lists the folder."""
        found = []
        for name in self._store.list(self._folder):
            first, _, last = name.partition("-")
            if first.isdigit() and last.isdigit() and int(last) >= from_index:
                found.append(range(int(first), int(last) + 1))
        return sorted(found, key=lambda span: (span.start, span.stop))

    def read(self, span: range) -> dict[int, bytes]:
        """The entries of a segment. CorruptionError for damage, CodecError for another version, NotFoundError."""
        path = self._path(span)
        where = join_url(self._store.url, path)
        segment = decode(unseal(_SEGMENT_MAGIC, _SEGMENT_VERSION, self._store.read(path), where))
        if not isinstance(segment, EventSegment):
            raise CorruptionError(f"{where} does not hold entries of an event log")
        return dict(zip(segment.indices, segment.entries, strict=True))

    def _path(self, span: range) -> str:
        return f"{self._folder}/{span.start:0{self._digits}d}-{span.stop - 1:0{self._digits}d}"
