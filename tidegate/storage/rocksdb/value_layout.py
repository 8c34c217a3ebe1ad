"""`RocksDescription`: what a reader of RocksDB files needs: key columns, states, and how their values are packed.

Every key begins with a head of four bytes: key group and number of the state, both big-endian. Then come the key
columns (`keys.py`), and for an entry of a map its map key, for a piece of a list its position (`values.py`).

    TABLE   validity bits, then the values of the columns, each of its fixed width; if one has none, as ROWS
    VALUE   msgpack of the value
    LIST    msgpack of some values of the list; the list is all pieces in the order of their positions
    MAP     msgpack of the value of one entry
    TIMERS  nothing: the key has everything, in another form (`timer_keys.py`)
    ROWS    the value columns, encoded as keys are (`row_values.py`); the key ends with the number of the row
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CodecError, CorruptionError
from tidegate.storage.rocksdb.tables import is_varying
from tidegate.storage.state.stored_rows import row_identity

ROCKSDB = "rocksdb"
"""`NativeState.backend` of these files."""

FORMAT_VERSION = 4
"""1 had no timers, 2 no row tables, 3 no tables with columns of varying width.

Files are of the oldest version that has what is in them, but no older than 2, so that older tidegates read them.
"""
_WITH_ROWS = 3
_WITHOUT_ROWS = 2

STATES_MAX = 1 << 16
HEAD = struct.Struct(">HH")
"""Key group and state number, with which every key begins."""


@wire
class RocksForm(enum.Enum):
    """How the rows of a state lie in the database."""

    TABLE = "table"
    VALUE = "value"
    LIST = "list"
    MAP = "map"
    TIMERS = "timers"
    ROWS = "rows"


@wire
@dataclass(frozen=True, slots=True)
class RocksState:
    """One state: the number in its keys, and the value columns of its stored table (one, but for TABLE)."""

    name: str
    number: int
    form: RocksForm
    values: pa.Schema


def version_for(states: Iterable[RocksState]) -> int:
    """The oldest format version that has these states."""
    found = list(states)
    if any(state.form is RocksForm.TABLE and is_varying(state.values) for state in found):
        return FORMAT_VERSION
    return _WITH_ROWS if any(state.form is RocksForm.ROWS for state in found) else _WITHOUT_ROWS


@wire
@dataclass(frozen=True, slots=True)
class RocksDescription:
    """The states of one operator in one database.

    `lineage` is of all databases that descend from one: within it a file name always means the same bytes.
    `next_position` is greater than that of any piece of a list.
    """

    version: int
    lineage: str
    max_parallelism: int
    keys: pa.Schema
    states: tuple[RocksState, ...]
    next_position: int

    def stored_keys(self, state: RocksState) -> pa.Schema:
        """The columns that the keys of a state's entries have, but for timers."""
        return row_identity(self.keys) if state.form is RocksForm.ROWS else self.keys

    def to_bytes(self) -> bytes:
        """For `NativeState.description`."""
        return encode(self)


def describe(native: NativeState) -> RocksDescription:
    """The description of stored files. CodecError for those of a newer tidegate, CorruptionError for none."""
    if native.backend != ROCKSDB:
        raise CodecError(
            f"state of operator {native.uid!r} is of backend {native.backend!r}, which this tidegate lacks"
        )
    description = decode(native.description)
    if not isinstance(description, RocksDescription):
        raise CorruptionError(f"state of operator {native.uid!r} has no description of its RocksDB files")
    if description.version > FORMAT_VERSION:
        raise CodecError(
            f"RocksDB state of operator {native.uid!r} has format version {description.version}; "
            f"this tidegate reads up to {FORMAT_VERSION}"
        )
    return description
