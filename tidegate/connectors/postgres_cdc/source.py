"""`PostgresCdcSource`: reads tables of PostgreSQL, first a snapshot, and then the changes from the server's log.

Rules:

- There is one split, the replication slot. Its payload is a `CdcPosition`, which a checkpoint contains with the rows
  before it.
- The snapshot is consistent with the start of the slot, so each change is in exactly one of snapshot and log.
- A snapshot is valid as long as its connection. If the job fails before its end, the rows that were read are deleted
  again (TRUNCATE of each table), the slot is dropped, and a new slot with a new snapshot begins.
- The server sends transactions in commit order, and sends them again from any position that was not confirmed. A
  position within a transaction is the end of the previous transaction, and the number of rows after it.
- Positions are confirmed to the server only when a completed checkpoint contains them. The server keeps its log until
  then. It is checked once a minute how much that is.
- Without changes of the tables the position follows the end of the log, so that other tables do not hold it back.
- Rows of the log are read only while the tables are as they were when the job began. The catalog is compared when the
  reader begins, whenever the log describes a table again, and once a minute. Without that, a table that was renamed or
  created again, a column that was dropped and added again, or a publication without some changes would silently give
  wrong rows.
- The reader waits for a server that does not answer, and for a slot that another process still reads. Changes that are
  lost, and tables that have changed in a way that rows do not fit, are a ConfigurationError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from tidegate.connectors.formats.row_versions import DELETE_ROW, TRUNCATE, UNCHANGED, UPSERT
from tidegate.connectors.postgres_cdc.client import (
    LogStream,
    SlotCreation,
    SnapshotRows,
    check_replication,
    check_tables,
    connect,
    connected,
    driver,
    find_slot,
    lost_changes,
    prepare_publication,
    snapshot_connection,
)
from tidegate.connectors.postgres_cdc.options import CdcPosition, CdcTable, lsn_text, rows_column, source_schema
from tidegate.connectors.postgres_cdc.pgoutput import (
    UNCHANGED_VALUE,
    Begin,
    Commit,
    Relation,
    RowChange,
    Truncate,
    Values,
    parse,
)
from tidegate.connectors.postgres_cdc.text_values import TextColumns, arrow_type, column_type, keeps_values, row_schema
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)
READ_BYTES_MAX = 8 * 1024 * 1024
"""Approximate limit of the bytes of values that one read returns. A row may be larger."""
STATUS_MS = 10_000
"""Interval in ms of status messages to the server. It closes a silent connection after wal_sender_timeout, a minute."""
IDLE_MS = 1_000
"""Interval in ms in which the position advances without rows."""
RETRY_MS = (500, 30_000)
"""First and longest pause in ms before a failed connection is tried again."""
SLOT_CHECK_MS = 60_000
WARN_EVERY_MS = 600_000


@dataclass(frozen=True, slots=True)
class PostgresCdcSource:
    """A source that reads the changes of `tables` through the replication slot `slot`.

    `publication`: the publication that has the tables. `warn_bytes`: size of the log that the server keeps for the
    slot, above which a warning is logged.
    """

    dsn: str = field(repr=False)
    tables: tuple[CdcTable, ...]
    slot: str
    publication: str
    warn_bytes: int
    unbounded: Literal[True] = True
    notified: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the source (see `source_schema`)."""
        return source_schema([row_schema(table) for table in self.tables])

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the split of the slot, before its first row.

        Creates the publication if necessary. Raises ConfigurationError.
        """
        with connected(self.dsn) as connection:
            prepare_publication(connection, self.publication, self.tables)
            existed = find_slot(connection, self.slot) is not None
            check_replication(self.dsn)
        return [self._split(CdcPosition("new", self.slot, self._names, self._identities, existed=existed))]

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if the slot or the tables differ from the checkpoint."""
        for split in splits:
            at = decode(split.payload)
            if at.slot != self.slot or at.tables != self._names:
                raise ConfigurationError(
                    f"it read {', '.join(at.tables)} through slot {at.slot!r}, and now reads {', '.join(self._names)} "
                    f"through {self.slot!r}; both cannot change; give tables= and slot= their former values, or start "
                    "without restore"
                )
            for name, was, now in zip(at.tables, at.identities, self._identities, strict=True):
                if was != now:
                    raise ConfigurationError(
                        f"table {name} is not what it was at the checkpoint: it was created again, or columns were "
                        f"added, dropped, or dropped and added again. {_RESUBMIT}"
                    )

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError unless the server still has the changes after the checkpoint's position."""
        for split in splits:
            at = decode(split.payload)
            if at.phase != "log":
                continue
            with connected(self.dsn) as connection:
                lost = lost_changes(find_slot(connection, self.slot), at)
                check_tables(connection, self.publication, self.tables)
            if lost is not None:
                raise ConfigurationError(lost)

    def reader(self) -> SourceReader:
        """Returns a reader with its own connections."""
        return PostgresCdcReader(self)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(table.text for table in self.tables)

    @property
    def _identities(self) -> tuple[str, ...]:
        return tuple(table.identity for table in self.tables)

    def _split(self, at: CdcPosition) -> SourceSplit:
        return SourceSplit(f"slot {self.slot}", encode(at))


@dataclass(slots=True)
class _Snapshot:
    """The state of reading a snapshot. `offset` is the number of the next row, `table` the index of the table that is
    being read.
    """

    position: CdcPosition
    connection: psycopg.Connection[tuple[Any, ...]]
    offset: int
    table: int = 0
    rows: SnapshotRows | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    """A row from the log. `values` has a value for each column of the table; for a deletion, only the keys are set."""

    table: int
    kind: str
    values: Values


class PostgresCdcReader:
    """Reads snapshot and changes of a replication slot. Called from one thread at a time."""

    def __init__(self, source: PostgresCdcSource, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        driver()
        self._source = source
        self._clock_ms = clock_ms
        self._columns = [TextColumns(table) for table in source.tables]
        self._creation: SlotCreation | None = None
        self._creation_since_ms = 0
        self._snapshot: _Snapshot | None = None
        self._stream: LogStream | None = None
        self._at: CdcPosition | None = None
        """The position behind the rows that were returned last."""
        self._relations: dict[int, _Relation | None] = {}
        self._tables_are_checked = False
        """False if the log has described a table since the catalog was compared."""
        self._pending: list[_Event] = []
        self._skip_left = 0
        self._in_transaction = False
        self._lsn = 0
        self._rows_after = 0
        self._confirmed_lsn = 0
        self._status_ms = 0
        self._advanced_ms = 0
        self._retry = _Retry(clock_ms)
        self._checked_ms = clock_ms()
        self._warned_ms: int | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of the snapshot or of the log, without waiting for the server.

        Raises ConfigurationError.
        """
        at: CdcPosition = decode(split.payload)
        if not self._retry.is_due():
            return ReadResult(None, offset, at_end=False)
        try:
            result = self._read(at, offset, rows_max)
        except driver().OperationalError as error:
            self._disconnect()
            self._retry.failed(error)
            return ReadResult(None, offset, at_end=False)
        except driver().Error as error:
            self._disconnect()
            if _is_busy(error):
                self._retry.failed(error)
                return ReadResult(None, offset, at_end=False)
            raise ConfigurationError(
                f"from_postgres_cdc: the server refuses to send changes: {error}; check the rights of the user and "
                "the log of the server"
            ) from error
        self._retry.worked()
        return result

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Allows the server to delete its log before the position of a completed checkpoint, with the next status
        message.
        """
        for split in splits:
            at: CdcPosition = decode(split.payload)
            if at.phase == "log" and at.lsn > self._confirmed_lsn:
                self._confirmed_lsn = at.lsn
                self._status_ms = 0

    def close(self) -> None:
        """Reports the confirmed position to the server, and closes the connections."""
        if self._stream is not None and self._confirmed_lsn > self._stream.confirmed_lsn:
            self._stream.confirmed_lsn = self._confirmed_lsn
            try:
                self._stream.send_status()
            except driver().Error as error:
                log.warning("slot %s keeps its position, because the server is away: %s", self._source.slot, error)
        self._disconnect()

    def _read(self, at: CdcPosition, offset: int, rows_max: int) -> ReadResult:
        match at.phase:
            case "new":
                return self._begin(at, offset)
            case "snapshot":
                snapshot = self._snapshot
                if snapshot is None or snapshot.position != at or snapshot.offset != offset:
                    return self._give_up_snapshot(at, offset)
                return self._snapshot_rows(snapshot, offset, rows_max)
            case "clear":
                return self._clear(at, offset)
            case "log":
                return self._log_rows(at, offset, rows_max)

    # --- the snapshot -------------------------------------------------------------------------------------------------

    def _begin(self, at: CdcPosition, offset: int) -> ReadResult:
        """Creates the slot. When the slot exists, opens its snapshot."""
        slot = self._source.slot
        if at.existed:
            raise ConfigurationError(
                f"slot {slot!r} exists already. A new job makes its own slot, to begin with a snapshot of the tables. "
                f"Give another slot=, or drop it: SELECT pg_drop_replication_slot('{slot}')"
            )
        if self._creation is None:
            with connect(self._source.dsn) as connection:
                # The slot was not there when the job was submitted: an attempt that failed has left it.
                if find_slot(connection, slot) is not None:
                    connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
            self._creation = SlotCreation(self._source.dsn, slot)
            self._creation_since_ms = self._clock_ms()
            log.info("slot %s is created", slot)
        created = self._creation.created()
        if created is None:
            if self._clock_ms() - self._creation_since_ms > RETRY_MS[1]:
                self._creation_since_ms = self._clock_ms()
                log.warning(
                    "slot %s is not created yet: the server waits for the end of transactions that are open, also of "
                    "prepared ones (pg_stat_activity, pg_prepared_xacts)",
                    slot,
                )
            return ReadResult(None, offset, at_end=False)
        lsn, name = created
        position = replace(at, phase="snapshot", lsn=lsn, system=self._creation.system)
        self._snapshot = _Snapshot(position, snapshot_connection(self._source.dsn, name), offset)
        with connect(self._source.dsn) as connection:
            self._check_tables(connection)
        self._creation.close()
        self._creation = None
        log.info("a snapshot of %s at %s is read", ", ".join(at.tables), lsn_text(lsn))
        return ReadResult(None, offset, at_end=False, payload=encode(position))

    def _snapshot_rows(self, snapshot: _Snapshot, offset: int, rows_max: int) -> ReadResult:
        while snapshot.table < len(self._source.tables):
            table = self._source.tables[snapshot.table]
            if snapshot.rows is None:
                snapshot.rows = SnapshotRows(snapshot.connection, table)
            lines = snapshot.rows.read(rows_max, READ_BYTES_MAX)
            if lines:
                arrays = self._values(snapshot.table, _columns_of_csv(lines, len(table.columns)), "the snapshot")
                snapshot.offset += len(lines)
                count = len(lines)
                rows = _TableRows(snapshot.table, range(count), [UPSERT] * count, arrays, [None] * count)
                batch = self._batch([rows], count)
                return ReadResult(batch, snapshot.offset, at_end=False)
            snapshot.rows.close()
            snapshot.rows = None
            snapshot.table += 1
        position = replace(snapshot.position, phase="log", skip=0)
        snapshot.connection.close()
        self._snapshot = None
        log.info("the snapshot is complete, and changes follow from %s on", lsn_text(position.lsn))
        return ReadResult(None, offset, at_end=False, payload=encode(position))

    def _give_up_snapshot(self, at: CdcPosition, offset: int) -> ReadResult:
        """Abandons a snapshot that cannot be continued after a failure.

        Returns a result after which the rows read so far are truncated. A new snapshot follows.
        """
        log.warning("the snapshot of %s was not complete, so it begins anew", ", ".join(at.tables))
        self._disconnect()
        return ReadResult(None, offset, at_end=False, payload=encode(replace(at, phase="clear", skip=0)))

    def _clear(self, at: CdcPosition, offset: int) -> ReadResult:
        if at.skip >= len(self._source.tables):
            return ReadResult(None, offset, at_end=False, payload=encode(replace(at, phase="new", lsn=0, skip=0)))
        batch = self._log_batch([_Event(at.skip, TRUNCATE, [])], at)
        return ReadResult(batch, offset + 1, at_end=False, payload=encode(replace(at, skip=at.skip + 1)))

    # --- the log ------------------------------------------------------------------------------------------------------

    def _log_rows(self, at: CdcPosition, offset: int, rows_max: int) -> ReadResult:
        if self._stream is None or self._at != at:
            self._open_log(at)
        stream = self._stream
        assert stream is not None
        events = self._pending[:rows_max]
        size_bytes = 0
        del self._pending[:rows_max]
        self._rows_after += len(events)
        while len(events) < rows_max and size_bytes < READ_BYTES_MAX:
            data = stream.receive()
            if data is None:
                break
            size_bytes += len(data)
            found = self._events(data)
            if self._skip_left and found:
                skipped = min(self._skip_left, len(found))
                self._skip_left -= skipped
                self._rows_after += skipped
                found = found[skipped:]
            room = rows_max - len(events)
            events += found[:room]
            self._rows_after += len(found[:room])
            self._pending += found[room:]
        if not self._tables_are_checked:
            with connect(self._source.dsn) as connection:
                self._check_tables(connection)
        self._keep_contact(stream)
        return self._result(at, offset, events, stream)

    def _result(self, at: CdcPosition, offset: int, events: list[_Event], stream: LogStream) -> ReadResult:
        if not events and not self._in_transaction and not self._pending and not self._skip_left:
            # There is no row of these tables up to here. A keepalive may be ahead of the last transaction.
            if self._clock_ms() - self._advanced_ms < IDLE_MS:
                return ReadResult(None, offset, at_end=False)
            self._advanced_ms = self._clock_ms()
            self._lsn = max(self._lsn, stream.received_lsn)
            self._rows_after = 0
        position = replace(at, lsn=self._lsn, skip=self._rows_after, system=stream.system)
        if position == at or (not events and self._in_transaction):
            return ReadResult(None, offset, at_end=False)
        self._at = position
        batch = self._log_batch(events, position) if events else None
        return ReadResult(batch, offset + len(events), at_end=False, payload=encode(position))

    def _open_log(self, at: CdcPosition) -> None:
        """Starts reading the log at a position. Raises ConfigurationError if changes after it are lost."""
        self._disconnect()
        with connect(self._source.dsn) as connection:
            lost = lost_changes(find_slot(connection, self._source.slot), at)
            if lost is None:
                self._check_tables(connection)
        if lost is None:
            self._stream = LogStream(self._source.dsn, self._source.slot, self._source.publication, at.lsn)
            lost = lost_changes(None, at, self._stream.system) if self._stream.system != at.system else None
        if lost is not None:
            raise ConfigurationError(lost)
        self._at = at
        self._relations = {}
        self._pending = []
        self._skip_left = at.skip
        self._rows_after = 0
        self._in_transaction = False
        self._lsn = at.lsn
        self._status_ms = 0

    def _keep_contact(self, stream: LogStream) -> None:
        """Sends a status message if one is due, and checks how much log the server keeps."""
        now_ms = self._clock_ms()
        news = self._confirmed_lsn > stream.confirmed_lsn
        if news or stream.wants_status or now_ms - self._status_ms >= STATUS_MS:
            stream.confirmed_lsn = max(stream.confirmed_lsn, self._confirmed_lsn)
            stream.send_status()
            self._status_ms = now_ms
        if now_ms - self._checked_ms < SLOT_CHECK_MS:
            return
        self._checked_ms = now_ms
        with connect(self._source.dsn) as connection:
            slot = find_slot(connection, self._source.slot)
            self._check_tables(connection)
        kept_bytes = 0 if slot is None else slot.retained_bytes
        if kept_bytes >= self._source.warn_bytes and (
            self._warned_ms is None or now_ms - self._warned_ms >= WARN_EVERY_MS
        ):
            self._warned_ms = now_ms
            log.warning("%s", retained_text(self._source.slot, kept_bytes))

    def _check_tables(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Raises ConfigurationError if the tables have changed since the job began in a way that makes rows wrong."""
        try:
            check_tables(connection, self._source.publication, self._source.tables)
        except ConfigurationError as error:
            raise ConfigurationError(f"changes of rows would be missing: {error}. {_RESUBMIT}") from error
        self._tables_are_checked = True

    def _events(self, data: bytes) -> list[_Event]:
        """Parses a message. Returns its rows, and updates the state of transactions and tables."""
        message = parse(data)
        match message:
            case RowChange(relation=oid, old=old, new=new):
                relation = self._relations[oid]
                return [] if relation is None else relation.events(old, new)
            case Begin():
                self._in_transaction = True
            case Commit(end_lsn=end_lsn):
                self._in_transaction = False
                if self._skip_left:
                    raise ConfigurationError(
                        f"the transaction that ends at {lsn_text(end_lsn)} has {self._skip_left} rows less than when "
                        f"it was read before. Publication {self._source.publication!r} was changed. {_RESUBMIT}"
                    )
                self._lsn = end_lsn
                self._rows_after = 0
            case Relation():
                self._relations[message.oid] = self._relation(message)
                self._tables_are_checked = False
            case Truncate(relations=oids):
                found = (self._relations[oid] for oid in oids)
                return [_Event(each.table, TRUNCATE, []) for each in found if each is not None]
        return []

    def _relation(self, message: Relation) -> _Relation | None:
        """Returns the object that decodes the rows of a table from now on, or None for a table that is not read."""
        for number, table in enumerate(self._source.tables):
            same_name = (table.schema, table.name) == (message.schema, message.name)
            if table.oid == message.oid and same_name:
                return _Relation.of(number, table, message)
            if table.oid == message.oid or same_name:
                how = "was created again" if same_name else f"was renamed to {message.schema}.{message.name}"
                raise ConfigurationError(f"table {table.text} {how}. {_RESUBMIT}")
        return None

    def _log_batch(self, events: Sequence[_Event], at: CdcPosition) -> pa.RecordBatch:
        """Converts rows of the log to a batch, in their order."""
        parts = []
        for number, table in enumerate(self._source.tables):
            places = [place for place, event in enumerate(events) if event.table == number]
            if not places:
                continue
            width = len(table.columns)
            rows = [events[place].values or [None] * width for place in places]
            unchanged = [
                [column.name for column, value in zip(table.columns, row, strict=True) if value is UNCHANGED_VALUE]
                or None
                for row in rows
            ]
            texts = []
            for position in range(width):
                cells = [row[position] for row in rows]
                cells = [None if cell is UNCHANGED_VALUE else cell for cell in cells]
                texts.append(pa.array(cells, pa.binary()).cast(pa.string()))
            arrays = self._values(number, texts, f"the log before {lsn_text(at.lsn)}")
            kinds = [events[place].kind for place in places]
            parts.append(_TableRows(number, places, kinds, arrays, unchanged))
        return self._batch(parts, len(events))

    def _values(self, number: int, texts: Sequence[pa.Array], where: str) -> list[pa.Array]:
        """Converts the texts of a table's columns to values.

        Raises ConfigurationError for a value that does not fit its column.
        """
        reasons: dict[int, str] = {}
        arrays = self._columns[number].arrays(texts, reasons)
        if reasons:
            raise ConfigurationError(
                f"a row of {self._source.tables[number].text} in {where} cannot be read: {reasons[min(reasons)]}; "
                "correct the row, or remove the table from tables="
            )
        return arrays

    def _batch(self, parts: Sequence[_TableRows], count: int) -> pa.RecordBatch:
        """Combines rows of several tables into one batch of `count` rows, at their positions."""
        schema = self._source.schema
        numbers = np.zeros(count, dtype=np.int32)
        kinds = [UPSERT] * count
        unchanged: list[list[str] | None] = [None] * count
        structs: dict[int, pa.Array] = {}
        for part in parts:
            places = list(part.places)
            numbers[places] = part.table
            for place, kind, names in zip(places, part.kinds, part.unchanged, strict=True):
                kinds[place] = kind
                unchanged[place] = names
            fields = list(schema.field(rows_column(part.table)).type)
            takes = np.full(count, -1, dtype=np.int64)
            takes[places] = np.arange(len(places))
            found = pa.StructArray.from_arrays(part.columns, fields=fields)
            structs[part.table] = found if len(places) == count else found.take(pa.array(takes, mask=takes < 0))
        columns = [pa.array(numbers), pa.array(kinds), pa.array(unchanged, schema.field(UNCHANGED).type)]
        for number in range(len(self._source.tables)):
            kind_of_rows = schema.field(rows_column(number)).type
            columns.append(structs[number] if number in structs else pa.nulls(count, kind_of_rows))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _disconnect(self) -> None:
        """Closes all connections. The next read opens the connections that it needs."""
        if self._stream is not None:
            self._stream.close()
        if self._creation is not None:
            self._creation.close()
        if self._snapshot is not None:
            self._snapshot.connection.close()
        self._stream = None
        self._creation = None
        self._snapshot = None
        self._at = None


@dataclass(frozen=True, slots=True)
class _TableRows:
    """Rows of one table in a batch: their kinds, their values as columns, and the unchanged columns of each row.

    `places`: the indices of these rows in the batch.
    """

    table: int
    places: Sequence[int]
    kinds: Sequence[str]
    columns: Sequence[pa.Array]
    unchanged: Sequence[list[str] | None]


@dataclass(frozen=True, slots=True)
class _Relation:
    """Maps rows of a table in the log to the columns of the source.

    `places`: for each column, its index in a row of the log.
    """

    table: int
    places: tuple[int, ...]
    keys: tuple[int, ...]
    """Indices of the key columns among the source's columns."""

    @staticmethod
    def of(number: int, table: CdcTable, message: Relation) -> _Relation:
        """Returns the mapping of a table's columns to rows of the log, from the table's description in the log.

        `number`: the number of the table at the source. Raises ConfigurationError if the table no longer fits the table
        at submission.
        """
        found = {column.name: (place, column) for place, column in enumerate(message.columns)}
        identified_by = {column.name for column in message.columns if column.is_key}
        if message.identity != "f" and identified_by != set(table.keys):
            by = ", ".join(sorted(identified_by))
            raise ConfigurationError(
                f"table {table.text} has changed: deleted rows are identified by ({by}) now, and the job needs "
                f"({', '.join(table.keys)}). {_RESUBMIT}"
            )
        places = []
        for column in table.columns:
            if column.name not in found:
                raise ConfigurationError(
                    f"table {table.text} has changed: column {column.name!r} was dropped or renamed. {_RESUBMIT}"
                )
            place, now = found[column.name]
            if not keeps_values(column, now.oid, now.modifier):
                wanted, has = column_type(column), arrow_type(now.oid, now.modifier)
                how = (
                    f"column {column.name!r} was {wanted}, and is {has} now"
                    if wanted != has
                    else f"column {column.name!r} has another type or fewer digits, and the log does not have the rows "
                    "that PostgreSQL has converted"
                )
                raise ConfigurationError(f"table {table.text} has changed: {how}. {_RESUBMIT}")
            places.append(place)
        new = [name for name in found if name not in {column.name for column in table.columns}]
        if new:
            log.warning(
                "table %s has new columns, which are not read until the job is submitted again: %s", table.text, new
            )
        names = [column.name for column in table.columns]
        return _Relation(number, tuple(places), tuple(names.index(key) for key in table.keys))

    def events(self, old: Values | None, new: Values | None) -> list[_Event]:
        """Returns the rows of a change. An update that changes the key becomes a deletion and a new row."""
        found = []
        after = None if new is None else [new[place] for place in self.places]
        if old is not None:
            before = [old[place] for place in self.places]
            if after is not None:
                # With REPLICA IDENTITY FULL the old row has the values that did not change.
                after = [
                    was if value is UNCHANGED_VALUE and was is not None else value
                    for was, value in zip(before, after, strict=True)
                ]
            if after is None or any(before[key] != after[key] for key in self.keys):
                gone: Values = [None] * len(before)
                for key in self.keys:
                    gone[key] = before[key]
                    if before[key] is None:
                        raise ConfigurationError(
                            "the log has a deleted row without its primary key: a partition has another REPLICA "
                            f"IDENTITY than DEFAULT or FULL. Change it. {_RESUBMIT}"
                        )
                found.append(_Event(self.table, DELETE_ROW, gone))
        if after is not None:
            found.append(_Event(self.table, UPSERT, after))
        return found


_RESUBMIT = "Stop the job, and submit it without a checkpoint and with another slot=; it begins with a new snapshot"


def _columns_of_csv(lines: Sequence[bytes], count: int) -> list[pa.Array]:
    """Parses rows of COPY to columns of strings. An empty value without quotes is null."""
    names = [str(number) for number in range(count)]
    data = b"".join(lines)
    table = pa_csv.read_csv(
        pa.BufferReader(data),
        pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1),
        pa_csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    assert table.num_rows == len(lines), "each message of COPY is one row"
    return [column.combine_chunks() for column in table.columns]


def retained_text(slot: str, kept_bytes: int) -> str:
    """Returns the warning about the log that the server keeps for a slot."""
    return (
        f"the server keeps {kept_bytes:,} bytes of its log for slot {slot!r}, and more until checkpoints of the job "
        "complete. Its disk may become full. Check that the job takes checkpoints, and keeps up with the changes"
    )


def _is_busy(error: Exception) -> bool:
    """Returns whether an error means that another process still reads the slot, such as an earlier attempt of the
    job.
    """
    return getattr(error, "sqlstate", None) == "55006"


class _Retry:
    """Decides when a failed connection is tried again, and logs failures at most once a minute."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._pause_ms = 0
        self._next_ms = 0
        self._logged_ms: int | None = None

    def is_due(self) -> bool:
        """Returns whether the server may be contacted now."""
        return self._pause_ms == 0 or self._clock_ms() >= self._next_ms

    def failed(self, error: Exception) -> None:
        """Records a failed connection, and doubles the pause before the next try."""
        now_ms = self._clock_ms()
        self._pause_ms = min(max(2 * self._pause_ms, RETRY_MS[0]), RETRY_MS[1])
        self._next_ms = now_ms + self._pause_ms
        if self._logged_ms is None or now_ms - self._logged_ms >= SLOT_CHECK_MS:
            self._logged_ms = now_ms
            log.warning("PostgreSQL does not send changes, and is tried again: %s", str(error).strip())

    def worked(self) -> None:
        """Records a successful connection, and resets the pause."""
        if self._logged_ms is not None:
            log.info("PostgreSQL sends changes again")
        self._pause_ms = 0
        self._logged_ms = None
