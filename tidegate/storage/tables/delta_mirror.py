"""Mirrors a table's log as a Delta Lake table: `LogMirror` finds out what has changed, and `DeltaMirror` commits the
change to Delta.

Both tables consist of the same files in the same folder. tidegate's log in `_tidegate/` is authoritative, and the log
in `_delta_log/` follows. `TableLog` calls `LogMirror` after each commit. Rules:

- One Delta transaction changes the Delta table from the files of one commit of tidegate's log to the files of a later
  commit. Readers therefore see complete checkpoints, and rows that a restored job hides disappear in the transaction
  that adds its new rows.
- The transaction contains the number of the log's entry, under the identifier of this table (`txn` in Delta's
  protocol). An entry with that number, or a lower one, is in the Delta table already. Repeating a transaction changes
  nothing, and the next commit completes an interrupted mirroring.
- Two processes that mirror at the same time use the same identifier. Delta refuses the second transaction, and its
  process reads the table again.
- A compaction of tidegate's is mirrored only if the small files all exist. If other writers have rewritten some of
  them, their files stay.
- Files that other writers have added to the Delta table stay. A file that must be hidden and is missing was rewritten
  by others, with its rows. These rows cannot be hidden, so it is an error.
- A file with a deletion vector, by which others have deleted rows, counts as rewritten: `deltalake` removes files
  without naming the vector, so such an entry would stay. It is not compacted, and cannot be hidden.
- The table's requirements for writers are read before each transaction (`refusal`). Delta refuses a transaction that
  was made before they changed, so nothing is written by outdated rules.

`LogMirror` reads only the parts of the log with entries that were added or hidden since the last transaction. After a
restart it reads the whole log.

Rules of writer features. A Delta table states in its log what every writer must do: keep CHECK constraints, compute
generated columns, use the names of a column mapping. tidegate writes plain Parquet files with the job's values:

- A table is refused if a plain file would violate the table's constraints, or if readers would see other values.
- A feature that the table only *could* use does not matter: constraints that are not defined, a mapping that is off.
- A feature that is unknown to this module is refused by name, because its rules are unknown.

Protocol: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Transaction Identifiers" and "Requirements for
Writers".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from tidegate.storage.checkpoints.layout import unescape
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError, StorageError, TableError, TidegateError
from tidegate.storage.extras import load
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.tables.log.entries import Ranges, TableClaim, TableEntry, TableFold, covers, without
from tidegate.storage.tables.log.tail import TableTail
from tidegate.storage.tables.log.versions import TableVersions
from tidegate.storage.tables.partitions import HIVE_NULL, folder_of
from tidegate.storage.tables.table_info import IfExists, TableInfo

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction, RemoveAction


class LogMirror:
    """Mirrors the output table at `url` to a Delta table in the same folder. `tail` is the end of the table's log.

    Not thread-safe.
    """

    def __init__(self, url: str, info: TableInfo, tail: TableTail) -> None:
        self.info = info
        self._url = url
        self._tail = tail
        self._delta = DeltaMirror(url, info)
        self._known: tuple[int, Ranges] | None = None
        """The number of the last mirrored log entry, and the entries that the table shows with it.

        None before the first mirroring.
        """

    def create(self, history_ms: int | None = None) -> None:
        """Creates the Delta table if there is none, or adds new columns. See `DeltaMirror.create`."""
        self._delta.create(history_ms)

    def retention_ms(self) -> int:
        """Returns how long the Delta table keeps files that it no longer shows, in ms. 0 without a Delta table."""
        return self._delta.retention_ms()

    def check(self, if_exists: IfExists = "append", claim: TableClaim | None = None) -> None:
        """Raises the errors that `create` would raise, and TableError if `if_exists` does not allow the Delta table's
        rows.

        - `if_exists`: "append", which restored jobs use too, allows files of other writers.
        - `claim`: the claim on the table that the job is about to make. Raises TableError if it would have to hide
          files of the Delta table that cannot be hidden.
        """
        self._delta.check()
        if claim is not None:
            shows = claim.shows
            self._delta.check_hides(lambda since: self._tail.with_parts(lambda: self._change(since, shows)))
        if if_exists == "append":
            return
        own: Collection[str] = ()
        if self._tail.fold is not None:
            entries = self._tail.with_parts(lambda: self._tail.entries_after(-1))
            own = {file.path for entry in entries for file in entry.files}
        if count := self._delta.foreign_files(own):
            raise TableError(
                f"the Delta table at {self._url} has {count} files that tidegate has not written, and cannot "
                f'replace; if_exists="{if_exists}" refuses them: empty it first, or add to it with if_exists="append"'
            )

    def follow(self) -> None:
        """Updates the Delta table to show the same files as tidegate's log.

        Raises StorageError if a retry may help, else TableError.
        """
        fold = self._fold
        # Compare entries, not visible files: the log may show an earlier state again, mirrored by others meanwhile.
        if self._known is not None and self._known[0] == fold.seq:
            return
        self._delta.show(lambda since: self._tail.with_parts(lambda: self._change(since)))
        self._known = (fold.seq, fold.shown)

    @property
    def _fold(self) -> TableFold:
        assert self._tail.fold is not None
        return self._tail.fold

    def needed_files(self, since_ms: int) -> set[str]:
        """Returns the paths of files that the Delta table shows now, or showed at `since_ms` (ms since the epoch)."""
        return self._delta.needed_files(since_ms)

    def _change(self, since: int | None, shows: Ranges | None = None) -> DeltaChange | None:
        """Returns the change from log entry `since` (None: from an empty table) to the files that the log shows now.

        With `shows`, the target is the result of a planned claim instead of these files. Returns None if there is no
        change.
        """
        fold = self._fold
        if shows is None:
            if since is not None and since >= fold.seq:
                return None
            shows = fold.shown
        before = self._shown_after(since)
        new = self._tail.entries_in(without(shows, before))
        gone = self._tail.entries_in(without(before, shows))
        added, removed = _files(new), _files(gone)
        # A compaction names files again that are large enough. These stay.
        paths = {file.path for file in added} & {file.path for file in removed}
        added = tuple(file for file in added if file.path not in paths)
        removed = tuple(file for file in removed if file.path not in paths)
        if not (added or removed):
            return None
        return DeltaChange(fold.seq, fold.newest_at_ms or 0, added, removed, self._is_compaction(new, gone))

    def _shown_after(self, since: int | None) -> Ranges:
        if since is None:
            return ()
        if self._known is not None and self._known[0] == since:
            return self._known[1]
        return TableVersions(self._url, self._tail.entries_after(-1), self._fold).shown_after(since)

    def _is_compaction(self, new: list[TableEntry], gone: list[TableEntry]) -> bool:
        """Returns whether the change is exactly one compaction, which changes no rows."""
        if len(new) != 1 or self._fold.claim is None:
            return False
        rewrite = new[0].rewrite
        replaced = self._fold.claim.replaces if rewrite is None else rewrite.replaces
        rows = sum(entry.rows for entry in gone)
        return rows == new[0].rows and all(covers(replaced, entry.seq) for entry in gone)


def _files(entries: list[TableEntry]) -> tuple[DataFile, ...]:
    return tuple(file for entry in entries for file in entry.files)


RACES_MAX = 32
RETENTION_MS_DEFAULT = 7 * 86_400_000
"""Time in ms for which Delta keeps files of older versions if the table does not set it."""
_FILE_RETENTION = "delta.deletedFileRetentionDuration"
_LOG_RETENTION = "delta.logRetentionDuration"
_UNITS_MS = {
    "millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 604_800_000,
}  # fmt: skip
_MOMENT_MAX_MS = 4_102_444_800_000
"""Greatest time that is passed to Delta, in ms: the year 2100. Any later time selects the newest version too."""


@dataclass(frozen=True, slots=True)
class DeltaChange:
    """A transaction of the Delta table that makes it show log entry `number` of tidegate, committed at `at_ms` (ms
    since the epoch).

    `same_rows`: the added files have the rows of the removed files.
    """

    number: int
    at_ms: int
    added: tuple[DataFile, ...]
    removed: tuple[DataFile, ...]
    same_rows: bool


class DeltaMirror:
    """Reads and writes the Delta table in the folder of the output table at `url`. Not thread-safe."""

    def __init__(self, url: str, info: TableInfo) -> None:
        assert info.delta_id is not None
        self._url = url
        self._info = info
        self._id = info.delta_id
        self._table: DeltaTable | None = None

    def check(self) -> None:
        """Checks that the Delta table can be created, or that an existing one has the same columns and partitions.

        Raises TableError if they differ, ConfigurationError if the package `deltalake` or access to the storage is
        missing.
        """
        with self._translated_errors("read"):
            check_place(self._url)
            check_delta_schema(self._info.arrow_schema)
            if self._is_there():
                self._check(self._loaded(), self._info.added)

    def create(self, history_ms: int | None = None) -> None:
        """Creates the Delta table if there is none, else adds columns that the output table has gained.

        Raises as `check` does. A new Delta table keeps its log, and files that it no longer shows, for `history_ms`
        (None: for Delta's default).
        """
        self.check()
        with self._translated_errors("create"):
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
        """Returns the number of files of the Delta table whose paths are not in `own`. 0 without a Delta table."""
        with self._translated_errors("read"):
            return sum(1 for path in self._active(self._loaded()) if path not in own) if self._is_there() else 0

    def show(self, change_since: Callable[[int | None], DeltaChange | None]) -> None:
        """Commits the change that `change_since(N)` returns, if any. N is the log entry that the Delta table shows now
        (None: no entry).

        Raises StorageError if a retry may help, else TableError.
        """
        refused: str | None = None
        for _ in range(RACES_MAX):
            with self._translated_errors("read"):
                table = self._loaded()
                since = table.transaction_version(self._id)
                self._check(table)
            change = change_since(since)
            if change is None:
                return
            with self._translated_errors("commit to"):
                version = table.version()
                refused = self._refused(table, change)
                if refused is None:
                    return
                if self._loaded().version() == version:
                    # There was no concurrent transaction, so Delta refuses this one for itself.
                    raise StorageError(
                        f"cannot commit to the Delta table at {self._url}: {refused}; check the storage, and execute "
                        "the job again with restore='latest'"
                    )
        raise StorageError(
            f"could not commit to the Delta table at {self._url}: {RACES_MAX} times another writer was faster "
            f"(the last time: {refused})"
            '. Execute the job again with restore="latest", and let fewer writers write at the same time'
        )

    def check_hides(self, change_since: Callable[[int | None], DeltaChange | None]) -> None:
        """Raises TableError if the change that `change_since` returns would hide files of the Delta table that
        cannot be hidden.
        """
        with self._translated_errors("read"):
            if not self._is_there():
                return
            table = self._loaded()
            change = change_since(table.transaction_version(self._id))
            if change is not None:
                self._is_to_be_made(table, change)

    def retention_ms(self) -> int:
        """Returns how long the Delta table keeps files that it no longer shows, in ms. 0 without a Delta table."""
        with self._translated_errors("read"):
            if not self._is_there():
                return 0
            setting = self._loaded().metadata().configuration.get(_FILE_RETENTION)
        found = RETENTION_MS_DEFAULT if setting is None else interval_ms(setting)
        if found is None:
            raise TableError(
                f"the Delta table at {self._url} has {_FILE_RETENTION} = {setting!r}, which is not an interval: write "
                "it as 'interval 7 days'"
            )
        return found

    def needed_files(self, since_ms: int) -> set[str]:
        """Returns the paths of the files that the Delta table shows now, or showed at `since_ms` (ms since the
        epoch).
        """
        from deltalake.exceptions import DeltaError

        with self._translated_errors("read"):
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
        """Commits the change in one Delta transaction.

        Returns None on success, or the reason why Delta refused it, for instance a concurrent transaction.
        """
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
                    # Writers with isolation "WriteSerializable" allow a blind append concurrent with a DELETE or MERGE.
                    custom_metadata={"tidegateEntry": change.number, "isBlindAppend": is_blind},
                    app_transactions=[Transaction(self._id, change.number)],
                ),
            )
        except CommitFailedError as error:
            if is_final(error):
                raise
            return str(error)
        return None

    def _is_there(self) -> bool:
        from deltalake import DeltaTable

        return DeltaTable.is_deltatable(self._url, storage_options(self._url))

    def _loaded(self) -> DeltaTable:
        """Returns the Delta table in its current version."""
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

        if (reason := unwritable(table)) is not None:
            raise TableError(f"the Delta table at {self._url} {reason}")
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
        """Returns whether the change would have an effect on the Delta table. Raises TableError if the change is not
        possible.
        """
        if not change.removed:
            return True
        there = self._active(table) - self._with_vectors(table)
        gone = [file for file in change.removed if file.path not in there]
        if gone and change.same_rows:
            return False  # Others have compacted these files or changed their rows. Their files stay.
        if gone:
            raise TableError(
                f"{len(gone)} files of the Delta table at {self._url} have to be hidden, because the job was restored "
                f"from before them, and others have rewritten them or deleted rows of them since (the first is "
                f"{gone[0].path}), so their rows cannot be identified. Restore a newer checkpoint, or reset the Delta "
                "table to a version before that (RESTORE)"
            )
        if not change.same_rows and table.metadata().configuration.get("delta.appendOnly", "").lower() == "true":
            raise TableError(
                f"{len(change.removed)} files of the Delta table at {self._url} have to be hidden, because the job was "
                f"restored from before them (the first is {change.removed[0].path}), and the table allows only appends "
                "(delta.appendOnly). Restore a newer checkpoint, or unset the property"
            )
        return True

    @staticmethod
    def _active(table: DeltaTable) -> set[str]:
        import pyarrow as pa

        # Paths in Delta's log are URL-encoded: the folder `a%20b` is `a%2520b` there.
        return {unquote(path) for path in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()}

    @staticmethod
    def _with_vectors(table: DeltaTable) -> set[str]:
        """Returns the paths of files with deletion vectors, by which other writers have deleted rows without
        rewriting the files.
        """
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
    def _translated_errors(self, what: str) -> Iterator[None]:
        """Returns a context that converts errors of Delta to errors of tidegate.

        After an error the Delta table is loaded again, because it may be half updated.
        """
        try:
            with translated_errors(what, self._url):
                yield
        except TidegateError:
            self._table = None
            raise


@contextmanager
def translated_errors(what: str, url: str) -> Iterator[None]:
    """Returns a context that converts errors of Delta to TableError, or to StorageError if a retry may help.

    `what` names the operation on the Delta table at `url`.
    """
    deltalake = imported()
    try:
        yield
    except (deltalake.exceptions.DeltaError, OSError, ValueError) as error:
        text = f"cannot {what} the Delta table at {url}: {error}"
        if is_final(error):
            raise TableError(
                f"{text}. The table has a property or feature that tidegate does not support: remove it, or write to "
                "another url"
            ) from error
        raise StorageError(text) from error


def retention_properties(history_ms: int) -> dict[str, str]:
    """Returns Delta table properties that keep old versions and their files for `history_ms`."""
    kept = f"interval {max(1, -(-history_ms // 1_000))} seconds"
    return {_FILE_RETENTION: kept, _LOG_RETENTION: kept}


def interval_ms(text: str) -> int | None:
    """Parses an interval of Delta (`interval 1 week 2 days`) to ms. Returns None for other text."""
    words = text.lower().removeprefix("interval").split()
    numbers, units = words[::2], [word.removesuffix("s") for word in words[1::2]]
    if not words or len(words) % 2 or not all(n.isdecimal() for n in numbers) or set(units) - _UNITS_MS.keys():
        return None
    return sum(int(number) * _UNITS_MS[unit] for number, unit in zip(numbers, units, strict=True))


def storage_options(url: str) -> dict[str, str]:
    """Returns the options that give Delta access to the storage, in addition to the AWS_ variables, which Delta
    reads itself.
    """
    if not url.startswith("s3://"):
        return {}
    from tidegate.storage.files.s3_files import ENDPOINT_VARIABLES

    endpoint = next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if endpoint is None:
        return {}
    options = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": str(endpoint.startswith("http://")).lower()}
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options["AWS_REGION"] = "us-east-1"
    return options


def imported() -> Any:
    """Imports and returns the package `deltalake`.

    Raises ConfigurationError with the way to install it if it is missing.
    """
    return load("a Delta Lake table", "delta", "deltalake")


def partition_of_bytes(table: DeltaTable) -> str | None:
    """Returns a column of bytes by which a Delta table is partitioned, or None.

    Its values cannot be read: some writers put the bytes `ab` into the log as `ab`, and others as `\\u0061\\u0062`.
    """
    types = pa.schema(table.schema().to_arrow())
    return next((name for name in table.metadata().partition_columns if _is_bytes(types.field(name).type)), None)


def padded_column(table: DeltaTable) -> str | None:
    """Returns the path and the type of a column of a Delta table that Spark declares as CHAR, or None.

    The files have its values without spaces at the end, and Spark fills them with spaces when it reads them.
    """
    for path, metadata in _columns(json.loads(table.schema().to_json())):
        declared = str(metadata.get(_DECLARED, ""))
        if re.search(r"\bchar\(", declared, re.IGNORECASE):
            return f"{path!r} as {declared}"
    return None


def _is_bytes(found: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(found) or types.is_large_binary(found) or types.is_binary_view(found))


def check_place(url: str) -> None:
    """Raises ConfigurationError for a URL at which a Delta table cannot be, or for which `deltalake` would use another
    folder. `url` is the normalized URL of a store.

    `deltalake` decodes percent escapes in paths and reads a backslash as a slash, so `a%20b` would become the folder `a
    b`.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme == "memory":
        raise ConfigurationError(f"a Delta table cannot be in memory ({url}): give a folder or s3://bucket/prefix")
    if separator and scheme not in ("s3", "file", "local"):
        raise ConfigurationError(
            f"a Delta table cannot be at {url}: tidegate supports Delta tables in folders and at s3:// only, because "
            "`deltalake` reaches other storage by means of its own. Give a folder or s3://bucket/prefix"
        )
    if (wrong := re.search(r"%[0-9A-Fa-f]{2}|\\", url)) is not None:
        raise ConfigurationError(
            f"a Delta table cannot be at {url}: Delta readers decode {wrong[0]!r} and would look in another folder. "
            "Rename the folder"
        )


_FINAL = re.compile("unsupported|invalid protocol|catalog-managed|append only|append-only", re.IGNORECASE)
"""Words in error texts of `deltalake` for tables that tidegate cannot write. These errors have no classes of
their own.
"""


def is_final(error: Exception) -> bool:
    """Returns whether an error of Delta has its cause in the table itself, so that no retry helps."""
    from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError

    if isinstance(error, DeltaProtocolError | SchemaMismatchError):
        return True
    return isinstance(error, DeltaError) and _FINAL.search(str(error)) is not None


def _text(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)


_FORBIDDEN_IN_NAMES = " ,;{}()\n\t="
"""Characters that Spark's Parquet readers refuse in column names, and so does Delta without column mapping."""


def check_delta_schema(schema: pa.Schema) -> None:
    """Raises TableError, naming the column and what to do, if Delta cannot store a column of the schema."""
    seen: dict[str, str] = {}
    for field in schema:
        if bad := sorted(set(field.name) & set(_FORBIDDEN_IN_NAMES)):
            raise TableError(f"column {field.name!r} has {bad[0]!r} in its name, which Delta Lake refuses: rename it")
        if (other := seen.setdefault(field.name.lower(), field.name)) != field.name:
            raise TableError(
                f"columns {other!r} and {field.name!r} differ by case alone, which Delta Lake ignores: rename one"
            )
        for part in _leaves(field.type):
            if (hint := _hint(part)) is not None:
                raise TableError(f"column {field.name!r} is {field.type}, which Delta Lake cannot hold: {hint}")


def _leaves(data_type: pa.DataType) -> Iterator[pa.DataType]:
    found = decoded_type(data_type)
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        yield from _leaves(found.value_type)
    elif pa.types.is_map(found):
        yield from _leaves(found.key_type)
        yield from _leaves(found.item_type)
    elif pa.types.is_struct(found):
        for field in found:
            yield from _leaves(field.type)
    else:
        yield found


def _hint(found: pa.DataType) -> str | None:
    """Returns advice for a type that Delta cannot store, or None for a type that it can store."""
    types = pa.types
    if types.is_timestamp(found):
        if found.unit != "us":
            return f"cast it to microseconds, {pa.timestamp('us', found.tz)}"
        return None if found.tz in (None, "UTC") else "its time zone must be UTC; cast it to timestamp[us, tz=UTC]"
    if types.is_unsigned_integer(found):
        return "cast it to a signed integer"
    if types.is_float16(found):
        return "cast it to float32"
    held = (
        types.is_boolean(found)
        or types.is_signed_integer(found)
        or types.is_floating(found)
        or types.is_string(found)
        or types.is_large_string(found)
        or types.is_binary(found)
        or types.is_large_binary(found)
        or types.is_date32(found)
        or types.is_decimal128(found)
    )
    return None if held else "cast it to a number, a string, a date or a timestamp[us]"


def unwritable(table: DeltaTable) -> str | None:
    """Returns why tidegate cannot write to a Delta table and what to do about it, or None if it can write."""
    protocol = table.protocol()
    return refusal(
        protocol.min_reader_version,
        protocol.min_writer_version,
        {*(protocol.writer_features or ()), *(protocol.reader_features or ())},
        table.metadata().configuration,
        json.loads(table.schema().to_json()),
    )


WRITER_VERSION_MAX = 7
READER_VERSION_MAX = 3

_PLAIN_FILES_SUFFICE = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
    }
)
"""Delta writer features that do not affect an append unless a column or a property uses them, which `_used` checks."""

_NEEDED = {
    "allowColumnDefaults": "column defaults",
    "catalogManaged": "commits through a catalog",
    "clustering": "liquid clustering: each file needs statistics of the clustering columns",
    "domainMetadata": "domain metadata",
    "icebergCompatV1": "files that Iceberg reads too",
    "icebergCompatV2": "files that Iceberg reads too",
    "identityColumns": "identity columns, whose values the table gives",
    "inCommitTimestamp": "in-commit timestamps",
    "materializePartitionColumns": "partition columns in the files as well",
    "rowTracking": "row tracking: each file needs the ids of its rows",
    "typeWidening": "type widening",
    "vacuumProtocolCheck": "a check of the protocol before VACUUM",
}

_ELSEWHERE = (
    "write to another url. Or let Spark append, in for_each_checkpoint: "
    'df.write.format("delta").mode("append").save(url)'
)

_DECLARED = "__CHAR_VARCHAR_TYPE_STRING"
"""Key of the metadata in which Spark stores the declared type of a CHAR or VARCHAR column."""

LEGACY_IDENTITY_VERSION = 6
"""Writer version that implies identity columns, in tables without a list of features."""


def refusal(
    min_reader_version: int,
    min_writer_version: int,
    writer_features: Iterable[str],
    properties: Mapping[str, str],
    schema: Mapping[str, Any],
) -> str | None:
    """Returns why tidegate cannot write to a Delta table with this protocol, and what to do, or None if it can write.

    `properties` are the properties of the table (`delta.…`). `schema` is its schema as in the log, parsed from JSON.
    """
    if used := _used(properties, schema):
        return used
    if min_writer_version > WRITER_VERSION_MAX or min_reader_version > READER_VERSION_MAX:
        return (
            f"needs writers of version {min_writer_version} and readers of version {min_reader_version} of the "
            f"protocol; tidegate supports versions up to {WRITER_VERSION_MAX} and {READER_VERSION_MAX}: {_ELSEWHERE}"
        )
    features = set(writer_features)
    if min_writer_version == LEGACY_IDENTITY_VERSION:
        features.add("identityColumns")
    if unknown := sorted(features - _PLAIN_FILES_SUFFICE):
        named = "; ".join(f"{name} ({_NEEDED[name]})" if name in _NEEDED else name for name in unknown)
        return (
            f"has the writer feature {named}, which tidegate does not write: remove it (ALTER TABLE ... DROP FEATURE "
            f"{unknown[0]}), or {_ELSEWHERE}"
        )
    return None


def _used(properties: Mapping[str, str], schema: Mapping[str, Any]) -> str | None:
    """Returns text about the first property or column of the table that tidegate does not support, or None."""
    mapping = properties.get("delta.columnMapping.mode", "none")
    if mapping.lower() != "none":
        return (
            f"has column mapping (delta.columnMapping.mode = {mapping}): columns have other names in its files than in "
            f"the table, and readers would find no values in tidegate's files. {_upper(_ELSEWHERE)}"
        )
    prefix = "delta.constraints."
    for key, condition in sorted(properties.items()):
        if key.lower().startswith(prefix):
            name = key[len(prefix) :]
            return (
                f"has the CHECK constraint {name} ({condition}), which tidegate does not check: drop it (ALTER TABLE "
                f"... DROP CONSTRAINT {name}) and filter the stream, or {_ELSEWHERE}"
            )
    if (kept := properties.get("delta.setTransactionRetentionDuration")) is not None:
        return (
            f"forgets identifiers of transactions (delta.setTransactionRetentionDuration = {kept}). tidegate needs its "
            "identifier to avoid duplicate rows: unset the property (ALTER TABLE ... UNSET TBLPROPERTIES)"
        )
    for path, metadata in _columns(schema):
        if (expression := metadata.get("delta.generationExpression")) is not None:
            return (
                f"has the generated column {path} ({expression}), whose values tidegate does not compute: {_ELSEWHERE}"
            )
        if any(key.startswith("delta.identity.") for key in metadata):
            return f"has the identity column {path}, whose values only the table may give: {_ELSEWHERE}"
        if (rule := metadata.get("delta.invariants")) is not None:
            return f"has the invariant {rule} of column {path}, which tidegate does not check: {_ELSEWHERE}"
        if (declared := metadata.get(_DECLARED)) is not None:
            return (
                f"declares column {path} as {declared}, and tidegate does not check the lengths of strings: make it a "
                f"string (ALTER TABLE ... ALTER COLUMN {path} TYPE STRING), or {_ELSEWHERE}"
            )
    return None


def _columns(data_type: object, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the path and the metadata of each column, and of each field of a struct in it, from a schema in Delta's
    log.
    """
    if not isinstance(data_type, Mapping):
        return
    for field in data_type.get("fields", ()):
        below = f"{path}.{field['name']}".lstrip(".")
        yield below, field.get("metadata") or {}
        yield from _columns(field["type"], below)
    for part in ("elementType", "keyType", "valueType"):
        yield from _columns(data_type.get(part), path)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
