"""`DeltaUpsert`: a sink that commits each checkpoint as one MERGE of a Delta table.

Each subtask stores its rows in files outside of the table (`upserts.py`), and the coordinator merges the rows of all
subtasks (`client.py`). Rules:

- `deltalake` executes the MERGE: it rewrites the data files that have rows with these keys (copy-on-write), applies and
  removes deletion vectors, and writes the change data feed of a table that has one.
- The MERGE renames the columns of the changes to c0, c1, ..., so that user names need no SQL quoting there.
- Files of the table are skipped by the minimum and maximum keys in Delta's log only for integers, strings and dates.
  The log may have rounded values of other types, and a file that is wrongly skipped would duplicate its keys.
- Keys of floats are refused: with NaN among them `deltalake` duplicates rows (seen in 1.6.6).
- An empty string in a column by which the table is partitioned is a null in Delta, which no key equals. So a key that
  is an empty string is refused.
- Staged files are deleted after the commit. A repeated commit finds its token in the table, and needs no file.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.delta.client import DeltaPlace, commit_once, required_columns
from tidegate.connectors.sink import CommitContext, Sink, SinkContext
from tidegate.connectors.staged_rows import StagedPart, staged_rows
from tidegate.connectors.upserts import check_keys, last_of_each_key, upsert_stage
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import DELETED_COLUMN
from tidegate.storage.tables.partitions import check_texts

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

log = logging.getLogger(__name__)

STAGED_FOLDER = "_tidegate_staged"
"""Subfolder of the table for staged rows (prepared, not merged yet).

Delta and its VACUUM ignore names that begin with `_`.
"""
_TARGET = "there"
_SOURCE = "changes"
_DELETED = "deleted"


@wire
@dataclass(frozen=True, slots=True)
class DeltaRows:
    """The committable of a Delta upsert: the id of the table, and the staged files with their paths, in order."""

    table_id: str
    files: tuple[tuple[str, StagedPart], ...]


class DeltaUpsert(Sink):
    """A sink that replaces and deletes rows of the Delta table at `place` by their keys."""

    def __init__(self, place: DeltaPlace, keys: tuple[str, ...]) -> None:
        self._place = place
        self._keys = keys
        self._table_id: str | None = None
        self._required: tuple[str, ...] = ()
        self._partition_by: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks the table, and creates it if it does not exist."""
        found = self._place.check()
        if found is None:
            self._place.create()
            found = self._place.check()
        self._table_id = found
        table = self._place.load()
        self._required = tuple(required_columns(table))
        self._partition_by = tuple(table.metadata().partition_columns)

    def open(self, context: SinkContext) -> None:
        """Opens the store for staged rows."""
        store = open_store(self._place.url)
        unique = f"{context.prefix}-{uuid4().hex[:8]}"
        names = (f"{unique}-{number}.arrows" for number in itertools.count())

        def write(chunks: Iterable[memoryview]) -> str:
            path = f"{STAGED_FOLDER}/{next(names)}"
            store.write(path, chunks)
            return path

        def check(rows: pa.Table) -> None:
            self._check_rows(rows, self._required, self._partition_by)

        self._stage = upsert_stage(self._keys, write, check)

    def write(self, batch: pa.RecordBatch) -> None:
        """Stages rows in files for the next commit. Raises ConfigurationError for a key without a value."""
        check_keys(batch, self._keys)
        self._stage.add(batch)

    def prepare(self) -> Iterable[bytes]:
        """Returns one committable with all files staged since the last call, or none if there are no rows.

        Raises TableError for rows that the table cannot store: a checkpoint that has them could never be committed.
        """
        files = self._stage.take()
        if not files:
            return []
        assert self._table_id is not None, "check is called when a job is submitted"
        return [encode(DeltaRows(self._table_id, tuple(files)))]

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Merges the staged rows in one transaction, unless the table has the transaction already, and deletes the
        staged files.
        """
        prepared = [_decoded(committable, self._place.named) for committable in committables]
        ids = {one.table_id for one in prepared}
        if len(ids) > 1:
            raise TableError(
                f"checkpoint {context.checkpoint_id} has rows for {len(ids)} tables at {self._place.url}, because the "
                "table was replaced while the checkpoint was taken; restore an older checkpoint"
            )
        (table_id,) = ids
        files = [file for one in prepared for file in one.files]
        store = open_store(self._place.url)

        def merge(table: DeltaTable, properties: CommitProperties) -> None:
            staged = [batch for path, part in files for batch in staged_rows(store.read, path, part)]
            self._merge(table, last_of_each_key(pa.Table.from_batches(staged), self._keys), properties)

        commit_once(self._place, context, table_id, merge)
        store.delete_all(path for path, _ in files)

    def abort(self, job_id: str) -> None:
        """Deletes staged rows of the job's failed attempts."""
        store = open_store(self._place.url)
        prefix = f"{job_id}-".replace("/", "-")
        store.delete_all(f"{STAGED_FOLDER}/{name}" for name in store.list(STAGED_FOLDER) if name.startswith(prefix))

    def _merge(self, table: DeltaTable, changes: pa.Table, properties: CommitProperties) -> None:
        self._check_rows(changes, required_columns(table), table.metadata().partition_columns)
        columns = [name for name in changes.schema.names if name != DELETED_COLUMN]
        source = {name: f"c{number}" for number, name in enumerate(columns)}
        values = {_quoted(name): f"{_SOURCE}.{source[name]}" for name in columns}
        builder = table.merge(
            changes.rename_columns([source.get(name, _DELETED) for name in changes.schema.names]),
            " AND ".join(f"{_TARGET}.{_quoted(key)} = {_SOURCE}.{source[key]}" for key in self._keys),
            source_alias=_SOURCE,
            target_alias=_TARGET,
            streamed_exec=not all(_has_exact_bounds(changes.schema.field(key).type) for key in self._keys),
            commit_properties=properties,
        )
        kept = None
        if DELETED_COLUMN in changes.schema.names:
            builder = builder.when_matched_delete(f"{_SOURCE}.{_DELETED}")
            kept = f"NOT {_SOURCE}.{_DELETED}"
        done = builder.when_matched_update(values, kept).when_not_matched_insert(values, kept).execute()
        changed = sum(done[f"num_target_rows_{what}"] for what in ("inserted", "updated", "deleted"))
        if changed > changes.num_rows:
            log.warning(
                "%s has some keys (%s) in several rows, which others have written. All of these rows were changed "
                "alike: delete the surplus rows",
                self._place.named,
                ", ".join(self._keys),
            )

    def _check_rows(self, changes: pa.Table, required: Sequence[str], partition_by: Sequence[str]) -> None:
        """Raises TableError for rows that the table cannot store, and for keys that Delta would store as another
        value.
        """
        rows = changes
        if DELETED_COLUMN in changes.schema.names:
            rows = changes.filter(pc.invert(changes.column(DELETED_COLUMN)))
        for name in required:
            if count := rows.column(name).null_count:
                raise TableError(
                    f"{self._place.named} requires a value in the column {name!r}, and {count} rows have none: filter "
                    "them, or make the column optional"
                )
        for name in partition_by:
            column = changes.column(name)
            if name in self._keys and _is_text(column.type) and pc.any(pc.equal(column, "")).as_py():
                raise TableError(
                    f"a row has an empty string in the column {name!r}, which is a key and a partition of "
                    f"{self._place.named}. Delta stores it as a null, which no key equals: filter such rows, give them "
                    "another value, or partition by another column"
                )
        for batch in rows.to_batches():
            check_texts(batch, partition_by)


def check_delta_keys(schema: pa.Schema, keys: Sequence[str], where: str) -> None:
    """Raises ConfigurationError for a key column whose type MERGE does not compare reliably (floats)."""
    for name in keys:
        if pa.types.is_floating(decoded_type(schema.field(name).type)):
            raise ConfigurationError(
                f"{where}: the key {name!r} is {schema.field(name).type}, and MERGE in Delta duplicates rows with NaN: "
                "cast it to an integer, a decimal or a string"
            )


def _has_exact_bounds(data_type: pa.DataType) -> bool:
    """Returns whether Delta's log has reliable minimum and maximum values for columns of a type."""
    found = decoded_type(data_type)
    return bool(pa.types.is_integer(found) or pa.types.is_date32(found) or _is_text(found))


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _decoded(committable: bytes, named: str) -> DeltaRows:
    found = decode(committable)
    if not isinstance(found, DeltaRows):
        raise ConfigurationError(
            f"{named}: the checkpoint has rows that were written in another mode; restore with the mode= that wrote "
            "them"
        )
    return found
