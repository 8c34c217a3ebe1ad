"""`TableParts`: where the log of a table rests: single entries, parts of many entries, and snapshots of the fold.

    _tidegate/log/<seq>               one entry
    _tidegate/log/snapshot-<seq>      the fold of all entries up to `seq`, and which parts hold them
    _tidegate/parts/<first>-<last>    entries `first` to `last`, in columns; a part is never changed
    _tidegate/parts/<first>-<last>-<cut>    those that were left of them at a cut

Rules:

- All of it is a function of the log: whoever writes a part or a snapshot writes the same.
- Parts of one level are joined to one of the next, so there are few of them however long the log is, and an entry is
  written a few times in all. Parts are joined no further where they would get larger than `FILES_MAX` data files.
- With the snapshot after a cut (`log_cut.py`) the parts that begin before it are written again, without what the cut
  leaves out. Such parts are not joined any more: the next cut does that.
- The newest snapshot and the one before it stay, with their parts and every entry from the older one on: damage to the
  newest is passed over, and a reader that was overtaken finds out, because the entry that it has read last is gone.
- Entries go in ascending order, so that an entry that is there proves that all after it are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import AlreadyExistsError, CodecError, CorruptionError
from tidegate.storage.files.envelope import checksum_of, seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.log_entries import Ranges, TableCut, TableEntry, TableEntryKind, covers
from tidegate.storage.tables.log.log_fold import TableFold

TABLE_LOG_VERSION = 3
_VERSION_MIN = 2
"""What came since are fields that an older file does not have."""
LOG_FOLDER = "_tidegate/log"
PARTS_FOLDER = "_tidegate/parts"
FAN_IN = 10
FILES_MAX = 50_000
_ENTRY_MAGIC, _SNAPSHOT_MAGIC, _PART_MAGIC = b"TGTABLE", b"TGTABSN", b"TGTABPT"
_SNAPSHOT_PREFIX = "snapshot-"
_DIGITS = 12
_LEVEL_CUT = 1_000
"""That of parts which are not joined to others."""


@wire
@dataclass(frozen=True, slots=True)
class TablePart:
    """A part of the log: entries `first` to `last`, with so many data files.

    `cut`: without the entries that the cut at this entry leaves out; None: with all.
    """

    first: int
    last: int
    level: int
    files: int
    cut: int | None = None

    @property
    def path(self) -> str:
        """Where it lies."""
        cut = "" if self.cut is None else f"-{self.cut:0{_DIGITS}d}"
        return f"{PARTS_FOLDER}/{self.first:0{_DIGITS}d}-{self.last:0{_DIGITS}d}{cut}"


@wire
@dataclass(frozen=True, slots=True)
class TableState:
    """What a snapshot holds: the fold, and the parts with all entries up to it."""

    fold: TableFold
    parts: tuple[TablePart, ...]


@wire
@dataclass(frozen=True, slots=True)
class PartColumns:
    """Entries of a part. Commits are columns, everything else is there as it is."""

    jobs: tuple[JobId, ...] = ()
    seqs: tuple[int, ...] = ()
    job_of: tuple[int, ...] = ()
    checkpoints: tuple[CheckpointId, ...] = ()
    counts: tuple[int, ...] = ()
    """Files of each commit."""
    paths: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    checksums: tuple[str, ...] = ()
    others: tuple[TableEntry, ...] = ()
    times: tuple[int | None, ...] = ()
    """When each commit was made. Parts that are older than these times have none."""

    @staticmethod
    def of(entries: Sequence[TableEntry]) -> PartColumns:
        """These entries."""
        commits = [e for e in entries if e.kind is TableEntryKind.COMMITTED]
        jobs = tuple(dict.fromkeys(e.job_id for e in commits if e.job_id is not None))
        number = {job: at for at, job in enumerate(jobs)}
        files = [file for e in commits for file in e.files]
        return PartColumns(
            jobs,
            tuple(e.seq for e in commits),
            tuple(number[e.job_id] for e in commits if e.job_id is not None),
            tuple(e.checkpoint_id for e in commits if e.checkpoint_id is not None),
            tuple(len(e.files) for e in commits),
            tuple(f.path for f in files),
            tuple(f.rows for f in files),
            tuple(f.size_bytes for f in files),
            tuple(f.checksum for f in files),
            tuple(e for e in entries if e.kind is not TableEntryKind.COMMITTED),
            tuple(e.at_ms for e in commits),
        )

    @staticmethod
    def joined(parts: Sequence[PartColumns]) -> PartColumns:
        """The entries of adjacent parts."""
        jobs = tuple(dict.fromkeys(job for part in parts for job in part.jobs))
        number = {job: at for at, job in enumerate(jobs)}
        return PartColumns(
            jobs,
            tuple(seq for part in parts for seq in part.seqs),
            tuple(number[part.jobs[at]] for part in parts for at in part.job_of),
            tuple(checkpoint for part in parts for checkpoint in part.checkpoints),
            tuple(count for part in parts for count in part.counts),
            tuple(path for part in parts for path in part.paths),
            tuple(rows for part in parts for rows in part.rows),
            tuple(size for part in parts for size in part.sizes),
            tuple(checksum for part in parts for checksum in part.checksums),
            tuple(entry for part in parts for entry in part.others),
            tuple(at_ms for part in parts for at_ms in part._times()),
        )

    def entries(self) -> list[TableEntry]:
        """All entries, in order."""
        commits = (
            TableEntry(
                seq,
                TableEntryKind.COMMITTED,
                self.jobs[job],
                checkpoint,
                self._files(start, start + count),
                at_ms=at_ms,
            )
            for seq, job, checkpoint, count, at_ms, start in zip(
                self.seqs, self.job_of, self.checkpoints, self.counts, self._times(), self._starts(), strict=False
            )
        )
        return sorted((*commits, *self.others), key=lambda entry: entry.seq)

    def files(self, shown: Ranges, cut: TableCut | None = None) -> list[tuple[int, DataFile]]:
        """The files of the entries that are shown and not cut off, each with its place in the order of the table."""

        def shows(seq: int) -> bool:
            return covers(shown, seq) and (cut is None or cut.keeps(seq))

        found = [(entry.position, file) for entry in self.others if shows(entry.seq) for file in entry.files]
        for seq, count, start in zip(self.seqs, self.counts, self._starts(), strict=False):
            if count and shows(seq):
                found += [(seq, file) for file in self._files(start, start + count)]
        return found

    def _times(self) -> tuple[int | None, ...]:
        return self.times or (None,) * len(self.seqs)

    def _starts(self) -> Iterable[int]:
        return accumulate(self.counts, initial=0)

    def _files(self, start: int, end: int) -> tuple[DataFile, ...]:
        columns = (self.paths, self.rows, self.sizes, self.checksums)
        return tuple(DataFile(*values) for values in zip(*(c[start:end] for c in columns), strict=True))


class TableParts:
    """Reads and writes the files of one table's log."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # --- entries --------------------------------------------------------------------------------------------------

    def create_entry(self, entry: TableEntry) -> str:
        """Create an entry and return its checksum. AlreadyExistsError, StorageError."""
        data = encoded_entry(entry)
        self._store.create(entry_path(entry.seq), data)
        return checksum_of(data)

    def read_entry(self, seq: int) -> tuple[TableEntry, str]:
        """An entry and its checksum. NotFoundError, CorruptionError, CodecError."""
        path = entry_path(seq)
        where = join_url(self._store.url, path)
        data = self._store.read(path)
        entry = _decoded(_ENTRY_MAGIC, data, where)
        if not isinstance(entry, TableEntry) or entry.seq != seq:
            raise CorruptionError(f"{where} does not hold entry {seq} of the table's log")
        if (entry.kind is TableEntryKind.CREATED) != (seq == 0):
            raise CorruptionError(f"{where}: entry {seq} cannot be {entry.kind.value!r}")
        return entry, checksum_of(data)

    def entry_checksum(self, seq: int) -> str:
        """Checksum of an entry as it lies there. NotFoundError."""
        return checksum_of(self._store.read(entry_path(seq)))

    def has_entry(self, seq: int) -> bool:
        """Whether an entry is there, whatever a listing says."""
        return self._store.exists(entry_path(seq))

    def listing(self) -> tuple[list[int], list[int]]:
        """Numbers of the entries and of the snapshots that are there, ascending."""
        names = self._store.list(LOG_FOLDER)
        snapshots = (n.removeprefix(_SNAPSHOT_PREFIX) for n in names if n.startswith(_SNAPSHOT_PREFIX))
        return sorted(map(int, filter(_is_number, names))), sorted(map(int, filter(_is_number, snapshots)))

    # --- parts and snapshots --------------------------------------------------------------------------------------

    def read_state(self, seq: int) -> TableState:
        """A snapshot. NotFoundError, CorruptionError, CodecError."""
        path = _snapshot_path(seq)
        where = join_url(self._store.url, path)
        state = _decoded(_SNAPSHOT_MAGIC, self._store.read(path), where)
        if not isinstance(state, TableState) or state.fold.seq != seq:
            raise CorruptionError(f"{where} does not hold the table's state at entry {seq}")
        return state

    def read_part(self, part: TablePart) -> PartColumns:
        """A part. NotFoundError, CorruptionError, CodecError."""
        where = join_url(self._store.url, part.path)
        columns = _decoded(_PART_MAGIC, self._store.read(part.path), where)
        if not isinstance(columns, PartColumns):
            raise CorruptionError(f"{where} does not hold a part of the table's log")
        return columns

    def compact(self, before: TableState | None, fold: TableFold, entries: Sequence[TableEntry]) -> TableState:
        """Write `entries`, which follow on a state, as parts, and a snapshot with their fold. Returns what it holds."""
        parts = () if before is None else before.parts
        fresh = TablePart(entries[0].seq, entries[-1].seq, 0, sum(len(e.files) for e in entries))
        columns = {fresh.path: PartColumns.of(entries)}
        parts = (*parts, fresh)
        self._write_part(fresh, columns[fresh.path])
        while _joinable(parts):
            last = parts[-FAN_IN:]
            joined = TablePart(last[0].first, last[-1].last, last[0].level + 1, sum(part.files for part in last))
            columns[joined.path] = PartColumns.joined(
                [columns[part.path] if part.path in columns else self.read_part(part) for part in last]
            )
            parts = (*parts[:-FAN_IN], joined)
            self._write_part(joined, columns[joined.path])
        if fold.cut is not None:
            parts = self._after_cut(fold.cut, parts)
        state = TableState(fold, parts)
        data = seal(_SNAPSHOT_MAGIC, TABLE_LOG_VERSION, encode(state))
        self._store.write(_snapshot_path(fold.seq), (data,))
        return state

    def _after_cut(self, cut: TableCut, parts: Sequence[TablePart]) -> tuple[TablePart, ...]:
        """These parts without what a cut leaves out, written where they are not so already."""
        count = sum(part.first <= cut.seq for part in parts)
        if all(part.cut == cut.seq for part in parts[:count]):
            return tuple(parts)
        written: list[TablePart] = []
        entries: list[TableEntry] = []
        first = 0
        for at, part in enumerate(parts[:count]):
            entries += [entry for entry in self.read_part(part).entries() if cut.keeps(entry.seq)]
            files = sum(len(entry.files) for entry in entries)
            if at == count - 1 or files + parts[at + 1].files > FILES_MAX:
                new = TablePart(first, part.last, _LEVEL_CUT, files, cut.seq)
                self._write_part(new, PartColumns.of(entries))
                written.append(new)
                first, entries = part.last + 1, []
        return (*written, *parts[count:])

    def truncate(self, before: TableState, state: TableState) -> None:
        """Delete what neither of two snapshots, one after the other, needs. It may stop anywhere, and be repeated."""
        entries, snapshots = self.listing()
        for seq in entries:
            if seq < before.fold.seq:
                self._store.delete(entry_path(seq))
        for seq in snapshots:
            if seq < before.fold.seq:
                self._store.delete(_snapshot_path(seq))
        needed = {part.path for part in (*before.parts, *state.parts)}
        cut = -1 if state.fold.cut is None else state.fold.cut.seq
        for name in self._store.list(PARTS_FOLDER):
            numbers = name.split("-")
            if f"{PARTS_FOLDER}/{name}" in needed or not all(map(_is_number, numbers)) or len(numbers) < 2:
                continue
            # Parts that end later, or that were cut later, are of somebody who has gone further.
            if int(numbers[1]) <= state.fold.seq and (len(numbers) == 2 or int(numbers[2]) <= cut):
                self._store.delete(f"{PARTS_FOLDER}/{name}")

    def delete_entry(self, seq: int) -> None:
        """Take back an entry that was created where the log had been truncated."""
        self._store.delete(entry_path(seq))

    def _write_part(self, part: TablePart, columns: PartColumns) -> None:
        try:
            self._store.create(part.path, seal(_PART_MAGIC, TABLE_LOG_VERSION, encode(columns)))
        except AlreadyExistsError:
            return  # The same entries make the same part.


def encoded_cut_log(fold: TableFold, entries: Sequence[TableEntry]) -> list[tuple[str, bytes]]:
    """Paths and bytes of a log that was cut, of which these are all entries, in the order in which to write them.

    Single entries would have holes between them, so it is a part, the newest entry, and a snapshot.
    """
    assert fold.cut is not None
    files = sum(len(entry.files) for entry in entries)
    part = TablePart(0, fold.seq, _LEVEL_CUT, files, fold.cut.seq)
    newest = encoded_entry(entries[-1])
    # Parts have no nonces of commits, so the entry may have other bytes than at the source.
    fold = replace(fold, entry_checksum=checksum_of(newest))
    return [
        (part.path, seal(_PART_MAGIC, TABLE_LOG_VERSION, encode(PartColumns.of(entries)))),
        (entry_path(fold.seq), newest),
        (_snapshot_path(fold.seq), seal(_SNAPSHOT_MAGIC, TABLE_LOG_VERSION, encode(TableState(fold, (part,))))),
    ]


def encoded_entry(entry: TableEntry) -> bytes:
    """The bytes of an entry's file."""
    return seal(_ENTRY_MAGIC, TABLE_LOG_VERSION, encode(entry))


def entry_path(seq: int) -> str:
    """Where an entry lies."""
    return f"{LOG_FOLDER}/{seq:0{_DIGITS}d}"


def _snapshot_path(seq: int) -> str:
    return f"{LOG_FOLDER}/{_SNAPSHOT_PREFIX}{seq:0{_DIGITS}d}"


def _joinable(parts: Sequence[TablePart]) -> bool:
    last = parts[-FAN_IN:]
    return (
        len(last) == FAN_IN
        and len({part.level for part in last}) == 1
        and sum(part.files for part in last) <= FILES_MAX
    )


def _decoded(magic: bytes, data: bytes, where: str) -> object:
    payload = unseal(magic, TABLE_LOG_VERSION, data, where, version_min=_VERSION_MIN)
    try:
        return decode(payload)
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from error


def _is_number(name: str) -> bool:
    return len(name) >= _DIGITS and name.isascii() and name.isdigit()
