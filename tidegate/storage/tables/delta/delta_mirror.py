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
- A file of which others have deleted rows with a deletion vector counts as rewritten: what `deltalake` removes has no
  vector, so such an entry of the log would stay. It is not compacted, and cannot be hidden.
- What the table asks of writers is read before each transaction (`writer_features.py`). Delta refuses a transaction
  that was made before that changed, so nothing is written by rules that are old.

Protocol: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Transaction Identifiers".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tidegate.storage.checkpoints.layout import unescape
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError, StorageError, TableError
from tidegate.storage.extras import load
from tidegate.storage.tables.delta.delta_schema import check_delta_schema
from tidegate.storage.tables.delta.writer_features import refusal
from tidegate.storage.tables.partitions import HIVE_NULL, folder_of
from tidegate.storage.tables.table_info import TableInfo

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, RemoveAction

RACES_MAX = 32
RETENTION_MS_DEFAULT = 7 * 86_400_000
"""For how long Delta keeps files of older versions if the table does not say."""
_FILE_RETENTION = "delta.deletedFileRetentionDuration"
_LOG_RETENTION = "delta.logRetentionDuration"
_UNITS_MS = {
    "millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 604_800_000,
}  # fmt: skip
_MOMENT_MAX_MS = 4_102_444_800_000
"""2100-01-01: later moments are the newest version as well."""


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
            check_place(self._url)
            check_delta_schema(self._info.arrow_schema)
            if self._is_there():
                self._check(self._loaded(), self._info.added)

    def create(self, history_ms: int | None = None) -> None:
        """Make the Delta table, where there is none; add the columns that ours got since. Raises as `check` does.

        One that is made keeps its log, and files that it does not show any more, for `history_ms`; None: as Delta does.
        """
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
                    configuration=None if history_ms is None else retention_properties(history_ms),
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
        refused: str | None = None
        for _ in range(RACES_MAX):
            with self._telling("read"):
                table = self._loaded()
                since = table.transaction_version(self._id)
                self._check(table)
            change = change_since(since)
            if change is None:
                return
            with self._telling("commit to"):
                version = table.version()
                refused = self._refused(table, change)
                if refused is None:
                    return
                if self._loaded().version() == version:
                    # Nobody was faster: Delta does not want the transaction itself.
                    raise StorageError(f"cannot commit to the Delta table at {self._url}: {refused}")
        raise StorageError(
            f"could not commit to the Delta table at {self._url}: {RACES_MAX} times another writer was faster "
            f"(the last time: {refused})"
        )

    def check_hides(self, change_since: Callable[[int | None], DeltaChange | None]) -> None:
        """Raise TableError where the change from what the Delta table shows could not hide the files that it must."""
        with self._telling("read"):
            if not self._is_there():
                return
            table = self._loaded()
            change = change_since(table.transaction_version(self._id))
            if change is not None:
                self._is_to_be_made(table, change)

    def retention_ms(self) -> int:
        """For how long the Delta table keeps files that it does not show any more; 0 where there is no Delta table."""
        with self._telling("read"):
            if not self._is_there():
                return 0
            said = self._loaded().metadata().configuration.get(_FILE_RETENTION)
        found = RETENTION_MS_DEFAULT if said is None else interval_ms(said)
        if found is None:
            raise TableError(
                f"the Delta table at {self._url} has {_FILE_RETENTION} = {said!r}, which is not understood: write it "
                "as 'interval 7 days'"
            )
        return found

    def needed_files(self, since_ms: int) -> set[str]:
        """Paths of the files that readers of the Delta table need: those of now, and those of that moment."""
        from deltalake.exceptions import DeltaError

        with self._telling("read"):
            if not self._is_there():
                return set()
            found = self._active(self._loaded())
            then = self._opened()
            try:
                then.load_as_version(datetime.fromtimestamp(min(since_ms, _MOMENT_MAX_MS) / 1000, UTC))
            except DeltaError:
                return found  # Delta has deleted that part of its log: no reader can go back to it.
            return found | self._active(then)

    def _refused(self, table: DeltaTable, change: DeltaChange) -> str | None:
        """Make the change in one transaction; why Delta refuses it, as where another transaction came first."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        actions: list[AddAction | RemoveAction] = []
        is_blind = True
        if self._is_to_be_made(table, change):
            is_blind = not change.removed
            actions += [self._remove(file, change) for file in change.removed]
            actions += [self._add(file, change) for file in change.added]
        try:
            table.create_write_transaction(
                actions,
                mode="append",
                schema=table.schema(),
                partition_by=list(self._info.partition_by) or None,
                commit_properties=CommitProperties(
                    # Writers that isolate by "WriteSerializable" let a blind append pass beside a DELETE or MERGE.
                    custom_metadata={"tidegateEntry": change.number, "isBlindAppend": is_blind},
                    app_transactions=[Transaction(self._id, change.number)],
                ),
            )
        except CommitFailedError as error:
            if _is_final(error):
                raise
            return str(error)
        return None

    def _is_there(self) -> bool:
        from deltalake import DeltaTable

        return DeltaTable.is_deltatable(self._url, storage_options(self._url))

    def _loaded(self) -> DeltaTable:
        """The table as it is now."""
        if self._table is None:
            self._table = self._opened()
        else:
            self._table.update_incremental()
        return self._table

    def _opened(self) -> DeltaTable:
        from deltalake import DeltaTable

        return DeltaTable(self._url, storage_options=storage_options(self._url))

    def _check(self, table: DeltaTable, may_lack: Collection[str] = ()) -> None:
        import pyarrow as pa
        from deltalake import Schema

        self._check_features(table)
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

    def _check_features(self, table: DeltaTable) -> None:
        protocol = table.protocol()
        reason = refusal(
            protocol.min_reader_version,
            protocol.min_writer_version,
            {*(protocol.writer_features or ()), *(protocol.reader_features or ())},
            table.metadata().configuration,
            json.loads(table.schema().to_json()),
        )
        if reason is not None:
            raise TableError(f"the Delta table at {self._url} {reason}")

    def _is_to_be_made(self, table: DeltaTable, change: DeltaChange) -> bool:
        """Whether there is anything to do; TableError where it cannot be done."""
        if not change.removed:
            return True
        there = self._active(table) - self._with_vectors(table)
        gone = [file for file in change.removed if file.path not in there]
        if gone and change.same_rows:
            return False  # Others have put these files together, or changed their rows: what they have made stays.
        if gone:
            raise TableError(
                f"{len(gone)} files of the Delta table at {self._url} have to be hidden, because the job was restored "
                f"from before them, and others have rewritten them or deleted rows of them since (the first is "
                f"{gone[0].path}): their rows cannot be told from others any more. Restore a newer checkpoint, or take "
                "the Delta table back to a version before that was done (RESTORE)"
            )
        if not change.same_rows and table.metadata().configuration.get("delta.appendOnly", "").lower() == "true":
            raise TableError(
                f"{len(change.removed)} files of the Delta table at {self._url} have to be hidden, because the job was "
                f"restored from before them (the first is {change.removed[0].path}), and the table takes appends only "
                "(delta.appendOnly). Restore a newer checkpoint, or unset the property"
            )
        return True

    @staticmethod
    def _active(table: DeltaTable) -> set[str]:
        import pyarrow as pa

        # Delta's log has paths as they stand in URLs: what is in the folder `a%20b` is in `a%2520b` there.
        return {unquote(path) for path in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()}

    @staticmethod
    def _with_vectors(table: DeltaTable) -> set[str]:
        """Paths of the files of which others have deleted rows without rewriting them."""
        import pyarrow as pa

        if "deletionVectors" not in (table.protocol().writer_features or ()):
            return set()
        urls = pa.table(table.deletion_vectors()).column("filepath").to_pylist()
        return {unquote(url.removeprefix(table.table_uri).lstrip("/")) for url in urls}

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
                raise TableError(
                    f"{text}. Others have given it what tidegate does not write: take that off, or write to another url"
                ) from error
            raise StorageError(text) from error


def retention_properties(history_ms: int) -> dict[str, str]:
    """The properties of a Delta table that keeps its versions, and their files, for so long."""
    kept = f"interval {max(1, -(-history_ms // 1_000))} seconds"
    return {_FILE_RETENTION: kept, _LOG_RETENTION: kept}


def interval_ms(text: str) -> int | None:
    """An interval as Delta writes it (`interval 1 week 2 days`), in milliseconds; None for anything else."""
    words = text.lower().removeprefix("interval").split()
    numbers, units = words[::2], [word.removesuffix("s") for word in words[1::2]]
    if not words or len(words) % 2 or not all(n.isdecimal() for n in numbers) or set(units) - _UNITS_MS.keys():
        return None
    return sum(int(number) * _UNITS_MS[unit] for number, unit in zip(numbers, units, strict=True))


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


def check_place(url: str) -> None:
    """Raise ConfigurationError where no Delta table can be, or where `deltalake` would look in another folder.

    It decodes percent escapes in paths and reads a backslash as a slash, so `a%20b` would lead to the folder `a b`.
    """
    if url.startswith("memory://"):
        raise ConfigurationError(f"a Delta table cannot be in memory ({url}): give a folder or a bucket")
    if (wrong := re.search(r"%[0-9A-Fa-f]{2}|\\", url)) is not None:
        raise ConfigurationError(
            f"a Delta table cannot be at {url}: Delta readers decode {wrong[0]!r} and would look in another folder. "
            "Rename the folder"
        )


_FINAL = re.compile("unsupported|invalid protocol|catalog-managed|append only|append-only", re.IGNORECASE)
"""What `deltalake` names where a table itself is not for it: its errors have no classes of their own for that."""


def _is_final(error: Exception) -> bool:
    from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError

    if isinstance(error, DeltaProtocolError | SchemaMismatchError):
        return True
    return isinstance(error, DeltaError) and _FINAL.search(str(error)) is not None


def _text(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
