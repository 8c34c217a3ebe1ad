"""Parses messages of pgoutput, protocol version 1 (PostgreSQL's manual, "Logical Replication Message Formats").

A transaction is sent as a whole, after its commit: `Begin`, its rows, `Commit`. Before the first row of a table, and
after each change of it, a `Relation` describes the table.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

from tidegate.storage.errors import CorruptionError

UNCHANGED_VALUE: Final = object()
"""Represents a large value that an update did not change and that the log does not have."""
Values: TypeAlias = list[object]
"""The values of a row: bytes of text, None for null, or UNCHANGED_VALUE."""

_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")
_UINT32 = struct.Struct(">I")
_UINT16 = struct.Struct(">H")
_COLUMN = struct.Struct(">II")
_TRUNCATE = struct.Struct(">IB")


@dataclass(frozen=True, slots=True)
class Begin:
    """A message at the beginning of a transaction."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Message: the transaction ends. `end_lsn` is the log position after it."""

    end_lsn: int


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column in a `Relation` message. `is_key`: it is part of the replica identity."""

    is_key: bool
    name: str
    oid: int
    modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A `Relation` message: describes a table for the following messages.

    `oid` identifies the table in row messages. `identity`: its replica identity, "d" for the primary key, "f" for all
    columns, "i" for an index, "n" for none.
    """

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class RowChange:
    """Message: a change of a row. `old`: the old row or its key, or None. `new`: the new row, None for a deletion."""

    relation: int
    old: Values | None
    new: Values | None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Message: tables were truncated. `relations` are their oids."""

    relations: tuple[int, ...]


Message: TypeAlias = Begin | Commit | Relation | RowChange | Truncate


def parse(data: bytes) -> Message | None:
    """Parses a message. Returns None for messages that are not needed (origins and types).

    Raises CorruptionError for bytes that are not a message of this protocol version.
    """
    kind = data[:1]
    try:
        match kind:
            case b"I":
                new, _ = _values(data, 6)
                return RowChange(_UINT32.unpack_from(data, 1)[0], None, new)
            case b"U":
                old, at = None, 5
                if data[at : at + 1] in (b"K", b"O"):
                    old, at = _values(data, at + 1)
                new, _ = _values(data, at + 1)
                return RowChange(_UINT32.unpack_from(data, 1)[0], old, new)
            case b"D":
                old, _ = _values(data, 6)
                return RowChange(_UINT32.unpack_from(data, 1)[0], old, None)
            case b"B":
                _BEGIN.unpack_from(data, 1)
                return Begin()
            case b"C":
                return Commit(_COMMIT.unpack_from(data, 1)[2])
            case b"R":
                return _relation(data)
            case b"T":
                count, _ = _TRUNCATE.unpack_from(data, 1)
                at = 1 + _TRUNCATE.size
                return Truncate(tuple(_UINT32.unpack_from(data, at + 4 * number)[0] for number in range(count)))
            case b"O" | b"Y" | b"M":
                return None
    except (struct.error, ValueError) as error:
        raise CorruptionError(
            f"the PostgreSQL server sent a replication message of kind {kind!r} with {len(data)} bytes that cannot be "
            f"read: {error}; restart the job, and report it if it is repeated"
        ) from error
    raise CorruptionError(
        f"the PostgreSQL server sent a replication message of kind {kind!r}, which the first protocol of pgoutput "
        "does not have; use a version of PostgreSQL that tidegate supports"
    )


def _values(data: bytes, at: int) -> tuple[Values, int]:
    """Parses the values of a row at the position `at`. Returns them and the position after them."""
    (count,) = _UINT16.unpack_from(data, at)
    at += 2
    values: Values = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t
            (size,) = _UINT32.unpack_from(data, at)
            at += 4
            value = data[at : at + size]
            if len(value) != size:
                raise ValueError(f"a value at byte {at} has {len(value)} of {size} bytes, so the message was cut")
            values.append(value)
            at += size
        elif kind == 0x6E:  # n
            values.append(None)
        elif kind == 0x75:  # u
            values.append(UNCHANGED_VALUE)
        else:
            raise ValueError(f"the value before byte {at} is of kind {kind:#x}, and pgoutput has the kinds t, n and u")
    return values, at


def _relation(data: bytes) -> Relation:
    (oid,) = _UINT32.unpack_from(data, 1)
    schema, at = _text(data, 5)
    name, at = _text(data, at)
    identity = chr(data[at])
    (count,) = _UINT16.unpack_from(data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        is_key = data[at] & 1 == 1
        column, at = _text(data, at + 1)
        type_oid, modifier = _COLUMN.unpack_from(data, at)
        at += _COLUMN.size
        columns.append(RelationColumn(is_key, column, type_oid, modifier - (1 << 32) if modifier >> 31 else modifier))
    return Relation(oid, schema or "pg_catalog", name, identity, tuple(columns))


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(b"\x00", at)
    return data[at:end].decode(), end + 1
