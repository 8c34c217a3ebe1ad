"""`RocksSession`: the database of one operator in one subtask. It is opened, described and frozen here.

The folder belongs to one backend, and is deleted when neither it nor a snapshot needs it. The database starts empty, or
on the files of a checkpoint. Rules:
- Files that `fetch_native` has put into the folder are used. Anything else in it is deleted.
- A state keeps its number for the lifetime of the files, and no number is ever used twice.

`Unwritten` has the rows of a snapshot that are not in the database yet, and what is done once they are. A freeze makes
one, so that its cost does not grow with the rows. The thread that writes the snapshot writes them during processing.
- Whoever comes first writes them: the writer of the snapshot, or the task, which calls `settle` before it writes
  anything else. In both cases the database then has the contents of the freeze.
- Rows are written whether the snapshot is still needed or not, because they are nowhere else. A failure is reported to
  every caller, because the database lacks rows then.
- A failure in what is done with the snapshot is reported to its writer alone.

`Overlap` limits what is written to a database after a freeze, while the files of the snapshot are still being made. A
freeze hands RocksDB's memory over to be written to files, and processing continues with new memory. When all of the old
memory is in files, these are linked.
- The new memory must not become a file before that, because the links must show the moment of the freeze. RocksDB
  writes full memory to a file, so only a limited amount is accepted (`takes`); larger writes wait for the links.
- Entries are counted. If the new memory has fewer than were written since the freeze, RocksDB has written a file
  anyway. Then the snapshot fails (`is_whole`) instead of being silently wrong.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import rocksdict

from tidegate.state.common.backend import StateSize
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.rocksdb.database import (
    MEMORY_BYTES_MIN,
    fetch,
    moved,
    open_database,
    open_files,
    reported,
    room_beside,
    unlogged,
    write_buffer_bytes,
)
from tidegate.storage.rocksdb.frozen import FrozenRocks, LiveFiles
from tidegate.storage.rocksdb.scan import scan_state
from tidegate.storage.rocksdb.tuning import DatabaseTuning
from tidegate.storage.rocksdb.value_layout import (
    ROCKSDB,
    STATES_MAX,
    RocksDescription,
    RocksForm,
    RocksState,
    describe,
    version_for,
)
from tidegate.storage.state.backend_files import DESCRIPTION_NAME

_ACTIVE = "rocksdb.num-entries-active-mem-table"
_UNWRITTEN = "rocksdb.num-immutable-mem-table"
_FAULTS = "rocksdb.background-errors"
_KEYS = "rocksdb.estimate-num-keys"
_BYTES = ("rocksdb.total-sst-files-size", "rocksdb.cur-size-all-mem-tables")
_FILE_ROWS_MIN = 2_048
_TUNING = DatabaseTuning()
_POLL_S = 0.0005
_QUICK_POLLS = 2_000
_SLOW_POLL_S = 0.05
"""After so many polls the disk is slow, and there is time between them."""
_POLLS_MAX = 20_000
"""A quarter of an hour: who gives up sooner fails every snapshot on such a disk."""
_LOOKS_MAX = 20
"""How often files are looked for while compactions replace them."""
Step = Callable[[], None]
_ACTIVE_BYTES = "rocksdb.cur-size-active-mem-table"
_ACTIVE_ENTRIES = "rocksdb.num-entries-active-mem-table"
_ENTRY_BYTES = 128
"""What an entry takes in memory beside its key and value, at most."""


class RocksSession:
    """The database, and what its states share."""

    def __init__(
        self,
        uid: OperatorUid,
        folder: str,
        max_parallelism: int,
        key_groups: range,
        memory_bytes: int,
        keeps_changes: bool = False,
        namespace: bool = False,
        tuning: DatabaseTuning = _TUNING,
    ) -> None:
        """Open it. Raises StorageError, CorruptionError, or CodecError for files of a newer tidegate.

        `keeps_changes`: states keep track of changed keys. `namespace`: as in `BackendPlace`.
        """
        self.keeps_changes = keeps_changes
        self.namespace = namespace
        self.uid = uid
        self.folder = folder
        self.max_parallelism = max_parallelism
        self.key_groups = key_groups
        self.batch_refs: Sequence[bytes] = ()
        """The distinct keys of the batch, with state number 0."""
        self.stored = self._take_over()
        """The description of the files that were taken over; None for an empty database."""
        self.position = 0 if self.stored is None else self.stored.next_position
        """The position of list pieces that are written next: after all others."""
        self._keys: pa.Schema | None = None if self.stored is None else self.stored.keys
        self._states = {} if self.stored is None else {state.name: state for state in self.stored.states}
        self._next_number = 1 + max((state.number for state in self._states.values()), default=0)
        self._lineage = uuid.uuid4().hex if self.stored is None else self.stored.lineage
        self._frozen = 0
        self._ingested = 0
        self._faults = 0
        """How many background writes had failed at the last snapshot."""
        self.unwritten: Unwritten | None = None
        """What the last snapshot has not written yet. It comes before anything else that is written."""
        self.is_empty = self.stored is None
        """Whether nothing was ever written."""
        self.owned_folder: OwnedFolder | None = OwnedFolder(folder)
        """None once it is closed."""
        self.database: rocksdict.Rdict = open_database(folder, memory_bytes, tuning)
        self.owned_folder.has(self.database)
        self.write_buffer_bytes = write_buffer_bytes(memory_bytes, tuning)
        """So much becomes a file."""
        self.file_rows_min = _FILE_ROWS_MIN
        """With fewer rows a file of their own costs more than it saves."""
        self.block_bytes = tuning.block_bytes
        """So much of a file is read together."""
        self._overlap = Overlap(self.database, room_beside(memory_bytes, tuning))

    @property
    def has_keys(self) -> bool:
        """Whether the key columns are known."""
        return self._keys is not None

    @property
    def key_schema(self) -> pa.Schema:
        """The stored key columns."""
        assert self._keys is not None, "the key columns are not known yet"
        return self._keys

    @key_schema.setter
    def key_schema(self, schema: pa.Schema) -> None:
        self._keys = schema

    def known(self, name: str) -> RocksState | None:
        """A state that is in the database or was declared; None if there is none."""
        return self._states.get(name)

    def declare(self, name: str, form: RocksForm, values: pa.Schema) -> RocksState:
        """A state with a new number. It replaces one of the same name."""
        assert self._next_number < STATES_MAX, "too many states in one operator"
        state = RocksState(name, self._next_number, form, values)
        self._next_number += 1
        self._states[name] = state
        return state

    def describe(self) -> RocksDescription:
        """The description that is needed to read the files."""
        states = tuple(self._states.values())
        return RocksDescription(
            version_for(states), self._lineage, self.max_parallelism, self.key_schema, states, self.position
        )

    def scan(self, state: RocksState, rows_max: int) -> Iterator[pa.RecordBatch]:
        """The rows of a state, key columns first, as they are when the first batch is drawn."""
        with reported("read RocksDB", self.folder):
            cursor = self.database.iter()
        for chunk in scan_state(cursor, self.describe(), state, self.key_groups, self.folder):
            for start in range(0, chunk.rows.num_rows, rows_max):
                yield chunk.rows.slice(start, rows_max)

    def has(self, key: bytes) -> bool:
        """Whether anything is stored at a key. StorageError."""
        with reported("read RocksDB", self.folder):
            return self.database.get(key) is not None

    def fetch(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """What is stored at some keys, None where nothing is. StorageError, CorruptionError."""
        return fetch(self.database, keys, self.folder)

    def settle(self) -> None:
        """Write what the last snapshot has not written yet. StorageError, CorruptionError."""
        if self.unwritten is not None:
            self.unwritten.settle()
            self.unwritten = None

    def write(self, batch: rocksdict.WriteBatch) -> None:
        """Apply writes, all of them or none. StorageError."""
        if not batch.is_empty():
            if self.unwritten is not None and not (self.unwritten.beside and self._overlap.takes(batch)):
                self.settle()
            self._write(batch)

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes] | None) -> None:
        """Put rows, or remove them, of which a snapshot that is not written yet knows. StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        if values is None:
            for key in keys:
                batch.delete(key)
        else:
            for key, value in zip(keys, values, strict=True):
                batch.put(key, value)
        self._write(batch)

    def ingest(self, file: Iterable[bytes | bytearray]) -> None:
        """Take in an SST file, over what is there, of which a snapshot that is not written yet knows. StorageError.

        It becomes a file of the database under another name. RocksDB would write its memory to files before, and sync
        the file, but other threads would stand still for that.
        """
        self.is_empty = False
        self._ingested += 1
        path = os.path.join(self.folder, f"{self._ingested}.ingested")
        with reported("write RocksDB", self.folder):
            with open(path, "xb", opener=open_private) as target:
                target.writelines(file)
                target.flush()
                os.fsync(target.fileno())
            if not self.memory_is_empty:
                self.database.flush(wait=False)
                self._memory_is_written()
            self.database.ingest_external_file([path], moved())

    @property
    def memory_is_empty(self) -> bool:
        """Whether RocksDB has nothing in memory that is not in a file."""
        return not self.database.property_int_value(_ACTIVE)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove what is stored at these keys. StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key in keys:
            batch.delete(key)
        self.write(batch)

    def remove_ranges(self, ranges: Iterable[tuple[bytes, bytes]]) -> None:
        """Remove what is stored from the first key of each range up to, not including, the second. StorageError."""
        self.settle()
        self.apply_ranges(ranges)

    def apply_ranges(self, ranges: Iterable[tuple[bytes, bytes]]) -> None:
        """The same, of which a snapshot that is not written yet knows. StorageError."""
        with reported("write RocksDB", self.folder):
            for begin, end in ranges:
                self.database.delete_range(begin, end, unlogged())

    def freeze(self, checkpoint_id: CheckpointId, rows: Iterable[object] | None) -> FrozenRocks:
        """A checkpoint of the database: memory is written to files, and all files are hard-linked. StorageError.

        That is done when the snapshot is written. `rows` are of `unwritten`: they must be written before anything else
        is. None: there are none, and what comes later may be written at once (`Overlap`). The one before is settled.
        """
        self._frozen += 1
        beside = rows is None
        if beside:
            with reported("write RocksDB", self.folder):
                self._overlap.begin()
        target = f"{self.folder}.chk-{checkpoint_id}-{self._frozen}"
        groups = (self.key_groups.start, self.key_groups.stop)
        links = SnapshotLinks(lambda: self.link(target, beside), target)
        self.unwritten = unwritten = Unwritten(rows or (), links.make, beside)
        return FrozenRocks(
            self.uid, target, groups, self.describe(), unwritten.take, lambda: links.live_files, links.give_up
        )

    def link(self, target: str, beside: bool) -> LiveFiles | None:
        """Link all files into a folder. What has come since the freeze may be `beside`. Tells of the files, if it can.

        StorageError; then the folder is not there.
        """
        try:
            with reported("take a snapshot of RocksDB", target):
                if beside:
                    live_files = self._link_beside(target)
                else:
                    self.database.flush(wait=False)
                    self._memory_is_written()
                    live_files = self._link_all(target)
                self._faults = self._faults_so_far()
                return live_files
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    @property
    def size(self) -> StateSize:
        """What RocksDB estimates; nothing once it is closed."""
        if self.owned_folder is None:
            return StateSize(0, None, 0)
        size_bytes = sum(self.database.property_int_value(name) or 0 for name in _BYTES)
        return StateSize(self.database.property_int_value(_KEYS) or 0, None, size_bytes)

    def close(self) -> None:
        """Close the database, once the last snapshot is written. Its folder goes, unless a snapshot reads rows."""
        with suppress(StorageError):
            self.settle()  # who writes the snapshot is told
        close_database(self.database, self.folder)
        self.owned_folder = None

    def _write(self, batch: rocksdict.WriteBatch) -> None:
        self.is_empty = False
        with reported("write RocksDB", self.folder):
            self._overlap.write(batch)

    def _link_all(self, target: str) -> LiveFiles | None:
        """Tells of the files if these have been the same before and after: else a compaction has ended meanwhile."""
        before: LiveFiles = self.database.live_files()
        rocksdict.Checkpoint(self.database).create_checkpoint(target)
        return before if self.database.live_files() == before else None

    def _link_beside(self, target: str) -> LiveFiles | None:
        """Link the files that hold what there was at the freeze, and not what has come into memory since.

        A checkpoint that RocksDB makes of an open database has all of it, so it is made of one that is opened to be
        read: that knows the files alone.
        """
        live_files: LiveFiles | None = None
        if self._memory_is_written():
            for left in reversed(range(_LOOKS_MAX)):
                try:
                    live_files = self._link_files(target)
                    break
                except StorageError:  # a compaction has deleted a file meanwhile
                    shutil.rmtree(target, ignore_errors=True)
                    if not left:
                        raise
        else:
            rocksdict.Checkpoint(self.database).create_checkpoint(target)  # it reports why a write has failed
        if not self._overlap.is_whole:
            raise StorageError(f"what came after a snapshot of RocksDB in {self.folder} is in its files")
        return live_files

    def _link_files(self, target: str) -> LiveFiles:
        files = open_files(self.folder, MEMORY_BYTES_MIN)
        try:
            with reported("take a snapshot of RocksDB", target):
                rocksdict.Checkpoint(files).create_checkpoint(target)
                live_files: LiveFiles = files.live_files()
                return live_files
        finally:
            files.close()

    def _memory_is_written(self) -> bool:
        """Wait until memtables that were handed over are files. Polls: a flush that waits would stop other threads.

        False if that failed, or is not done in time: RocksDB waits too when it creates a checkpoint, and says why.
        """
        for poll in range(_POLLS_MAX):
            if not self.database.property_int_value(_UNWRITTEN):
                return True
            if self._faults_so_far() > self._faults:
                break
            time.sleep(_POLL_S if poll < _QUICK_POLLS else _SLOW_POLL_S)
        return False

    def _faults_so_far(self) -> int:
        return self.database.property_int_value(_FAULTS) or 0

    def _take_over(self) -> RocksDescription | None:
        """The description of files that were put here for the operator. Without one, empty the folder."""
        path = os.path.join(self.folder, DESCRIPTION_NAME)
        with reported("use RocksDB", self.folder):
            if os.path.exists(path):
                with open(path, "rb", opener=open_private) as file:
                    data = file.read()
                os.unlink(path)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
                os.makedirs(self.folder, FOLDER_MODE)
                return None
        groups = (self.key_groups.start, self.key_groups.stop)
        stored = describe(NativeState(self.uid, ROCKSDB, groups, data, ()))
        if stored.max_parallelism != self.max_parallelism:
            raise CorruptionError(
                f"RocksDB files of operator {self.uid!r} were written with max parallelism {stored.max_parallelism}, "
                f"not {self.max_parallelism}: their key groups are others"
            )
        return replace(stored, version=version_for(stored.states))


class OwnedFolder:
    """A folder that is deleted when nobody holds this object any more: neither the database nor a snapshot in use.

    The database is closed first. An open one would try for a second to write to the deleted folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._databases: list[rocksdict.Rdict] = []
        weakref.finalize(self, _delete, path, self._databases)

    def has(self, database: rocksdict.Rdict) -> None:
        """This database is in the folder."""
        self._databases.append(database)


def _delete(path: str, databases: list[rocksdict.Rdict]) -> None:
    for database in databases:
        close_database(database, path)
    shutil.rmtree(path, ignore_errors=True)


def close_database(database: rocksdict.Rdict, folder: str) -> None:
    """Close it, whatever happens to what it has in memory."""
    with suppress(StorageError), reported("close RocksDB", folder):
        database.close()  # it writes its memory to disk first; if that fails, nobody needs it


class SnapshotLinks:
    """The folder of a snapshot, as long as somebody wants it."""

    def __init__(self, link: Callable[[], LiveFiles | None], target: str) -> None:
        self._link = link
        self._target = target
        self._wanted = True
        self.live_files: LiveFiles | None = None
        """Of what was linked, if `link` could tell."""

    def make(self) -> None:
        """Link the files. StorageError."""
        if self._wanted:
            self.live_files = self._link()
            if not self._wanted:  # it was given up meanwhile
                self.give_up()

    def give_up(self) -> None:
        """Delete the folder. Any thread may call it, at any time."""
        self._wanted = False
        shutil.rmtree(self._target, ignore_errors=True)


class Unwritten:
    """`rows` writes them, a part with each item drawn. Then `use` makes what the snapshot needs, if it is wanted.

    With `beside` there are no rows, and other writes need not wait if there is room for them (`overlap.py`).
    """

    def __init__(self, rows: Iterable[object], use: Step, beside: bool = False) -> None:
        self.beside = beside
        self._lock = threading.Lock()
        self._rows: Iterable[object] | None = rows
        self._use: Step | None = use
        self._lost: Exception | None = None
        self._unused: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to do. Another thread may be doing it, if not."""
        return self._rows is None and self._use is None

    def take(self) -> None:
        """For the writer of the snapshot: when this returns, what it needs is there. StorageError, CorruptionError."""
        with self._lock:
            self._write()
            if self._unused is not None:
                raise self._unused

    def settle(self) -> None:
        """For the task: when this returns, it may write to the database. StorageError, CorruptionError."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost)) from self._lost
        if self._rows is not None:
            try:
                for _ in self._rows:
                    pass
            except Exception as error:
                self._lost = error
                raise
            self._rows = None
        if self._use is not None:
            try:
                self._use()
            except StorageError as error:
                self._unused = error
            finally:
                self._use = None


class Overlap:
    """Writes to a database, and counts. Of the new memory `room_bytes` may be used before files are linked."""

    def __init__(self, database: rocksdict.Rdict, room_bytes: int) -> None:
        self._database = database
        self._room_bytes = room_bytes
        self._lock = threading.Lock()
        self._entries = 0

    def begin(self) -> None:
        """This is the moment: hand memory over, and begin with new memory."""
        with self._lock:
            self._database.flush(wait=False)
            self._entries = 0

    def takes(self, batch: rocksdict.WriteBatch) -> bool:
        """Whether these writes have room before the files are linked."""
        added_bytes = batch.size_in_bytes() + batch.len() * _ENTRY_BYTES
        return (self._database.property_int_value(_ACTIVE_BYTES) or 0) + added_bytes <= self._room_bytes

    def write(self, batch: rocksdict.WriteBatch) -> None:
        """Apply writes, all of them or none."""
        entries = batch.len()
        with self._lock:
            self._database.write(batch, unlogged())
            self._entries += entries

    @property
    def is_whole(self) -> bool:
        """Whether all that was written since the freeze is in memory alone. Any thread may ask."""
        with self._lock:
            return self._database.property_int_value(_ACTIVE_ENTRIES) == self._entries
