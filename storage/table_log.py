"""The commit log of an output table: which data files are its content, decided by conditional creates.

The store is rooted at the table's url; entry `seq` is the file `_tidegate/log/<seq>`. Rules:

- Entry 0 says what the table is. A `claimed` entry makes a job the table's owner; only the owner commits, and
  whoever has lost the table gets FencedError. A `committed` entry shows the files of one checkpoint.
- What a table shows is a fold over the log. A claim names the entry `visible_through`, and the table then
  shows what it showed right after that entry: so a job that was restored from a checkpoint starts from just
  the rows that the checkpoint covered, also where an earlier claim had hidden some of them.
- Entries are never changed or deleted; two writers that want the same `seq` are told apart by the create.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.dictionaries import check_dictionaries, widened_schema
from tidegate.storage.envelope import seal, unseal
from tidegate.storage.errors import (
    AlreadyExistsError,
    CorruptionError,
    FencedError,
    NotFoundError,
    StorageError,
    TableError,
)
from tidegate.storage.filesystem import join_url
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.metadata import DataFile
from tidegate.storage.store import Store

TableMode = Literal["append", "upsert"]
IfExists = Literal["error", "append", "overwrite"]

TABLE_LOG_VERSION = 1
LOG_FOLDER = "_tidegate/log"
RACES_MAX = 32
_MAGIC = b"TGTABLE"
_DIGITS = 12


@wire
@dataclass(frozen=True, slots=True)
class TableInfo:
    """What a table is: an Arrow schema (serialised), how rows come in, and keys in upsert mode."""

    schema: bytes
    mode: TableMode
    keys: tuple[str, ...] = ()

    @staticmethod
    def of(schema: pa.Schema, mode: TableMode, keys: tuple[str, ...] = ()) -> TableInfo:
        """Info of a table with these columns.

        TableError for keys that do not fit mode or schema, and for a dictionary column that a table cannot hold.
        """
        if (mode == "upsert") != bool(keys):
            raise TableError(f"a table in {mode} mode with keys {keys!r}: give keys for upsert, and only then")
        if len(set(schema.names)) < len(schema.names):
            raise TableError(f"a table's column names must differ: {schema.names}")
        missing = [key for key in keys if key not in schema.names]
        if missing:
            raise TableError(f"key column {missing[0]!r} is not among the table's columns {schema.names}")
        check_dictionaries(schema)
        return TableInfo(widened_schema(schema).serialize().to_pybytes(), mode, keys)

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema as Arrow knows it; dictionaries are widened, also in a table that is older than that rule."""
        return widened_schema(pa.ipc.read_schema(pa.py_buffer(self.schema)))


@wire
class TableEntryKind(enum.Enum):
    """What an entry of the log says."""

    CREATED = "created"
    CLAIMED = "claimed"
    COMMITTED = "committed"


@wire
@dataclass(frozen=True, slots=True)
class TableEntry:
    """One entry. Claims have `visible_through`, the first entry `info`, commits checkpoint and files."""

    seq: int
    kind: TableEntryKind
    job_id: JobId | None = None
    checkpoint_id: CheckpointId | None = None
    files: tuple[DataFile, ...] = ()
    visible_through: int | None = None
    info: TableInfo | None = None


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """What a table shows: its committed, visible files in commit order, as of entry `seq`."""

    info: TableInfo
    files: tuple[DataFile, ...]
    seq: int

    @property
    def rows(self) -> int:
        """Rows in the files; in an upsert table several may be versions of one."""
        return sum(file.rows for file in self.files)


def visible_commits(entries: Sequence[TableEntry]) -> tuple[int, ...]:
    """Fold: the `seq` of the commits that a table shows after these entries, in order."""
    # newest[seq] is the newest commit shown right after entry seq. What is shown with it is what was shown
    # before it, so the commits form a tree, a claim picks a branch, and what a table shows is the way from
    # the tip to the root.
    newest: list[int | None] = []
    for entry in entries:
        if entry.kind is TableEntryKind.CREATED:
            newest.append(None)
        elif entry.kind is TableEntryKind.COMMITTED:
            newest.append(entry.seq)
        else:
            assert entry.visible_through is not None and entry.visible_through < entry.seq
            newest.append(newest[entry.visible_through])
    shown: list[int] = []
    commit = newest[-1] if newest else None
    while commit is not None:
        shown.append(commit)
        commit = newest[commit - 1]
    return tuple(reversed(shown))


class TableLog:
    """The log of the table at the store's root. Thread-safe; remembers the entries it has read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: list[TableEntry] = []
        self._lock = threading.Lock()

    def create(self, info: TableInfo) -> None:
        """Make the table, or see that it is there already as described.

        Raises TableError, naming the difference, if it exists with another schema, mode or keys.
        """
        with self._lock:
            self._refresh()
            if not self._entries:
                self._try_append(TableEntry(0, TableEntryKind.CREATED, info=info))
            self._check_same(info)

    def check_claim(
        self,
        info: TableInfo,
        job_id: JobId,
        restored_from: tuple[JobId, CheckpointId] | None = None,
        if_exists: IfExists = "error",
    ) -> None:
        """Raise what `create` and `claim` would raise now, and change nothing."""
        with self._lock:
            self._refresh()
            if self._entries:
                self._check_same(info)
                self._claim_through(job_id, restored_from, if_exists)

    def claim(
        self,
        job_id: JobId,
        restored_from: tuple[JobId, CheckpointId] | None = None,
        if_exists: IfExists = "error",
    ) -> None:
        """Make a job the owner of the table; once a job, when it is submitted. Safe to repeat.

        A job restored from a checkpoint of a job that knew the table starts from the rows which that
        checkpoint covered; rows committed later are hidden. Any other job finds the table as it is: if it
        shows rows, `if_exists` decides between TableError, adding to them, and hiding them. An owner that
        falls back to an older checkpoint of its own claims again with `restored_from=(job_id, checkpoint)`.

        Raises FencedError if another job has claimed the table after this one.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                self._refresh()
                through = self._claim_through(job_id, restored_from, if_exists)
                if through is None:
                    return
                seq = len(self._entries)
                entry = TableEntry(seq, TableEntryKind.CLAIMED, job_id=job_id, visible_through=through)
                if self._try_append(entry):
                    return
            raise self._lost_races("claim")

    def commit(self, job_id: JobId, checkpoint_id: CheckpointId, files: tuple[DataFile, ...]) -> None:
        """Show the files of a completed checkpoint, once however often it is called.

        Raises FencedError if the job does not own the table, TableError if the checkpoint was committed
        before with other files, StorageError if it is unknown whether the commit is there: repeat it then.
        """
        with self._lock:
            for _ in range(RACES_MAX):
                self._refresh()
                self._check_owner(job_id)
                if self._is_committed(job_id, checkpoint_id, files) or not files:
                    return
                seq = len(self._entries)
                entry = TableEntry(
                    seq, TableEntryKind.COMMITTED, job_id=job_id, checkpoint_id=checkpoint_id, files=files
                )
                if self._try_append(entry):
                    return
            raise self._lost_races("commit")

    def snapshot(self) -> TableSnapshot:
        """What the table shows now. TableError if there is no table."""
        with self._lock:
            self._refresh()
            info = self._info()
            files = tuple(file for seq in visible_commits(self._entries) for file in self._entries[seq].files)
            return TableSnapshot(info, files, len(self._entries) - 1)

    def entries(self) -> tuple[TableEntry, ...]:
        """The whole history; empty if there is no table."""
        with self._lock:
            self._refresh()
            return tuple(self._entries)

    def referenced_paths(self) -> frozenset[str]:
        """Every path that any entry refers to, hidden ones included: a later restore may show them again."""
        return frozenset(file.path for entry in self.entries() for file in entry.files)

    def _refresh(self) -> None:
        if not self._entries:
            self._check_no_hole()
        while True:
            seq = len(self._entries)
            try:
                data = self._store.read(_entry_path(seq))
            except NotFoundError:
                return
            self._entries.append(self._decode(seq, data))

    def _check_no_hole(self) -> None:
        # Reading on until nothing is found would take a lost first part for the end; a listing would not.
        names = sorted(name for name in self._store.list(LOG_FOLDER) if name.isdigit())
        expected = [f"{seq:0{_DIGITS}d}" for seq in range(len(names))]
        if names != expected:
            missing = next(e for n, e in zip(names, expected, strict=True) if n != e)
            raise CorruptionError(f"{join_url(self._store.url, LOG_FOLDER)} has a hole: {missing} is missing")

    def _decode(self, seq: int, data: bytes) -> TableEntry:
        where = join_url(self._store.url, _entry_path(seq))
        entry = decode(unseal(_MAGIC, TABLE_LOG_VERSION, data, where))
        if not isinstance(entry, TableEntry) or entry.seq != seq:
            raise CorruptionError(f"{where} does not hold entry {seq} of the table's log")
        if (entry.kind is TableEntryKind.CREATED) != (seq == 0):
            raise CorruptionError(f"{where}: entry {seq} cannot be {entry.kind.value!r}")
        return entry

    def _try_append(self, entry: TableEntry) -> bool:
        """Whether the entry was created; if not, `_refresh` will find what was created instead."""
        try:
            self._store.create(_entry_path(entry.seq), seal(_MAGIC, TABLE_LOG_VERSION, encode(entry)))
        except AlreadyExistsError:
            self._refresh()
            return False
        self._entries.append(entry)
        return True

    def _info(self) -> TableInfo:
        if not self._entries:
            raise TableError(f"there is no table at {self._store.url}; check the url, or run a job that writes it")
        info = self._entries[0].info
        assert info is not None
        return info

    def _check_same(self, info: TableInfo) -> None:
        found = self._info()
        for what, is_, wanted in (("mode", found.mode, info.mode), ("keys", found.keys, info.keys)):
            if is_ != wanted:
                raise TableError(
                    f"the table at {self._store.url} has {what} {is_!r}, the job writes with {wanted!r}; "
                    "write to another url, or change the sink"
                )
        difference = _schema_difference(found.arrow_schema, info.arrow_schema)
        if difference:
            raise TableError(
                f"the table at {self._store.url} has another schema than the job writes: {difference}; "
                "write to another url, or cast the columns"
            )

    def _claim_through(
        self, job_id: JobId, restored_from: tuple[JobId, CheckpointId] | None, if_exists: IfExists
    ) -> int | None:
        """`visible_through` of the claim to make; None when the job owns the table as it should already."""
        self._info()
        newest = len(self._entries) - 1
        restored_through = None if restored_from is None else self._covered_by(*restored_from)
        if any(entry.job_id == job_id for entry in self._entries):
            self._check_owner(job_id)
            if restored_from is None or restored_from[0] != job_id or restored_through is None:
                return None
            shown_then = visible_commits(self._entries[: restored_through + 1])
            return None if shown_then == visible_commits(self._entries) else restored_through
        if restored_through is not None:
            return restored_through
        rows = sum(file.rows for seq in visible_commits(self._entries) for file in self._entries[seq].files)
        if if_exists == "append" or not rows:
            return newest
        if if_exists == "overwrite":
            return 0
        raise TableError(
            f"the table at {self._store.url} shows {rows} rows already; "
            'give if_exists="append" to add to them or if_exists="overwrite" to replace them, or another url'
        )

    def _covered_by(self, job_id: JobId, checkpoint_id: CheckpointId) -> int | None:
        """The last entry of a job that a checkpoint of it covers; None if the job never claimed the table."""
        covered: int | None = None
        newest_commit = 0
        for entry in self._entries:
            if entry.job_id != job_id:
                continue
            if entry.kind is TableEntryKind.COMMITTED:
                assert entry.checkpoint_id is not None
                newest_commit = max(newest_commit, entry.checkpoint_id)
                if entry.checkpoint_id <= checkpoint_id:
                    covered = entry.seq
            elif covered is None or checkpoint_id > newest_commit:
                # The first claim; or a fallback of the job, which only checkpoints taken after it know of.
                covered = entry.seq
        return covered

    def _check_owner(self, job_id: JobId) -> None:
        claims = [entry for entry in self._entries if entry.kind is TableEntryKind.CLAIMED]
        if not claims or claims[-1].job_id != job_id:
            owner = repr(claims[-1].job_id) if claims else "no job"
            raise FencedError(f"the table at {self._store.url} is owned by {owner}, not by {job_id!r}")

    def _is_committed(self, job_id: JobId, checkpoint_id: CheckpointId, files: tuple[DataFile, ...]) -> bool:
        for entry in self._entries:
            if entry.job_id == job_id and entry.checkpoint_id == checkpoint_id:
                if entry.files != files:
                    raise TableError(
                        f"checkpoint {checkpoint_id} of {job_id!r} was committed to {self._store.url} "
                        f"with other files than it is now: {len(entry.files)} then, {len(files)} now"
                    )
                return True
        return False

    def _lost_races(self, what: str) -> StorageError:
        return StorageError(f"could not {what} at {self._store.url}: lost {RACES_MAX} races against other writers")


def _entry_path(seq: int) -> str:
    return f"{LOG_FOLDER}/{seq:0{_DIGITS}d}"


def _schema_difference(found: pa.Schema, wanted: pa.Schema) -> str | None:
    if found.equals(wanted, check_metadata=False):
        return None
    for name in (*found.names, *wanted.names):
        if name not in wanted.names or name not in found.names:
            side = "the table" if name in found.names else "the job"
            return f"only {side} has a column {name!r}"
        if found.field(name) != wanted.field(name):
            there, here = (_type_text(schema.field(name)) for schema in (found, wanted))
            return f"column {name!r} is {there} in the table, {here} in the job"
    return f"the columns are in order {found.names} in the table, {wanted.names} in the job"


def _type_text(field: pa.Field) -> str:
    return str(field.type) if field.nullable else f"{field.type} not null"
