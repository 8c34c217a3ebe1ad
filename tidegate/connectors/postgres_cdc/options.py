"""Describes the PostgreSQL tables that a job reads, and the position that a checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.connectors.formats.row_versions import ROW_KIND, UNCHANGED
from tidegate.storage.codec import wire
from tidegate.storage.schemas.column_names import own_name

TABLE = own_name("table")
"""Name of the column with the number of the row's table."""
Phase = Literal["new", "snapshot", "clear", "log"]


@dataclass(frozen=True, slots=True)
class CdcColumn:
    """A column of a table, with its PostgreSQL type. `base_oid` differs from `oid` for domains.

    `number`: identifies the column. A column that is dropped and added again has another one.
    """

    name: str
    number: int
    oid: int
    modifier: int
    base_oid: int
    required: bool


@dataclass(frozen=True, slots=True)
class CdcTable:
    """A table: its columns, in their order, and its primary key. `oid` identifies it."""

    oid: int
    schema: str
    name: str
    columns: tuple[CdcColumn, ...]
    keys: tuple[str, ...]

    @property
    def text(self) -> str:
        """Returns the schema and the name of the table as text, for errors."""
        return f"{self.schema}.{self.name}"

    @property
    def identity(self) -> str:
        """Returns a text with the properties that must not change when a job continues: the table and its columns."""
        return f"{self.oid}: {' '.join(str(each.number) for each in self.columns)}"


@wire
@dataclass(frozen=True, slots=True)
class CdcPosition:
    """The position up to which a slot was read. It is the payload of the source's only split.

    - "new": no rows were read. `existed`: the slot existed before the job was submitted.
    - "snapshot": some rows of the snapshot at `lsn` are read. Only the reader that started the snapshot can continue.
    - "clear": a snapshot was lost. TRUNCATE was emitted for the first `skip` tables.
    - "log": all transactions that end before `lsn` were read, and `skip` rows after it.

    `system` identifies the server whose log has these numbers. `tables` are the tables that are read, and `identities`
    identify them and their columns in the database.
    """

    phase: Phase
    slot: str
    tables: tuple[str, ...]
    identities: tuple[str, ...] = ()
    lsn: int = 0
    skip: int = 0
    system: str = ""
    existed: bool = False


def rows_column(number: int) -> str:
    """Returns the name of the struct column with the rows of table `number`."""
    return own_name(f"rows_{number}")


def source_schema(rows: list[pa.Schema]) -> pa.Schema:
    """Returns the columns of the source: one struct column for each table, which is null in rows of other tables."""
    fields = [pa.field(rows_column(number), pa.struct(list(each))) for number, each in enumerate(rows)]
    kinds = [pa.field(ROW_KIND, pa.string()), pa.field(UNCHANGED, pa.list_(pa.string()))]
    return pa.schema([pa.field(TABLE, pa.int32()), *kinds, *fields])


def lsn_text(lsn: int) -> str:
    """Returns a log position in PostgreSQL's text format, such as `16/B374D848`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_number(text: str) -> int:
    """Parses a log position in PostgreSQL's text format."""
    high, low = text.split("/")
    return (int(high, 16) << 32) + int(low, 16)
