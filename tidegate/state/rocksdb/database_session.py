"""`RocksSession`: the database of one operator in one subtask. It is opened, described and frozen here.

The folder belongs to one backend, and is deleted when neither the backend nor a snapshot needs it. The database starts
empty, or on the files of a checkpoint. Rules:
- Files that `fetch_native` has put into the folder are used. Anything else in it is deleted.
- A state keeps its number for the lifetime of the files, and no number is ever used twice.

`PendingWrites` has the rows of a snapshot that are not in the database yet, and the step that follows once they are. A
freeze makes one, so that its cost does not grow with the rows. The thread that writes the snapshot writes them while
processing continues.
- The first caller writes the rows: the writer of the snapshot, or the task, which calls `settle` before it writes
  anything else. In both cases the database then has the contents of the freeze.
- Rows are written even if the snapshot is not needed any more, because they are stored nowhere else. A failure is
  raised to every caller, because the database lacks rows then.
- A failure in the following step is only raised to the writer of the snapshot.

`WriteLimiter` limits writes after a freeze, while the files of the snapshot are still being made. A freeze makes
RocksDB write its memory to files, and processing continues with new memory. When all of the old memory is in files,
these are linked.
- The new memory must not become a file before that, because the links must show the moment of the freeze. RocksDB
  writes full memory to a file, so only a limited amount is accepted (`accepts`). Larger writes wait for the links.
- Entries are counted. If the new memory has fewer entries than were written since the freeze, RocksDB has written a
  file anyway. The snapshot then fails (`is_whole`) instead of being silently wrong.
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

import pyarrow as pa
import rocksdict

from tidegate.state.common.backend import StateSize
from tidegate.state.rocksdb.frozen_database import FrozenRocks, LiveFiles
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.backend_files import DESCRIPTION_NAME
from tidegate.storage.state.rocksdb.database import (
    MEMORY_BYTES_MIN,
    fetch,
    moved_files,
    open_database,
    open_files,
    reported,
    unflushed_bytes_max,
    unlogged_writes,
    write_buffer_bytes,
)
from tidegate.storage.state.rocksdb.scan import scan_state
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning
from tidegate.storage.state.rocksdb.value_layout import (
    FORMAT_VERSION,
    ROCKSDB,
    STATES_MAX,
    RocksDescription,
    RocksForm,
    RocksState,
    describe,
)

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
"""Seconds between two polls after the first `_QUICK_POLLS`, when the disk is slow."""
_POLLS_MAX = 20_000
"""The most polls, which take a quarter of an hour. A lower limit would fail every snapshot on a slow disk."""
_LINK_ATTEMPTS = 20
"""The number of attempts to link files while compactions replace them."""
Step = Callable[[], None]
_ACTIVE_BYTES = "rocksdb.cur-size-active-mem-table"
_ACTIVE_ENTRIES = "rocksdb.num-entries-active-mem-table"
_ENTRY_BYTES = 128
"""The largest memory overhead of an entry over its key and value."""


class RocksSession:
    """The RocksDB database of one operator, with its key columns, states and folder."""

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
        """Opens the database. Raises StorageError, CorruptionError, or CodecError for files of a newer tidegate.

        With `keeps_changes`, states record which keys have changed. `namespace` has the meaning of
        `BackendPlace.namespace`.
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
        """The position of the next list pieces and rows, greater than all before."""
        self._keys: pa.Schema | None = None if self.stored is None else self.stored.keys
        self._states = {} if self.stored is None else {state.name: state for state in self.stored.states}
        self._next_number = 1 + max((state.number for state in self._states.values()), default=0)
        self._lineage = uuid.uuid4().hex if self.stored is None else self.stored.lineage
        self._frozen = 0
        self._ingested = 0
        self._faults = 0
        """Number of background writes that had failed at the last snapshot."""
        self.unwritten: PendingWrites | None = None
        """The pending writes of the last snapshot. They must be done before any other write."""
        self.is_empty = self.stored is None
        """True if nothing was ever written."""
        self.owned_folder: OwnedFolder | None = OwnedFolder(folder)
        """The folder of the database; None after `close`."""
        self.database: rocksdict.Rdict = open_database(folder, memory_bytes, tuning)
        self.owned_folder.has(self.database)
        self.write_buffer_bytes = write_buffer_bytes(memory_bytes, tuning)
        """Bytes of memory after which RocksDB writes its memory to a file."""
        self.file_rows_min = _FILE_ROWS_MIN
        """Number of rows below which a separate file costs more than it saves."""
        self.block_bytes = tuning.block_bytes
        """Bytes of a block, the unit in which a file is read."""
        self._limiter = WriteLimiter(self.database, unflushed_bytes_max(memory_bytes, tuning))

    @property
    def has_keys(self) -> bool:
        """Returns whether the key columns are known."""
        return self._keys is not None

    @property
    def key_schema(self) -> pa.Schema:
        """Returns the stored key columns."""
        assert self._keys is not None, "the key columns are not known yet"
        return self._keys

    @key_schema.setter
    def key_schema(self, schema: pa.Schema) -> None:
        self._keys = schema

    def known(self, name: str) -> RocksState | None:
        """Returns the state with this name, stored or declared, or None if there is none."""
        return self._states.get(name)

    def declare(self, name: str, form: RocksForm, values: pa.Schema) -> RocksState:
        """Declares a state with a new number, in place of any earlier state of the same name."""
        assert self._next_number < STATES_MAX, "too many states in one operator"
        state = RocksState(name, self._next_number, form, values)
        self._next_number += 1
        self._states[name] = state
        return state

    def describe(self) -> RocksDescription:
        """Returns the description of keys and states that is needed to read the database files later."""
        states = tuple(self._states.values())
        return RocksDescription(
            FORMAT_VERSION, self._lineage, self.max_parallelism, self.key_schema, states, self.position
        )

    def scan(self, state: RocksState, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a state, key columns first. Shows the state as of the moment when the first batch is
        requested.
        """
        with reported("read RocksDB", self.folder):
            cursor = self.database.iter()
        for chunk in scan_state(cursor, self.describe(), state, self.key_groups, self.folder):
            for start in range(0, chunk.rows.num_rows, rows_max):
                yield chunk.rows.slice(start, rows_max)

    def has(self, key: bytes) -> bool:
        """Returns whether a database key has a value. Raises StorageError."""
        with reported("read RocksDB", self.folder):
            return self.database.get(key) is not None

    def fetch(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the value of each database key, None where there is none. Raises StorageError or CorruptionError."""
        return fetch(self.database, keys, self.folder)

    def settle(self) -> None:
        """Carries out the writes of the last snapshot that are still pending. Raises StorageError or
        CorruptionError.
        """
        if self.unwritten is not None:
            self.unwritten.settle()
            self.unwritten = None

    def write(self, batch: rocksdict.WriteBatch) -> None:
        """Applies a write batch atomically. Raises StorageError."""
        if not batch.is_empty():
            self.give_way(batch.len(), batch.size_in_bytes())
            self._write(batch)

    def give_way(self, entries: int, size_bytes: int) -> None:
        """Finishes a pending snapshot before writes of this size are applied, unless its `WriteLimiter` accepts them.
        Raises StorageError.
        """
        if self.unwritten is not None and not (self.unwritten.overlaps and self._limiter.accepts(entries, size_bytes)):
            self.settle()

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes] | None) -> None:
        """Writes entries, or removes keys if `values` is None.

        Only for writes that belong to a pending snapshot, or after a call of `give_way`. Raises StorageError.
        """
        batch = rocksdict.WriteBatch(raw_mode=True)
        if values is None:
            for key in keys:
                batch.delete(key)
        else:
            for key, value in zip(keys, values, strict=True):
                batch.put(key, value)
        self._write(batch)

    def ingest(self, file: Iterable[bytes | bytearray]) -> None:
        """Ingests an SST file that is part of a pending snapshot. Its entries replace existing ones. Raises
        StorageError.

        The file becomes a file of the database under another name. RocksDB would write its memory to files first, and
        sync the file, but that would block other threads, so both are done here.
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
            self.database.ingest_external_file([path], moved_files())

    @property
    def memory_is_empty(self) -> bool:
        """Returns whether RocksDB has no entries in its active memtable (write buffer)."""
        return not self.database.property_int_value(_ACTIVE)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes the entries with these keys, if they exist. Raises StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key in keys:
            batch.delete(key)
        self.write(batch)

    def remove_ranges(self, ranges: Iterable[tuple[bytes, bytes]]) -> None:
        """Removes all entries in ranges of keys. A range is a pair of its first key and the key after its end. Raises
        StorageError.
        """
        self.settle()
        self.apply_ranges(ranges)

    def apply_ranges(self, ranges: Iterable[tuple[bytes, bytes]]) -> None:
        """Removes ranges of keys, as `remove_ranges` does, as part of a pending snapshot. Raises StorageError."""
        with reported("write RocksDB", self.folder):
            for begin, end in ranges:
                self.database.delete_range(begin, end, unlogged_writes())

    def freeze(self, checkpoint_id: CheckpointId, rows: Iterable[object] | None) -> FrozenRocks:
        """Returns a snapshot of the database. Its files are created and hard-linked later, when the snapshot is
        written.

        `rows` are changes in memory, which must be written before anything else. With None there are no such changes,
        and later writes may be applied at once (`WriteLimiter`). `settle` must have been called for the previous
        snapshot. Raises StorageError.
        """
        self._frozen += 1
        overlaps = rows is None
        if overlaps:
            with reported("write RocksDB", self.folder):
                self._limiter.begin()
        target = f"{self.folder}.chk-{checkpoint_id}-{self._frozen}"
        groups = (self.key_groups.start, self.key_groups.stop)
        links = SnapshotLinks(lambda: self.link(target, overlaps), target)
        self.unwritten = unwritten = PendingWrites(rows or (), links.make, overlaps)
        return FrozenRocks(
            self.uid, target, groups, self.describe(), unwritten.take, lambda: links.live_files, links.give_up
        )

    def link(self, target: str, overlaps: bool) -> LiveFiles | None:
        """Hard-links all files of the database into a folder. With `overlaps`, other writes may have been applied since
        the freeze.

        Returns the linked files, or None if they are unknown. After a StorageError the folder is removed.
        """
        try:
            with reported("take a snapshot of RocksDB", target):
                if overlaps:
                    live_files = self._link_overlapped(target)
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
        """Returns RocksDB's estimates of keys and bytes. Zero after `close`."""
        if self.owned_folder is None:
            return StateSize(0, None, 0)
        size_bytes = sum(self.database.property_int_value(name) or 0 for name in _BYTES)
        return StateSize(self.database.property_int_value(_KEYS) or 0, None, size_bytes)

    def close(self) -> None:
        """Closes the database once the last snapshot is written. Deletes its folder, unless a snapshot still reads rows
        from it.
        """
        with suppress(StorageError):
            self.settle()  # the error is also raised to the writer of the snapshot
        close_database(self.database, self.folder)
        self.owned_folder = None

    def _write(self, batch: rocksdict.WriteBatch) -> None:
        self.is_empty = False
        with reported("write RocksDB", self.folder):
            self._limiter.write(batch)

    def _link_all(self, target: str) -> LiveFiles | None:
        """Hard-links all files. Returns them, or None if a compaction has changed the files during the call."""
        before: LiveFiles = self.database.live_files()
        rocksdict.Checkpoint(self.database).create_checkpoint(target)
        return before if self.database.live_files() == before else None

    def _link_overlapped(self, target: str) -> LiveFiles | None:
        """Hard-links the files with the contents at the freeze, without later writes, which are still in memory.

        RocksDB's checkpoint of an open database includes its memory. The checkpoint is therefore made of a second,
        read-only instance, which only sees the files.
        """
        live_files: LiveFiles | None = None
        if self._memory_is_written():
            for attempts_left in reversed(range(_LINK_ATTEMPTS)):
                try:
                    live_files = self._link_files(target)
                    break
                except StorageError:  # a compaction has deleted a file in between
                    shutil.rmtree(target, ignore_errors=True)
                    if not attempts_left:
                        raise
        else:
            rocksdict.Checkpoint(self.database).create_checkpoint(target)  # raises the cause of the failed write
        if not self._limiter.is_whole:
            raise StorageError(
                f"RocksDB in {self.folder} wrote rows to a file while a snapshot was taken, so the snapshot would "
                "contain later changes; it is taken again with the next checkpoint"
            )
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
        """Waits until RocksDB has written full memtables to files. Returns False if that failed or takes too long.

        Polls, because a flush that waits would block other threads. RocksDB then raises the cause when it creates a
        checkpoint.
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
        """Reads the description of files that a restore has put into the folder, and returns it.

        Without a description, empties the folder and returns None.
        """
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
                f"not {self.max_parallelism}, so their key groups differ; restore with the max parallelism of the "
                "checkpoint"
            )
        return stored


class OwnedFolder:
    """A folder that is deleted when this object is garbage-collected. The database and all snapshots in use refer to
    it.

    The database is closed first, because an open database would try for a second to write to the deleted folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._databases: list[rocksdict.Rdict] = []
        weakref.finalize(self, _delete, path, self._databases)

    def has(self, database: rocksdict.Rdict) -> None:
        """Registers the database in the folder, so that it is closed before the folder is deleted."""
        self._databases.append(database)


def _delete(path: str, databases: list[rocksdict.Rdict]) -> None:
    for database in databases:
        close_database(database, path)
    shutil.rmtree(path, ignore_errors=True)


def close_database(database: rocksdict.Rdict, folder: str) -> None:
    """Closes a database. Ignores errors, because they concern memory that is not needed any more."""
    with suppress(StorageError), reported("close RocksDB", folder):
        database.close()


class SnapshotLinks:
    """The folder with hard links to the files of a snapshot. It exists until the snapshot is given up."""

    def __init__(self, link: Callable[[], LiveFiles | None], target: str) -> None:
        self._link = link
        self._target = target
        self._wanted = True
        self.live_files: LiveFiles | None = None
        """The linked files, or None if they are unknown."""

    def make(self) -> None:
        """Creates the hard links. Raises StorageError."""
        if self._wanted:
            self.live_files = self._link()
            if not self._wanted:  # given up by another thread
                self.give_up()

    def give_up(self) -> None:
        """Deletes the folder with the hard links. Any thread may call it, at any time."""
        self._wanted = False
        shutil.rmtree(self._target, ignore_errors=True)


class PendingWrites:
    """The pending writes of a snapshot, and the step `use` that follows them.

    Each step of the iterator `rows` writes a part of them. With `overlaps` there are no rows to write, and the task may
    write at once if `WriteLimiter` accepts that.
    """

    def __init__(self, rows: Iterable[object], use: Step, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self._lock = threading.Lock()
        self._rows: Iterable[object] | None = rows
        self._use: Step | None = use
        self._lost: Exception | None = None
        self._unused: Exception | None = None

    @property
    def done(self) -> bool:
        """Returns whether all writes and the step `use` are done. If not, another thread may be doing them."""
        return self._rows is None and self._use is None

    def take(self) -> None:
        """Finishes the writes and the step `use`, for the thread that writes the snapshot. Raises StorageError or
        CorruptionError.
        """
        with self._lock:
            self._write()
            if self._unused is not None:
                raise self._unused

    def settle(self) -> None:
        """Finishes the writes, for the task, which may write to the database afterwards. Raises StorageError or
        CorruptionError.
        """
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


class WriteLimiter:
    """Applies writes to a database, and counts entries while a snapshot is pending.

    Until the files of a snapshot are linked, at most `room_bytes` bytes of memory may be used for new writes.
    """

    def __init__(self, database: rocksdict.Rdict, room_bytes: int) -> None:
        self._database = database
        self._room_bytes = room_bytes
        self._lock = threading.Lock()
        self._entries = 0

    def begin(self) -> None:
        """Begins a freeze: RocksDB starts to write its memory to files, and continues with new memory."""
        with self._lock:
            self._database.flush(wait=False)
            self._entries = 0

    def accepts(self, entries: int, size_bytes: int) -> bool:
        """Returns whether writes of this size fit into the memory that may be used before the files of the snapshot are
        linked.
        """
        added_bytes = size_bytes + entries * _ENTRY_BYTES
        return (self._database.property_int_value(_ACTIVE_BYTES) or 0) + added_bytes <= self._room_bytes

    def write(self, batch: rocksdict.WriteBatch) -> None:
        """Applies a write batch atomically."""
        entries = batch.len()
        with self._lock:
            self._database.write(batch, unlogged_writes())
            self._entries += entries

    @property
    def is_whole(self) -> bool:
        """Returns whether all writes since the freeze are still only in memory, so that the linked files show the
        moment of the freeze. Thread-safe.
        """
        with self._lock:
            return self._database.property_int_value(_ACTIVE_ENTRIES) == self._entries
