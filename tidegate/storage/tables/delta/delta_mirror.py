"""`DeltaMirror`: shows as a Delta Lake table what the log of a table shows. `TableLog` calls it after each commit.

Both tables are of the same files in the same folder: tidegate's log in `_tidegate/` decides, the one in `_delta_log/`
follows. Rules:

- One transaction of Delta takes its readers from what one commit of the log shows to what a later one does. So they see
  whole checkpoints, and rows that a restored job hides go as its own come.
- The transaction carries the number of the log's entry, under the identifier of this table (`txn` in Delta's protocol).
  What has that number or a greater one is there already: repeating changes nothing, and a commit whose mirroring was
  cut off is made good by the next one.
- Two processes that mirror at once touch the same identifier. Delta refuses the second one, which looks again.
- A compaction of ours is mirrored only if the small files are all there. Where others have rewritten some, what they
  have made stays.
- Files that others have added to the Delta table stay. A file that must be hidden and is not there any more was
  rewritten by others, with its rows. Nobody could hide these, so it is an error.

Protocol: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Transaction Identifiers".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tidegate.storage.checkpoints.layout import unescape
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError, StorageError, TableError
from tidegate.storage.extras import load
from tidegate.storage.tables.delta.delta_schema import check_delta_schema
from tidegate.storage.tables.partitions import HIVE_NULL, folder_of
from tidegate.storage.tables.table_info import TableInfo

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, RemoveAction

RACES_MAX = 32


@dataclass(frozen=True, slots=True)
class DeltaChange:
    """What takes a Delta table from an earlier state to what entry `number` of the log shows, which is of `at_ms`.

    `same_rows`: the files that are added have the rows of those that are removed.
    """

    number: int
    at_ms: int
    added: tuple[DataFile, ...]
    removed: tuple[DataFile, ...]
    same_rows: bool


class DeltaMirror:
    """The Delta table in the folder of the table at `url`. Not thread-safe."""

    def __init__(self, url: str, info: TableInfo) -> None:
        assert info.delta_id is not None
        self._url = url
        self._info = info
        self._id = info.delta_id
        self._table: DeltaTable | None = None

    def check(self) -> None:
        """See that there can be such a Delta table, and that one which is there has the same columns and partitions.

        Raises TableError where it has not, ConfigurationError where the package or a way to the storage is missing.
        """
        with self._telling("read"):
            self._check_place()
            check_delta_schema(self._info.arrow_schema)
            if self._is_there():
                self._check(self._loaded(), self._info.added)

    def create(self) -> None:
        """Make the Delta table, where there is none; add the columns that ours got since. Raises as `check` does."""
        self.check()
        with self._telling("create"):
            import deltalake

            if self._is_there():
                fields = deltalake.Schema.from_arrow(self._info.arrow_schema).fields
                known = {field.name for field in self._loaded().schema().fields}
                if missing := [field for field in fields if field.name not in known]:
                    self._loaded().alter.add_columns(missing)
                    self._check(self._loaded())
            else:
                deltalake.DeltaTable.create(
                    self._url,
                    deltalake.Schema.from_arrow(self._info.arrow_schema),
                    mode="ignore",
                    partition_by=list(self._info.partition_by),
                    storage_options=storage_options(self._url),
                )
                self._check(self._loaded())

    def foreign_files(self, own: Collection[str]) -> int:
        """How many files the Delta table has that are not among `own`; 0 where there is no Delta table."""
        with self._telling("read"):
            return sum(1 for path in self._active(self._loaded()) if path not in own) if self._is_there() else 0

    def show(self, change_since: Callable[[int | None], DeltaChange | None]) -> None:
        """Make the change that `change_since(N)` says, where the Delta table shows entry N (None: nothing yet).

        Raises StorageError where it may work when it is repeated, TableError where it cannot.
        """
        for _ in range(RACES_MAX):
            with self._telling("read"):
                table = self._loaded()
                since = table.transaction_version(self._id)
                self._check(table)
            change = change_since(since)
            if change is None:
                return
            with self._telling("commit to"):
                if self._committed(table, change):
                    return
        raise StorageError(f"could not commit to the Delta table at {self._url}: lost {RACES_MAX} races")

    def _committed(self, table: DeltaTable, change: DeltaChange) -> bool:
        """Whether one transaction has made the change; False where another one came first."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        actions: list[AddAction | RemoveAction] = []
        if self._is_to_be_made(table, change):
            actions += [self._remove(file, change) for file in change.removed]
            actions += [self._add(file, change) for file in change.added]
        try:
            table.create_write_transaction(
                actions,
                mode="append",
                schema=table.schema(),
                partition_by=list(self._info.partition_by) or None,
                commit_properties=CommitProperties(
                    custom_metadata={"tidegateEntry": change.number},
                    app_transactions=[Transaction(self._id, change.number)],
                ),
            )
        except CommitFailedError:
            return False
        return True

    def _is_there(self) -> bool:
        from deltalake import DeltaTable

        return DeltaTable.is_deltatable(self._url, storage_options(self._url))

    def _loaded(self) -> DeltaTable:
        """The table as it is now."""
        from deltalake import DeltaTable

        if self._table is None:
            self._table = DeltaTable(self._url, storage_options=storage_options(self._url))
        else:
            self._table.update_incremental()
        return self._table

    def _check(self, table: DeltaTable, may_lack: Collection[str] = ()) -> None:
        import pyarrow as pa
        from deltalake import Schema

        there = pa.schema(table.schema().to_arrow())
        wanted = pa.schema(Schema.from_arrow(self._info.arrow_schema).to_arrow())
        lacks = set(may_lack) - set(there.names)
        wanted = pa.schema([field for field in wanted if field.name not in lacks])
        if not there.equals(wanted, check_metadata=False):
            raise TableError(
                f"the Delta table at {self._url} has the columns {_text(there)}, the job writes {_text(wanted)}; write "
                "to another url, or cast the columns"
            )
        if (by := tuple(table.metadata().partition_columns)) != self._info.partition_by:
            raise TableError(
                f"the Delta table at {self._url} is partitioned by {list(by)}, the job partitions by "
                f"{list(self._info.partition_by)}; give the same partition_by, or another url"
            )

    def _is_to_be_made(self, table: DeltaTable, change: DeltaChange) -> bool:
        """Whether there is anything to do; TableError where it cannot be done."""
        there = self._active(table) if change.removed else set()
        gone = [file for file in change.removed if file.path not in there]
        if gone and change.same_rows:
            return False  # Others have put these files together, or changed their rows: what they have made stays.
        if gone:
            raise TableError(
                f"{len(gone)} files of the Delta table at {self._url} have to be hidden, because the job was restored "
                f"from before them, and others have rewritten or deleted them since (the first is {gone[0].path}): "
                "their rows cannot be told from others any more. Restore a newer checkpoint, or take the Delta table "
                "back to a version before that was done (RESTORE)"
            )
        return True

    @staticmethod
    def _active(table: DeltaTable) -> set[str]:
        import pyarrow as pa

        # Delta's log has paths as they stand in URLs: what is in the folder `a%20b` is in `a%2520b` there.
        return {unquote(path) for path in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()}

    def _add(self, file: DataFile, change: DeltaChange) -> AddAction:
        from deltalake.transaction import AddAction

        stats = json.dumps({"numRecords": file.rows})
        values = self._values(file)
        return AddAction(file.path, file.size_bytes, values, change.at_ms, not change.same_rows, stats)

    def _remove(self, file: DataFile, change: DeltaChange) -> RemoveAction:
        from deltalake.transaction import RemoveAction

        return RemoveAction(file.path, not change.same_rows, change.at_ms, file.size_bytes, self._values(file))

    def _values(self, file: DataFile) -> dict[str, str | None]:
        if not self._info.partition_by:
            return {}
        texts = [name.partition("=")[2] for name in folder_of(file.path).split("/")]
        values = [None if text == HIVE_NULL else unescape(text) for text in texts]
        return dict(zip(self._info.partition_by, values, strict=True))

    def _check_place(self) -> None:
        if self._url.startswith("memory://"):
            raise ConfigurationError(f"a Delta table cannot be in memory ({self._url}): give a folder or a bucket")

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Whatever Delta raises comes out as ours, and what may be half known is read anew."""
        deltalake = imported()
        try:
            yield
        except (deltalake.exceptions.DeltaError, OSError, ValueError) as error:
            self._table = None
            text = f"cannot {what} the Delta table at {self._url}: {error}"
            if _is_final(error):
                raise TableError(text) from error
            raise StorageError(text) from error


def storage_options(url: str) -> dict[str, str]:
    """How Delta reaches the storage: it reads the environment's AWS_ variables itself, but for what stands here."""
    if not url.startswith("s3://"):
        return {}
    from tidegate.storage.files.s3_requests import ENDPOINT_VARIABLES

    endpoint = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if endpoint is None:
        return {}
    options = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": str(endpoint.startswith("http://")).lower()}
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options["AWS_REGION"] = "us-east-1"
    return options


def imported() -> Any:
    """The package `deltalake`; ConfigurationError, which says how to install it, where it is missing."""
    return load("a Delta Lake table", "delta", "deltalake")


def _is_final(error: Exception) -> bool:
    from deltalake.exceptions import DeltaProtocolError, SchemaMismatchError

    return isinstance(error, DeltaProtocolError | SchemaMismatchError)


def _text(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
