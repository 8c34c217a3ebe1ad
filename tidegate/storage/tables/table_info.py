"""`TableInfo`: describes the columns, mode, keys and partitions of an output table, and compares two descriptions.

`check_parquet_types` refuses columns that the table's files cannot hold, before a job runs.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.storage.codec import wire
from tidegate.storage.errors import TableError
from tidegate.storage.schemas.arrow_types import (
    check_dictionaries,
    decoded_type,
    seconds_beyond_parquet,
    widened_schema,
)
from tidegate.storage.tables.partitions import check_partitioning

TableMode = Literal["append", "upsert"]
IfExists = Literal["error", "append", "overwrite"]


@wire
@dataclass(frozen=True, slots=True)
class TableInfo:
    """Describes an output table: its Arrow schema (serialised), mode, keys in upsert mode, and partition columns."""

    schema: bytes
    mode: TableMode
    keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    delta_id: str | None = None
    """Unique identifier of the table's Delta transactions, or None if the table is not a Delta Lake table as well."""
    added: tuple[str, ...] = ()
    """Names of columns that were added after the table was created. Older files lack them, and readers get nulls."""
    deletes: bool = False
    """True if each row of an upsert table's files has a flag that marks its key as deleted."""
    order_by: str | None = None
    """In upsert mode: the column whose greatest value selects the current row of a key.

    None: the latest row is current.
    """

    @staticmethod
    def of(
        schema: pa.Schema,
        mode: TableMode,
        keys: tuple[str, ...] = (),
        partition_by: tuple[str, ...] = (),
        delta_id: str | None = None,
        deletes: bool = False,
        order_by: str | None = None,
    ) -> TableInfo:
        """Builds the description of a table with these columns.

        Raises TableError for keys or an order that do not fit mode or schema, for columns that cannot be partition
        columns, and for columns that a table cannot store (some dictionaries, and types that Parquet lacks).
        """
        if (mode == "upsert") != bool(keys):
            raise TableError(f"a table in {mode} mode with keys {keys!r}: give keys for upsert, and only then")
        if len(set(schema.names)) < len(schema.names):
            raise TableError(f"a table's column names must differ: {schema.names}; rename one")
        missing = [key for key in keys if key not in schema.names]
        if missing:
            raise TableError(
                f"key column {missing[0]!r} is not among the table's columns {schema.names}; name one of these"
            )
        check_dictionaries(schema)
        check_partitioning(schema, partition_by, keys)
        _check_order(schema, mode, order_by)
        widened = widened_schema(schema)
        check_parquet_types(widened)
        stored = widened.serialize().to_pybytes()
        return TableInfo(stored, mode, keys, partition_by, delta_id, deletes=deletes, order_by=order_by)

    @property
    def arrow_schema(self) -> pa.Schema:
        """Returns the schema of the table as a pyarrow Schema, with dictionaries widened."""
        return widened_schema(pa.ipc.read_schema(pa.py_buffer(self.schema)))

    @property
    def format(self) -> str:
        """Returns the formats of the table: "tidegate", or "delta" if it is a Delta Lake table as well."""
        return "tidegate" if self.delta_id is None else "delta"

    def check_same(self, wanted: TableInfo, url: str) -> None:
        """Raises TableError, naming the difference, if the job's description `wanted` differs from the existing
        table at `url`.
        """
        for what, is_, other in (
            ("mode", self.mode, wanted.mode),
            ("keys", self.keys, wanted.keys),
            ("partition_by", self.partition_by, wanted.partition_by),
            ("format", self.format, wanted.format),
            ("deletions", self.deletes, wanted.deletes),
            ("order_by", self.order_by, wanted.order_by),
        ):
            if is_ != other:
                raise TableError(
                    f"the table at {url} has {what} {is_!r}, the job writes with {other!r}; "
                    "write to another url, or change the sink"
                )
        difference = schema_difference(self.arrow_schema, wanted.arrow_schema)
        if difference:
            adds = wanted.arrow_schema.names[: len(self.arrow_schema)] == self.arrow_schema.names
            hint = ', or let the table have it with schema_evolution="add_columns"' if adds else ""
            raise TableError(
                f"the table at {url} has another schema than the job writes: {difference}; "
                f"write to another url, or cast the columns{hint}"
            )

    def evolved(self, wanted: TableInfo, url: str) -> TableInfo:
        """Returns the description of the table at `url` with the new columns of a job added, or unchanged if there are
        none.

        Raises TableError, naming the difference, if anything else differs, or if a new column is not nullable: older
        rows have no values for it.
        """
        there, here = self.arrow_schema, wanted.arrow_schema
        new = [here.field(at) for at in range(len(there), len(here))]
        before = pa.schema([here.field(at) for at in range(min(len(there), len(here)))])
        if difference := schema_difference(there, before):
            raise TableError(
                f"the table at {url} has another schema than the job writes: {difference}; "
                'schema_evolution="add_columns" adds columns after the existing ones, and changes nothing else: '
                "cast the columns, or write to another url"
            )
        full = [field.name for field in new if not field.nullable]
        if full:
            raise TableError(
                f"column {full[0]!r} is new in the table at {url}, and not nullable: older rows have no value there; "
                "make it nullable in the schema that the job writes"
            )
        added = replace(self, schema=wanted.schema, added=())
        added.check_same(wanted, url)
        return replace(added, added=(*self.added, *(field.name for field in new))) if new else self


def schema_difference(found: pa.Schema, wanted: pa.Schema) -> str | None:
    """Returns the first difference between the columns of a table and of a job, as text, or None if they are equal."""
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


def _check_order(schema: pa.Schema, mode: TableMode, order_by: str | None) -> None:
    if order_by is None:
        return
    if mode != "upsert":
        raise TableError(f"order_by={order_by!r} selects the row of a key that counts: use it only in upsert mode")
    if order_by not in schema.names:
        raise TableError(
            f"order_by column {order_by!r} is not among the table's columns {schema.names}; name one of these"
        )
    found = decoded_type(schema.field(order_by).type)
    kinds = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_string, pa.types.is_large_string)
    if pa.types.is_nested(found) or not any(kind(found) for kind in kinds):
        raise TableError(f"order_by column {order_by!r} is {found}; take numbers, strings, dates, times or timestamps")


def check_parquet_types(schema: pa.Schema) -> None:
    """Raises TableError, naming the column and what to do, if a Parquet file cannot store a column."""
    if _parquet_refusal(schema) is None:
        return
    for field in schema:
        if (reason := _parquet_refusal(pa.schema([field]))) is not None:
            raise TableError(
                f"column {field.name!r} is {field.type}, which the table's Parquet files cannot hold; cast it before, "
                f"or drop it ({reason})"
            )


def check_seconds(batch: pa.RecordBatch) -> None:
    """Raises TableError, naming the column, for a timestamp in seconds that a Parquet file cannot hold."""
    if (reason := seconds_beyond_parquet(batch)) is not None:
        raise TableError(f"{reason}. Make it null or an earlier time in a step before")


def _parquet_refusal(schema: pa.Schema) -> str | None:
    """Returns the reason why Arrow cannot write a Parquet file with this schema, or None if it can."""
    try:
        pq.ParquetWriter(io.BytesIO(), schema).close()
    except (pa.ArrowException, OSError) as error:  # for a scale below zero it is an OSError
        return str(error)
    return None
