"""The tables that a job reads, and the position that a checkpoint contains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.connectors.formats.changes import ROW_KIND, UNCHANGED
from tidegate.storage.codec import wire
from tidegate.storage.schemas.column_names import own_name

TABLE = own_name("table")
"""Name of the column with the number of the table that a row is of."""
Phase = Literal["new", "snapshot", "clear", "log"]


@dataclass(frozen=True, slots=True)
class CdcColumn:
    """A column of a table, with its PostgreSQL type. `base_oid` differs from `oid` for domains."""

    name: str
    oid: int
    modifier: int
    base_oid: int
    required: bool


@dataclass(frozen=True, slots=True)
class CdcTable:
    """A table: its columns, in their order, and its primary key."""

    schema: str
    name: str
    columns: tuple[CdcColumn, ...]
    keys: tuple[str, ...]

    @property
    def text(self) -> str:
        """Schema and name, for errors."""
        return f"{self.schema}.{self.name}"


@wire
@dataclass(frozen=True, slots=True)
class CdcPosition:
    """How far a slot is read. It is the payload of the split, and so in each checkpoint.

    - "new": there are no rows so far. `existed`: the slot was there before the job was submitted.
    - "snapshot": some rows of the snapshot at `lsn` are read. Only the reader that began it can continue.
    - "clear": a snapshot was lost. The rows of the first `skip` tables are deleted already.
    - "log": all transactions that end before `lsn` are read, and `skip` rows after it.

    `system` and `database` identify the server whose log has these numbers. `tables` are the tables that are read.
    """

    phase: Phase
    slot: str
    tables: tuple[str, ...]
    lsn: int = 0
    skip: int = 0
    system: str = ""
    existed: bool = False


def rows_column(number: int) -> str:
    """Returns the name of the column with the rows of a table."""
    return own_name(f"rows_{number}")


def source_schema(rows: list[pa.Schema]) -> pa.Schema:
    """Returns the columns of the source: a struct for each table, null in rows of other tables."""
    fields = [pa.field(rows_column(number), pa.struct(list(each))) for number, each in enumerate(rows)]
    kinds = [pa.field(ROW_KIND, pa.string()), pa.field(UNCHANGED, pa.list_(pa.string()))]
    return pa.schema([pa.field(TABLE, pa.int32()), *kinds, *fields])


def lsn_text(lsn: int) -> str:
    """Returns a position in the log as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_number(text: str) -> int:
    """Returns a position in the log as a number."""
    high, low = text.split("/")
    return (int(high, 16) << 32) + int(low, 16)
