"""Connections to PostgreSQL: descriptions of tables, the replication slot, the snapshot, and the stream of the log.

psycopg 3 has no replication cursor. `LogStream` implements the replication protocol with psycopg's wrapper of libpq
(`psycopg.pq`), so no second driver is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.connectors.postgres_cdc.options import CdcColumn, CdcPosition, CdcTable, lsn_number, lsn_text
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

if TYPE_CHECKING:
    import psycopg

    Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

CONNECT_S = 10
_SETTINGS = (
    "-c datestyle=ISO -c timezone=UTC -c intervalstyle=postgres -c extra_float_digits=3 -c bytea_output=hex "
    "-c statement_timeout=0 -c idle_in_transaction_session_timeout=0 -c row_security=off"
)
_EPOCH_2000_MS = 946_684_800_000
_WAL_DATA = struct.Struct(">QQq")
_KEEPALIVE = struct.Struct(">QqB")
_STATUS = struct.Struct(">cQQQqB")
_METHOD = "from_postgres_cdc"


def driver() -> Any:
    """Imports and returns psycopg. Raises ConfigurationError if it is not installed."""
    return load(_METHOD, "postgres", "psycopg")


def connect(dsn: str, replication: bool = False) -> Connection:
    """Opens a connection in autocommit mode, in which values have the text format that `text_values.py` parses.

    Raises psycopg.OperationalError, and ConfigurationError for an invalid `dsn`.
    """
    psycopg = driver()
    try:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(
            f"{_METHOD}(dsn=): dsn= is not an address of PostgreSQL: {error}; give one "
            "such as 'postgresql://user@host/database'"
        ) from error
    options = f"{given.get('options', '')} {_SETTINGS}".strip()
    more = {"replication": "database"} if replication else {}
    found: Connection = psycopg.connect(
        dsn,
        autocommit=True,
        connect_timeout=CONNECT_S,
        application_name="tidegate",
        client_encoding="UTF8",
        options=options,
        **more,
    )
    return found


@contextmanager
def connected(dsn: str) -> Iterator[Connection]:
    """Returns a context with a connection.

    Raises ConfigurationError if the server does not answer or refuses a statement.
    """
    psycopg = driver()
    try:
        with connect(dsn) as connection:
            yield connection
    except psycopg.Error as error:
        raise ConfigurationError(
            f"{_METHOD}: the database failed to answer: {error}; check that it runs, the address in dsn= and the "
            "rights of the user"
        ) from error


_TABLE = """
SELECT n.nspname::text, c.relname::text, c.oid::int8, c.relkind::text, c.relreplident::text, c.relhassubclass,
       c.relpersistence::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""
_COLUMNS = """
SELECT a.attname::text, a.attnum, a.atttypid::int8, a.atttypmod, t.typtype::text, t.typbasetype::int8, t.typtypmod,
       a.attnotnull
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum
"""
_KEYS = """
SELECT a.attname::text FROM pg_index i, unnest(i.indkey) WITH ORDINALITY k(number, place), pg_attribute a
WHERE i.indrelid = %s AND i.indisprimary AND a.attrelid = i.indrelid AND a.attnum = k.number ORDER BY k.place
"""


def describe_table(connection: Connection, name: str) -> CdcTable:
    """Returns a table. Raises ConfigurationError if its changes cannot be followed."""
    psycopg = driver()
    try:
        found = connection.execute("SELECT to_regclass(%s)::oid::int8", (name,)).fetchone()
    except psycopg.errors.Error as error:
        if not str(error.sqlstate).startswith(_NAME_ERRORS):
            raise
        found = None
    table = None if found is None or found[0] is None else _table_of(connection, found[0])
    if table is None:
        raise ConfigurationError(f"{_METHOD}(tables=): there is no table {name!r}; give names such as 'public.orders'")
    return table


_NAME_ERRORS = ("42", "0A", "22")
"""Classes of SQLSTATE for a text that is no name of a table."""


def _table_of(connection: Connection, oid: int) -> CdcTable | None:
    """Returns a table, or None if it does not exist. Raises ConfigurationError if its changes cannot be followed."""
    found = connection.execute(_TABLE, (oid,)).fetchone()
    if found is None:
        return None
    schema, table, oid, kind, identity, has_children, persistence = found
    text = f"{schema}.{table}"
    if kind not in ("r", "p") or persistence != "p":
        raise ConfigurationError(
            f"{_METHOD}(tables=): the log has no changes of {text}, because it is a view, a foreign table, or is "
            "unlogged or temporary; give an ordinary, logged table"
        )
    if kind == "r" and has_children:
        raise ConfigurationError(
            f"{_METHOD}(tables=): {text} has tables that inherit from it, and their rows would be missing; give the "
            "names of these tables instead"
        )
    columns = []
    for name, number, type_oid, modifier, kind_of_type, base, base_modifier, required in connection.execute(
        _COLUMNS, (oid,)
    ):
        is_domain = kind_of_type == "d"
        columns.append(
            CdcColumn(
                name=name,
                number=number,
                oid=type_oid,
                modifier=base_modifier if is_domain else modifier,
                base_oid=base if is_domain else type_oid,
                required=required,
            )
        )
    keys = tuple(key for (key,) in connection.execute(_KEYS, (oid,)))
    if not keys:
        raise ConfigurationError(f"{_METHOD}(tables=): {text} has no primary key, which identifies its rows; add one")
    if computed := [key for key in keys if key not in {column.name for column in columns}]:
        raise ConfigurationError(
            f"{_METHOD}(tables=): the primary key of {text} has the generated column {computed[0]!r}, which the log "
            "does not contain; give the table a primary key of other columns"
        )
    if identity not in ("d", "f"):
        raise ConfigurationError(
            f"{_METHOD}(tables=): the log has no primary key of deleted rows of {text}. Run ALTER TABLE {text} REPLICA "
            "IDENTITY DEFAULT (or FULL)"
        )
    return CdcTable(oid, schema, table, tuple(columns), keys)


def changed_table(was: CdcTable, now: CdcTable | None) -> str | None:
    """Returns text about a change of a table since the job was submitted that would make rows wrong, or None."""
    if now is None:
        return f"table {was.text} was dropped, or created again"
    if was.text != now.text:
        return f"table {was.text} was renamed to {now.text}"
    if set(was.keys) != set(now.keys):
        keys = f"its primary key was ({', '.join(was.keys)}), and is ({', '.join(now.keys)}) now"
        return f"table {was.text} has changed: {keys}"
    found = {column.name: column for column in now.columns}
    for column in was.columns:
        after = found.get(column.name)
        if after is None:
            return f"table {was.text} has changed: column {column.name!r} was dropped or renamed"
        if after.number != column.number:
            return f"table {was.text} has changed: column {column.name!r} was dropped and added again"
    return None


def check_tables(connection: Connection, publication: str, tables: Sequence[CdcTable]) -> None:
    """Raises ConfigurationError if tables or the publication have changed in a way that makes changes of rows
    missing.
    """
    _check_unchanged(connection, tables)
    try:
        _check_publication(connection, publication, tables)
    except ConfigurationError:
        # A table that was dropped or renamed since the first check is also missing in the publication.
        _check_unchanged(connection, tables)
        raise


def _check_unchanged(connection: Connection, tables: Sequence[CdcTable]) -> None:
    """Raises ConfigurationError if a table was dropped, renamed, or changed in a way that makes changes of rows
    missing.
    """
    with connection.transaction():
        # All queries see one state of the catalog.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for table in tables:
            fault = changed_table(table, _table_of(connection, table.oid))
            if fault is not None:
                raise ConfigurationError(fault)


def prepare_publication(connection: Connection, publication: str, tables: Sequence[CdcTable]) -> None:
    """Creates the publication, or checks that it publishes all changes of the tables. Raises ConfigurationError."""
    sql = driver().sql
    level = connection.execute("SELECT current_setting('wal_level')").fetchone()
    if level != ("logical",):
        raise ConfigurationError(
            f"{_METHOD}: wal_level of the server is {'' if level is None else level[0]!r}; set wal_level = logical and "
            "restart the server"
        )
    if connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (publication,)).fetchone() is None:
        names = sql.SQL(", ").join(sql.Identifier(table.schema, table.name) for table in tables)
        connection.execute(
            sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)").format(
                sql.Identifier(publication), names
            )
        )
        return
    _check_publication(connection, publication, tables)


_FILTERS_SINCE = 150_000
"""The first version of the server in which publications have row filters and lists of columns."""


def _check_publication(connection: Connection, publication: str, tables: Sequence[CdcTable]) -> None:
    """Raises ConfigurationError if a publication does not publish all rows, columns or kinds of changes of the
    tables.
    """
    has_filters = connection.info.server_version >= _FILTERS_SINCE
    more = "rowfilter::text, attnames::text[]" if has_filters else "NULL, NULL"
    asked = f"SELECT schemaname::text, tablename::text, {more} FROM pg_publication_tables WHERE pubname = %s"
    has = {(schema, name): rest for schema, name, *rest in connection.execute(asked, (publication,))}
    for table in tables:
        row_filter, columns = has.get((table.schema, table.name), (None, None))
        if row_filter is not None:
            raise ConfigurationError(
                f"{_METHOD}: publication {publication!r} leaves out rows of {table.text}: WHERE {row_filter}. The "
                "snapshot would have them. Give another publication=, and filter the stream"
            )
        lacks = [each.name for each in table.columns if columns is not None and each.name not in columns]
        if lacks:
            raise ConfigurationError(
                f"{_METHOD}: publication {publication!r} leaves out columns of {table.text}: {', '.join(lacks)}. Give "
                "another publication=, and drop the columns in a step"
            )
        if (table.schema, table.name) not in has:
            raise ConfigurationError(
                f"{_METHOD}: publication {publication!r} does not have table {table.text}; run ALTER PUBLICATION "
                f"{publication} ADD TABLE {table.text}, or give another publication="
            )
    kinds = "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s"
    if connection.execute(kinds, (publication,)).fetchone() != (True,):
        raise ConfigurationError(
            f"{_METHOD}: publication {publication!r} leaves out some changes; run ALTER PUBLICATION {publication} SET "
            "(publish = 'insert, update, delete, truncate')"
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot.

    `confirmed_lsn`: changes before it are no longer available. `retained_bytes`: WAL that the server keeps for it.
    """

    database: str
    confirmed_lsn: int
    is_lost: bool
    retained_bytes: int


_SLOT = """
SELECT database::text, confirmed_flush_lsn::text, wal_status = 'lost',
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
                       restart_lsn)::int8
FROM pg_replication_slots WHERE slot_name = %s
"""


def find_slot(connection: Connection, slot: str) -> Slot | None:
    """Returns the replication slot of this name, or None if it does not exist."""
    found = connection.execute(_SLOT, (slot,)).fetchone()
    if found is None:
        return None
    database, confirmed, is_lost, retained = found
    return Slot(database or "", lsn_number(confirmed or "0/0"), bool(is_lost), int(retained or 0))


def lost_changes(slot: Slot | None, at: CdcPosition, system: str | None = None) -> str | None:
    """Returns an error text if the changes after a position can no longer be read from the slot, or None if they can.

    `system` is the id of the server, to compare it with the checkpoint's.
    """
    where = lsn_text(at.lsn)
    again = "Start the job without a checkpoint and with another slot=; it begins with a new snapshot of the tables"
    if system is not None and at.system and system != at.system:
        return (
            f"slot {at.slot!r} is on another server (system {system}, and the checkpoint is of {at.system}), "
            f"whose log has other positions. Connect to the server of the checkpoint. Or: {again}"
        )
    if slot is None:
        return (
            f"slot {at.slot!r} no longer exists: the changes of {', '.join(at.tables)} after {where} are lost. {again}"
        )
    if slot.is_lost:
        return (
            f"the server removed the log that slot {at.slot!r} needs (max_slot_wal_keep_size): the changes of "
            f"{', '.join(at.tables)} after {where} are lost. {again}"
        )
    if slot.confirmed_lsn > at.lsn:
        return (
            f"slot {at.slot!r} was read up to {lsn_text(slot.confirmed_lsn)}, and the checkpoint is at {where}: the "
            f"changes of {', '.join(at.tables)} between them are lost. Restore a newer checkpoint. Or: {again}"
        )
    return None


class LogStream:
    """Streams the messages of pgoutput from a slot, from a position on. Never blocks."""

    def __init__(self, dsn: str, slot: str, publication: str, start_lsn: int) -> None:
        """Starts replication at `start_lsn`. Raises psycopg.Error if the server refuses."""
        psycopg = driver()
        self._connection = connect(dsn, replication=True)
        try:
            self._libpq = self._connection.pgconn
            found = run_command(self._libpq, "IDENTIFY_SYSTEM")
            self.system = (found.get_value(0, 0) or b"").decode()
            """The identifier of the server."""
            names = psycopg.sql.quote('"' + publication.replace('"', '""') + '"')
            start = f'START_REPLICATION SLOT "{slot}" LOGICAL {lsn_text(start_lsn)}'
            run_command(self._libpq, f"{start} (proto_version '1', publication_names {names})")
        except BaseException:
            self._connection.close()
            raise
        self.received_lsn = start_lsn
        """Everything before it has been sent by the server."""
        self.confirmed_lsn = 0
        """The server may forget the log before it. Set by the reader."""
        self.wants_status = False
        """True if the server waits for a status."""

    def receive(self) -> bytes | None:
        """Returns the next pgoutput message, or None if none has arrived.

        Raises psycopg.OperationalError if the stream has ended.
        """
        consumed = False
        while True:
            size, data = self._libpq.get_copy_data(1)
            if size > 0:
                message = bytes(data)
                if message[:1] == b"w":
                    _, end, _ = _WAL_DATA.unpack_from(message, 1)
                    self.received_lsn = max(self.received_lsn, end)
                    return message[1 + _WAL_DATA.size :]
                end, _, replies = _KEEPALIVE.unpack_from(message, 1)
                self.received_lsn = max(self.received_lsn, end)
                self.wants_status = self.wants_status or replies == 1
            elif size == 0 and not consumed:
                self._libpq.consume_input()
                consumed = True
            elif size == 0:
                return None
            else:
                raise _end_of_stream(self._libpq.get_result())

    def send_status(self) -> None:
        """Reports the received position and the confirmed position, up to which the server may delete its log."""
        at_us = (now_ms() - _EPOCH_2000_MS) * 1_000
        confirmed = self.confirmed_lsn
        self._libpq.put_copy_data(_STATUS.pack(b"r", max(self.received_lsn, confirmed), confirmed, confirmed, at_us, 0))
        self._libpq.flush()
        self.wants_status = False

    def close(self) -> None:
        """Closes the connection to the server."""
        self._connection.close()


def _end_of_stream(result: Any) -> Exception:
    """Returns the error for a stream that the server has ended. It is an OperationalError if a retry may succeed."""
    psycopg = driver()
    ended = "the PostgreSQL server ended the stream of the replication log"
    advice = "check the log of the server"
    if result is None or result.status != psycopg.pq.ExecStatus.FATAL_ERROR:
        return psycopg.OperationalError(f"{ended}; {advice}")  # type: ignore[no-any-return]
    found: Exception = psycopg.errors.error_from_result(result)
    if str(getattr(found, "sqlstate", None) or "XX").startswith(_INTERNAL):
        return psycopg.OperationalError(f"{ended}: {found}; {advice}")  # type: ignore[no-any-return]
    return found


_INTERNAL = "XX"
"""The class of SQLSTATE for errors within the server, which may pass."""


def check_replication(dsn: str) -> None:
    """Raises psycopg.Error if the user may not read the log."""
    connection = connect(dsn, replication=True)
    try:
        run_command(connection.pgconn, "IDENTIFY_SYSTEM")
    finally:
        connection.close()


def run_command(libpq: Any, command: str) -> Any:
    """Executes a replication command and returns its result. Raises psycopg.Error if the server refuses it."""
    return checked_result(libpq.exec_(command.encode()))


def checked_result(result: Any) -> Any:
    """Returns a libpq result. Raises psycopg.Error if the result is an error."""
    psycopg = driver()
    if result.status in (psycopg.pq.ExecStatus.FATAL_ERROR, psycopg.pq.ExecStatus.BAD_RESPONSE):
        raise psycopg.errors.error_from_result(result)
    return result


class SlotCreation:
    """Creates a replication slot in the background. The server waits for open transactions, so this may take long.

    The slot's exported snapshot can be used until this object is closed.
    """

    def __init__(self, dsn: str, slot: str) -> None:
        self._connection = connect(dsn, replication=True)
        self._libpq = self._connection.pgconn
        self.system = (run_command(self._libpq, "IDENTIFY_SYSTEM").get_value(0, 0) or b"").decode()
        self._libpq.send_query(f'CREATE_REPLICATION_SLOT "{slot}" LOGICAL pgoutput EXPORT_SNAPSHOT'.encode())
        self._libpq.flush()

    def created(self) -> tuple[int, str] | None:
        """Returns the LSN of the slot and the name of its snapshot, or None if the slot is not created yet.

        Raises psycopg.Error.
        """
        self._libpq.consume_input()
        if self._libpq.is_busy():
            return None
        result = checked_result(self._libpq.get_result())
        position, snapshot = result.get_value(0, 1) or b"0/0", result.get_value(0, 2) or b""
        while self._libpq.get_result() is not None:
            pass
        return lsn_number(position.decode()), snapshot.decode()

    def close(self) -> None:
        """Closes the connection. A slot that is still being created is abandoned."""
        self._connection.close()


class SnapshotRows:
    """Reads the rows of a table as CSV, in the snapshot that the connection's transaction sees."""

    def __init__(self, connection: Connection, table: CdcTable) -> None:
        sql = driver().sql
        names = sql.SQL(", ").join(sql.Identifier(each.name) for each in table.columns)
        query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT csv)").format(
            names, sql.Identifier(table.schema, table.name)
        )
        self._cursor = connection.cursor()
        self._context = self._cursor.copy(query)
        self._rows = iter(self._context.__enter__())

    def read(self, rows_max: int, bytes_max: int) -> list[bytes]:
        """Returns the next rows, up to `rows_max` or about `bytes_max` bytes. Empty at the end."""
        found: list[bytes] = []
        size = 0
        while len(found) < rows_max and size < bytes_max:
            row = next(self._rows, None)
            if row is None:
                break
            found.append(bytes(row))
            size += len(found[-1])
        return found

    def close(self) -> None:
        """Ends the COPY statement."""
        self._context.__exit__(None, None, None)
        self._cursor.close()


def snapshot_connection(dsn: str, snapshot: str) -> Connection:
    """Opens a connection with a transaction that sees an exported snapshot. Raises psycopg.Error."""
    connection = connect(dsn)
    try:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(driver().sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot))
    except BaseException:
        connection.close()
        raise
    return connection
