"""`RocksSession`: one RocksDB database with its states, opened empty or on files of a checkpoint, described, frozen.

Rules: the folder belongs to one backend. Files that `fetch_native` has brought there are taken over; anything else that
lies there is deleted. States keep their numbers as long as the files live, and a number is never given twice.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import rocksdict

from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.rocksdb.database import open_database, reported
from tidegate.storage.rocksdb.frozen import FrozenRocks
from tidegate.storage.rocksdb.scan import scan_state
from tidegate.storage.rocksdb.value_layout import (
    FORMAT_VERSION,
    ROCKSDB,
    STATES_MAX,
    RocksDescription,
    RocksForm,
    RocksState,
    describe,
)
from tidegate.storage.subtasks.backend_files import DESCRIPTION_NAME

_UNWRITTEN = "rocksdb.num-immutable-mem-table"
_FAULTS = "rocksdb.background-errors"
_POLL_S = 0.0005
_POLLS_MAX = 20_000


class OwnedFolder:
    """A folder that is deleted as soon as nobody holds this object: the database, or a snapshot that is still read.

    The database is closed first. One that is still open tries for a second to write to the folder that has gone.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._databases: list[rocksdict.Rdict] = []
        weakref.finalize(self, _delete, path, self._databases)

    def has(self, database: rocksdict.Rdict) -> None:
        """The database that lies in the folder."""
        self._databases.append(database)


def _delete(path: str, databases: list[rocksdict.Rdict]) -> None:
    for database in databases:
        _close(database, path)
    shutil.rmtree(path, ignore_errors=True)


def _close(database: rocksdict.Rdict, folder: str) -> None:
    with suppress(StorageError), reported("close RocksDB", folder):
        database.close()  # it writes what is in memory once more, and nobody needs that


class RocksSession:
    """The database of one operator in one subtask, and what its states share."""

    def __init__(
        self,
        uid: OperatorUid,
        folder: str,
        max_parallelism: int,
        key_groups: range,
        memory_bytes: int,
        keeps_changes: bool = False,
    ) -> None:
        """Open it. Raises StorageError, CorruptionError, or CodecError for files of a newer tidegate.

        `keeps_changes`: whether states note which keys have changed.
        """
        self.keeps_changes = keeps_changes
        self.uid = uid
        self.folder = folder
        self.max_parallelism = max_parallelism
        self.key_groups = key_groups
        self.batch_refs: Sequence[bytes] = ()
        """The distinct keys of the batch, with state number 0."""
        self.stored = self._take_over()
        """What the files that were there said of themselves; None for an empty database."""
        self.position = 0 if self.stored is None else self.stored.next_position
        """Where pieces of lists go that are written now: behind all others."""
        self._keys: pa.Schema | None = None if self.stored is None else self.stored.keys
        self._states = {} if self.stored is None else {state.name: state for state in self.stored.states}
        self._next_number = 1 + max((state.number for state in self._states.values()), default=0)
        self._lineage = uuid.uuid4().hex if self.stored is None else self.stored.lineage
        self._frozen = 0
        self._faults = 0
        """Writes in the background that had failed when the last snapshot was taken."""
        self.owned_folder: OwnedFolder | None = OwnedFolder(folder)
        """None once it is closed."""
        self.database: rocksdict.Rdict = open_database(folder, memory_bytes)
        self.owned_folder.has(self.database)

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
        """A state that is in the database or was declared."""
        return self._states.get(name)

    def declare(self, name: str, form: RocksForm, values: pa.Schema) -> RocksState:
        """A state with a number of its own; it takes the place of one of the same name."""
        assert self._next_number < STATES_MAX, "too many states in one operator"
        state = RocksState(name, self._next_number, form, values)
        self._next_number += 1
        self._states[name] = state
        return state

    def describe(self) -> RocksDescription:
        """What one needs to read the files."""
        states = tuple(self._states.values())
        return RocksDescription(
            FORMAT_VERSION, self._lineage, self.max_parallelism, self.key_schema, states, self.position
        )

    def scan(self, state: RocksState, rows_max: int) -> Iterator[pa.RecordBatch]:
        """The rows of a state as they are when the first is asked for, key columns first."""
        with reported("read RocksDB", self.folder):
            cursor = self.database.iter()
        for chunk in scan_state(cursor, self.describe(), state, self.key_groups, self.folder):
            for start in range(0, chunk.rows.num_rows, rows_max):
                yield chunk.rows.slice(start, rows_max)

    def freeze(self, checkpoint_id: CheckpointId) -> FrozenRocks:
        """The files as they are: what is in memory is written, and all files are linked. StorageError."""
        self._frozen += 1
        target = f"{self.folder}.chk-{checkpoint_id}-{self._frozen}"
        groups = (self.key_groups.start, self.key_groups.stop)
        try:
            with reported("take a snapshot of RocksDB", target):
                self._write_memory()
                rocksdict.Checkpoint(self.database).create_checkpoint(target)
                self._faults = self._faults_so_far()
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return FrozenRocks(self.uid, target, groups, self.describe())

    def close(self) -> None:
        """Close the database, and delete it unless a snapshot of rows is still being read."""
        _close(self.database, self.folder)
        self.owned_folder = None

    def _write_memory(self) -> None:
        """Write what is in memory to files. Other threads go on: rocksdict would hold them up while it waits.

        Not waiting to the end is no error: making a checkpoint waits too. After a write that has failed it says why.
        """
        self.database.flush(wait=False)
        for _ in range(_POLLS_MAX):
            if not self.database.property_int_value(_UNWRITTEN) or self._faults_so_far() > self._faults:
                return
            time.sleep(_POLL_S)

    def _faults_so_far(self) -> int:
        return self.database.property_int_value(_FAULTS) or 0

    def _take_over(self) -> RocksDescription | None:
        """The description of files that are there for the operator; an empty folder otherwise."""
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
        return replace(stored, version=FORMAT_VERSION)
