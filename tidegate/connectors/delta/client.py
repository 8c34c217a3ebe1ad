"""Client of Delta tables for MERGE (package `deltalake`): checks which tables are accepted, and commits exactly once.

Rules:

- The commit token of a checkpoint is a transaction identifier of Delta (`txn`): its application is the job's sink, and
  its version is the checkpoint id. Delta writes the token in the transaction that changes the rows.
- `deltalake` does not refuse a token that the table has already. So the token is looked up in one version of the table,
  and the commit must become the next version. `deltalake` makes no second attempt (`max_commit_retries=0`). Of two
  coordinators with the same rows one is refused, looks the token up again, and finds it.
- A merge that changes nothing creates no version. The token is then written in a transaction without files, because the
  staged files are deleted after the commit.
- Columns, protocol and properties are read in the version that the commit follows. A change of the table's rules
  meanwhile is therefore never missed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.connectors.sink import CommitContext
from tidegate.storage.errors import StorageError, TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.delta_mirror import (
    check_delta_schema,
    check_place,
    imported,
    is_final,
    partition_of_bytes,
    retention_properties,
    storage_options,
    translated_errors,
    unwritable,
)
from tidegate.storage.tables.log.tail import LOG_FOLDER

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

RACES_MAX = 32
"""Number of times that one commit may lose against other writers before StorageError is raised."""


@dataclass(frozen=True, slots=True)
class DeltaPlace:
    """A Delta table into which the rows of a stream are merged."""

    url: str
    schema: pa.Schema
    """The columns of the stream."""
    partition_by: tuple[str, ...]
    """The partition columns for a table that does not exist yet."""
    history_ms: int | None
    """How long a new table keeps the files of older versions, in ms. None: Delta's default."""

    @property
    def named(self) -> str:
        """Returns a text that names the table in errors."""
        return f"the Delta table at {self.url}"

    def is_there(self) -> bool:
        """Returns whether the Delta table exists. Raises StorageError, and ConfigurationError if the package
        `deltalake` is missing.
        """
        with translated_errors("read", self.url):
            found: bool = imported().DeltaTable.is_deltatable(self.url, storage_options(self.url))
            return found

    def load(self) -> DeltaTable:
        """Loads the newest version of the table. Raises StorageError, TableError."""
        with translated_errors("read", self.url):
            found: DeltaTable = imported().DeltaTable(self.url, storage_options=storage_options(self.url))
            return found

    def create(self) -> None:
        """Creates the table with the columns of the stream, unless it exists. Raises StorageError, TableError."""
        with translated_errors("create", self.url):
            deltalake = imported()
            deltalake.DeltaTable.create(
                self.url,
                deltalake.Schema.from_arrow(self.schema),
                mode="ignore",
                partition_by=list(self.partition_by),
                configuration=None if self.history_ms is None else retention_properties(self.history_ms),
                storage_options=storage_options(self.url),
            )

    def check(self) -> str | None:
        """Checks that rows can be merged into the table. Returns the id of the table, or None if there is no table yet.

        Raises TableError if the existing table cannot be used, ConfigurationError if a table cannot be at this URL.
        """
        check_place(self.url)
        check_delta_schema(self.schema)
        if open_store(self.url).list(LOG_FOLDER):
            raise TableError(
                f"{self.named} is written by to_delta with mode='append' as well, which continues to show rows that a "
                "merge replaces: upsert into another url"
            )
        if not self.is_there():
            return None
        table = self.load()
        self.check_version(table)
        if (name := partition_of_bytes(table)) is not None:
            raise TableError(
                f"{self.named} is partitioned by the bytes of {name!r}, which its writers write in different ways, so "
                "a merge would change them: write to another url"
            )
        found = tuple(table.metadata().partition_columns)
        if self.partition_by and found != self.partition_by:
            raise TableError(
                f"{self.named} is partitioned by {list(found)}, the job by {list(self.partition_by)}: remove "
                "partition_by, which is for a new table, or give another url"
            )
        return str(table.metadata().id)

    def check_version(self, table: DeltaTable) -> None:
        """Raises TableError if rows of the stream cannot be merged into this version of the table."""
        if (reason := unwritable(table)) is not None:
            raise TableError(f"{self.named} {reason}")
        if table.metadata().configuration.get("delta.appendOnly", "").lower() == "true":
            raise TableError(
                f"{self.named} allows only appends (delta.appendOnly), and an upsert replaces rows: unset the property "
                "(ALTER TABLE ... UNSET TBLPROPERTIES), or upsert into another url"
            )
        there = {field.name: field.type for field in pa.schema(table.schema().to_arrow())}
        ours = pa.schema(imported().Schema.from_arrow(self.schema).to_arrow())
        here = {field.name: field.type for field in ours}
        if unknown := [name for name in here if name not in there]:
            raise TableError(
                f"{self.named} has no column {unknown[0]!r}, only {', '.join(there)}: remove it by select(), or add it "
                "to the table"
            )
        if missing := [name for name in there if name not in here]:
            raise TableError(
                f"{self.named} has the column {missing[0]!r}, which the stream lacks: add it to the stream, for "
                "example with a null, because an upsert writes whole rows"
            )
        for name, found in here.items():
            if not found.equals(there[name]):
                raise TableError(
                    f"{self.named} has the column {name!r} as {there[name]}, and the stream has {found}: cast it to "
                    f"{there[name]}"
                )


def token_app(context: CommitContext) -> str:
    """Returns the application id of a sink's transaction identifiers in Delta. Their versions are checkpoint ids."""
    return f"tidegate.{context.uid}.{context.job_id}"


def commit_once(
    place: DeltaPlace, context: CommitContext, table_id: str, merge: Callable[[DeltaTable, CommitProperties], None]
) -> None:
    """Commits a checkpoint in one transaction, unless the table has its transaction identifier already.

    - `table_id`: the id of the table for which the rows were prepared.
    - `merge`: merges the rows into the given version in one transaction, or in none if nothing changes. It is called
      again for the new version if another writer has committed meanwhile.

    Raises TableError, and StorageError if a retry may help.
    """
    from deltalake import CommitProperties, Transaction
    from deltalake.exceptions import CommitFailedError

    token = Transaction(token_app(context), context.checkpoint_id)
    for _ in range(RACES_MAX):
        table = place.load()
        if str(table.metadata().id) != table_id:
            raise TableError(
                f"{place.named} was replaced by another one, and rows of checkpoint {context.checkpoint_id} belong to "
                "the former one. Give the sink another uid, and start it without its state"
            )
        with translated_errors("read", place.url):
            committed = table.transaction_version(token.app_id)
        if committed is not None and committed >= context.checkpoint_id:
            return
        place.check_version(table)
        version = table.version()
        properties = CommitProperties(
            custom_metadata={"tidegateCheckpoint": context.checkpoint_id},
            max_commit_retries=0,
            app_transactions=[token],
        )
        with translated_errors("commit to", place.url):
            try:
                merge(table, properties)
                if table.version() == version:
                    table.create_write_transaction(
                        [],
                        mode="append",
                        schema=table.schema(),
                        partition_by=table.metadata().partition_columns or None,
                        commit_properties=properties,
                    )
            except CommitFailedError as error:
                if is_final(error):
                    raise
                if place.load().version() == version:
                    # There was no other transaction, so Delta refuses this one for itself.
                    raise StorageError(
                        f"cannot commit to {place.named}: {error}; check the rights to write there, and execute the "
                        "job again with restore='latest'"
                    ) from error
                continue
        return
    raise StorageError(
        f"cannot commit to {place.named}: {RACES_MAX} times another writer was faster. Execute the job again with "
        "restore='latest', and let fewer writers write at the same time"
    )


def required_columns(table: DeltaTable) -> list[str]:
    """Returns the names of a table's columns that are not nullable."""
    return [field["name"] for field in json.loads(table.schema().to_json())["fields"] if not field["nullable"]]
