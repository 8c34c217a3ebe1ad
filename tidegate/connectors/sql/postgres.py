"""Tables of PostgreSQL through ADBC, which sends Arrow batches by COPY in its binary format.

One transaction commits the rows of a subtask:

1. The tokens are read. Buckets that have this checkpoint's token, or a later one, are skipped.
2. COPY sends the rows: directly into the table in mode "append", else into a temporary table.
3. The tokens are stored. This locks their rows. If another process has stored one of them meanwhile, the transaction is
   rolled back and begins again.
4. Rows of the temporary table replace or delete rows of the table, one file after the other, in their order.

The tokens are locked after the slow part, so a process that hangs during COPY blocks no other process. If a process
hangs later, the server ends its transaction after `idle_in_transaction_session_timeout`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pyarrow as pa

from tidegate.connectors.sql.client import (
    DELETED,
    FILE,
    LOCK_WAIT_S,
    TRIES_MAX,
    CommitKey,
    DatabaseError,
    Files,
    TableClient,
    TableSession,
    first_line,
)
from tidegate.connectors.sql.columns import (
    FLOAT_KEY,
    Accepts,
    Format,
    TableColumn,
    TableShape,
    decimal_type,
    kind_of,
)
from tidegate.connectors.sql.options import TableWrite
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

log = logging.getLogger(__name__)

STAGING = "tidegate_rows"
"""Name of the temporary table for sent rows."""

_PERMANENT = ("0A", "21", "22", "23", "2F", "38", "39", "42", "44", "54", "P0")
"""Classes of SQLSTATE that are permanent errors: data, constraints, names and privileges, unsupported features, limits
of the server, and errors that functions and triggers raise.
"""

_NAME_BYTES_MAX = 63
"""Number of bytes to which PostgreSQL cuts longer names without an error."""

_MICROS = 1_000_000
TIMESTAMPS = (-210_866_803_200 * _MICROS, 9_224_318_016_000 * _MICROS - 1)
"""The range of PostgreSQL's timestamps, in microseconds since 1970."""
DATES = (-2_440_588, 2_145_031_948 - 2_440_588)

_PADDED_KEY = "the database ignores spaces at the end of its values"
_COMPARED_KEY = "the database treats different texts of it as equal; use text or varchar"


def driver() -> Any:
    """Imports and returns ADBC's PostgreSQL driver. Raises ConfigurationError if it is not installed."""
    return load("a table of PostgreSQL", "databases", "adbc_driver_postgresql.dbapi")


def identifier(name: str) -> str:
    """Returns a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Returns a text as an SQL string literal. Raises ConfigurationError for a NUL character."""
    if "\0" in text:
        raise ConfigurationError(
            f"{text!r} contains the character NUL, which PostgreSQL cannot store; remove it from the name"
        )
    quoted = text.replace("'", "''")
    return f"'{quoted}'" if "\\" not in text else " E'" + quoted.replace("\\", "\\\\") + "'"


def place_of(schema: str | None, table: str) -> str:
    """Returns a table's schema and name as quoted SQL identifiers."""
    return identifier(table) if schema is None else f"{identifier(schema)}.{identifier(table)}"


class PostgresConnection:
    """A connection to PostgreSQL.

    The first statement begins a transaction. With `autocommit` each statement is a transaction.
    """

    def __init__(self, dsn: str, *, autocommit: bool = False) -> None:
        self._raw = driver().connect(with_settings(dsn), autocommit=autocommit)

    def run(self, statement: str) -> int:
        """Executes a statement. Returns the number of rows that it changed, -1 if unknown."""
        with self._raw.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.rowcount)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Returns the rows of a query."""
        with self._raw.cursor() as cursor:
            cursor.execute(query)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def reader(self, query: str, batch_bytes: int) -> Any:
        """Starts a query, and returns its cursor. The cursor's `fetch_record_batch` returns the rows."""
        import adbc_driver_postgresql

        cursor = self._raw.cursor()
        try:
            name = adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value
            cursor.adbc_statement.set_options(**{name: str(batch_bytes)})
            cursor.execute(query)
        except BaseException:
            cursor.close()
            raise
        return cursor

    def copy(self, schema: str | None, table: str, rows: pa.RecordBatchReader, *, temporary: bool = False) -> None:
        """Sends rows to a table by COPY. The table's columns must have exactly the types of the rows."""
        with self._raw.cursor() as cursor:
            cursor.adbc_ingest(table, rows, mode="append", db_schema_name=schema, temporary=temporary)

    def commit(self) -> None:
        """Commits the transaction."""
        self._raw.commit()

    def rollback(self) -> None:
        """Rolls back the transaction."""
        self._raw.rollback()

    def close(self) -> None:
        """Closes the connection. The server rolls back an open transaction."""
        self._raw.close()


def with_settings(dsn: str) -> str:
    """Returns the address with the encoding of Arrow's texts, and with a connection timeout, unless it has one.

    The default encoding is the one of the database, and the driver sends and reads UTF-8 whatever it is.
    """
    settings = ["client_encoding=UTF8"]
    if "connect_timeout" not in dsn:
        settings.append("connect_timeout=10")
    if "://" in dsn:
        return f"{dsn}{'&' if '?' in dsn else '?'}{'&'.join(settings)}"
    return f"{dsn} {' '.join(settings)}"


def is_permanent(error: BaseException) -> bool:
    """Returns whether a statement that failed with this error would fail again."""
    state = getattr(error, "sqlstate", None)
    return isinstance(state, str) and state[:2] in _PERMANENT


@dataclass(frozen=True)
class PostgresClient(TableClient):
    """A `TableClient` for a table in PostgreSQL. `dsn` is a URL or a connection string of libpq."""

    dsn: str
    write: TableWrite
    where: str

    def prepare(self, schema: pa.Schema, create: bool) -> TableShape:
        """Checks the table, creates missing tables, and returns the columns and unique indexes of the table."""
        try:
            connection = PostgresConnection(self.dsn)
        except driver().Error as error:
            raise ConfigurationError(
                f"{self.where}: PostgreSQL does not answer: {first_line(error)}"
                "; check that it runs, and that the address is right"
            ) from error
        if self.write.schema is None and self.write.table == STAGING:
            raise ConfigurationError(
                f"{self.where}: {STAGING} is the name of the temporary table from which rows are merged; give the "
                f"schema of the table too, such as public.{STAGING}"
            )
        try:
            if connection.rows("SELECT pg_is_in_recovery()") == [(True,)]:
                raise ConfigurationError(f"{self.where}: this server is a read-only standby; give the primary server")
            if create:
                self._create(connection, schema)
            self._create_tokens(connection)
            shape = self._shape(connection, schema)
            connection.commit()
        except driver().Error as error:
            raise ConfigurationError(
                f"{self.where}: table {self.write.place} cannot be prepared: {first_line(error)}; check its name and "
                "the rights of the user"
            ) from error
        finally:
            connection.close()
        return shape

    def open(self, columns: tuple[TableColumn, ...], sent: pa.Schema) -> PostgresSession:
        """Returns a session that commits rows."""
        return PostgresSession(self, columns, sent)

    def _create(self, connection: PostgresConnection, schema: pa.Schema) -> None:
        keys = self.write.keys
        for name in (self.write.table, *schema.names):
            if len(name.encode()) > _NAME_BYTES_MAX:
                raise ConfigurationError(
                    f"{self.where}: create=True: the name {name!r} has {len(name.encode())} bytes, and PostgreSQL cuts "
                    f"names to {_NAME_BYTES_MAX}; give a shorter name"
                )
        parts = []
        for field in schema:
            wanted = type_in_postgres(field.type)
            if wanted is None:
                raise ConfigurationError(
                    f"{self.where}: create=True: column {field.name!r} has type {field.type}, for which PostgreSQL has "
                    "no type here; cast it, or create the table yourself"
                )
            null = " NOT NULL" if field.name in keys or not field.nullable else ""
            parts.append(f"{identifier(field.name)} {wanted}{null}")
        if keys:
            parts.append(f"PRIMARY KEY ({', '.join(map(identifier, keys))})")
        place = place_of(self.write.schema, self.write.table)
        # Several programs may create the table at once, which IF NOT EXISTS alone does not allow. It also looks in the
        # first schema of search_path only, and the table may be in another one.
        connection.run("SELECT pg_advisory_xact_lock(7224001)")
        if connection.rows(f"SELECT to_regclass({literal(place)}) IS NULL") == [(True,)]:
            connection.run(f"CREATE TABLE IF NOT EXISTS {place} ({', '.join(parts)})")

    def _create_tokens(self, connection: PostgresConnection) -> None:
        place = place_of(self.write.token_schema, self.write.token_table)
        if connection.rows(f"SELECT to_regclass({literal(place)}) IS NULL") == [(True,)]:
            statement = (
                f"CREATE TABLE IF NOT EXISTS {place} (sink text NOT NULL, job_id text NOT NULL, bucket integer NOT "
                "NULL, checkpoint_id bigint NOT NULL, committed_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY "
                "(sink, job_id, bucket))"
            )
            try:
                connection.run("SELECT pg_advisory_xact_lock(7224001)")
                connection.run(statement)
            except driver().Error as error:
                raise ConfigurationError(
                    f"{self.where}: the table of tokens {self.write.token_place} does not exist and cannot be created: "
                    f"{first_line(error)}. Create it: {statement}"
                ) from error
        found = connection.rows(
            "SELECT relkind::text, relpersistence::text, has_table_privilege(oid, 'SELECT') AND "
            "has_table_privilege(oid, 'INSERT') AND has_table_privilege(oid, 'UPDATE'), row_security_active(oid), "
            "relforcerowsecurity "
            f"FROM pg_class WHERE oid = to_regclass({literal(place)})"
        )
        kind, persistence, may_write, has_policies, is_forced = found[0]
        if (kind, persistence, may_write) != ("r", "p", True):
            raise ConfigurationError(
                f"{self.where}: the table of tokens {self.write.token_place} must be an ordinary, logged table, and "
                "this user must be allowed to SELECT, INSERT and UPDATE: grant that, or give another token_table="
            )
        if has_policies:
            table = f"the table of tokens {self.write.token_place}"
            self._refuse_policies(table, is_forced, "rows whose tokens a policy hides would be written again")

    def _refuse_policies(self, table: str, is_forced: bool, reason: str) -> NoReturn:
        owner = "as its owner, after ALTER TABLE ... NO FORCE ROW LEVEL SECURITY" if is_forced else "as its owner"
        raise ConfigurationError(
            f"{self.where}: row-level security of {table} applies to this user: {reason}. Write as a user with "
            f"BYPASSRLS, or {owner}"
        )

    def _shape(self, connection: PostgresConnection, schema: pa.Schema) -> TableShape:
        write = self.write
        place = literal(place_of(write.schema, write.table))
        upsert = write.mode == "upsert"
        privileges = ["INSERT", *(["SELECT", "UPDATE"] if upsert else []), *(["DELETE"] if write.deletes else [])]
        may = ", ".join(f"has_table_privilege(oid, '{name}')" for name in privileges)
        found = connection.rows(
            "SELECT relkind::text, relpersistence::text, row_security_active(oid), "
            f"relforcerowsecurity, has_database_privilege(current_database(), 'TEMP'), {may} "
            f"FROM pg_class WHERE oid = to_regclass({place})"
        )
        if not found:
            raise ConfigurationError(f"{self.where}: there is no table {write.place}; create it, or give create=True")
        kind, persistence, has_policies, is_forced, temporary, *granted = found[0]
        if kind not in ("r", "p"):
            raise ConfigurationError(f"{self.where}: {write.place} is a view or a foreign table; give a table")
        if persistence != "p":
            raise ConfigurationError(
                f"{self.where}: table {write.place} is unlogged or temporary: the server empties it after a crash, and "
                "rows that were committed would be lost. Use ALTER TABLE ... SET LOGGED"
            )
        lacking = [name for name, is_granted in zip(privileges, granted, strict=True) if not is_granted]
        if lacking:
            rights = ", ".join(lacking)
            raise ConfigurationError(
                f"{self.where}: this user lacks {rights} on table {write.place}: GRANT {rights} ON {write.place} TO "
                "the user"
            )
        columns = columns_of(connection, place)
        casts = any(column.cast for column in columns if column.name in schema.names)
        if has_policies and write.deletes:
            self._refuse_policies(f"table {write.place}", is_forced, "rows that a policy hides would not be deleted")
        if has_policies and not (upsert or write.on_conflict == "ignore" or casts):
            self._refuse_policies(f"table {write.place}", is_forced, "PostgreSQL refuses COPY then")
        if not temporary and (upsert or write.on_conflict == "ignore" or any(column.cast for column in columns)):
            raise ConfigurationError(
                f"{self.where}: this user may not create temporary tables, which hold rows before they are merged; "
                "GRANT TEMPORARY ON DATABASE"
            )
        unique = tuple(frozenset(names) for (names,) in connection.rows(_UNIQUE.format(place=place)))
        return TableShape(columns, unique)


def columns_of(connection: PostgresConnection, place: str) -> tuple[TableColumn, ...]:
    """Returns the columns of a table or view; empty if it does not exist. `place` is its name as an SQL literal."""
    return tuple(_column(*row) for row in connection.rows(_COLUMNS.format(place=place)))


class PostgresSession(TableSession):
    """Commits rows to one table over one connection, which is reopened after an error."""

    def __init__(self, client: PostgresClient, columns: tuple[TableColumn, ...], sent: pa.Schema) -> None:
        self._client, self._columns, self._sent = client, columns, sent
        self._connection: PostgresConnection | None = None
        write = client.write
        self._staged = write.mode == "upsert" or write.on_conflict == "ignore" or any(c.cast for c in columns)
        self._tokens = place_of(write.token_schema, write.token_table)
        self._schema = write.schema

    def commit(self, key: CommitKey, buckets: Set[int], files: Files) -> None:
        """Writes rows and tokens in one transaction, for buckets without a token of this or a later checkpoint."""
        try:
            self._commit(key, buckets, files)
        except driver().Error as error:
            self.close()
            if not is_permanent(error):
                raise DatabaseError(
                    f"{self._client.where}: the rows of checkpoint {key.checkpoint_id} for table "
                    f"{self._client.write.place} could not be committed: {first_line(error)}; check that PostgreSQL "
                    "runs"
                ) from error
            # Another process may have committed the same rows meanwhile, which a unique index reports as an error.
            if self._are_committed(key, buckets):
                return
            raise ConfigurationError(
                f"{self._client.where}: PostgreSQL refuses the rows of checkpoint {key.checkpoint_id} for table "
                f"{self._client.write.place}: {first_line(error)}. The rows wait in the checkpoint: correct the table, "
                "and start the program again with restore"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _are_committed(self, key: CommitKey, buckets: Set[int]) -> bool:
        try:
            connection = self._connected()
            missing = self._missing(connection, key, buckets)
            connection.rollback()
        except driver().Error as error:
            self.close()
            raise DatabaseError(
                f"{self._client.where}: PostgreSQL failed to return which rows are committed: {first_line(error)}; "
                "check that it runs"
            ) from error
        return not missing

    def _commit(self, key: CommitKey, buckets: Set[int], files: Files) -> None:
        for _ in range(TRIES_MAX):
            connection = self._connected()
            missing = self._missing(connection, key, buckets)
            if not missing:
                connection.rollback()
                return
            count = self._send(connection, files(missing))
            if not self._store_tokens(connection, key, missing):
                log.info("%s: another process has committed meanwhile; checking again", self._client.where)
                connection.rollback()
                continue
            if self._staged:
                for number in range(count):
                    self._merge(connection, number if count > 1 else None)
            connection.commit()
            return
        raise DatabaseError(
            f"{self._client.where}: checkpoint {key.checkpoint_id} cannot be committed, because another process "
            "stores the same tokens again and again; stop the other job, or give this one another uid"
        )

    def _connected(self) -> PostgresConnection:
        if self._connection is None:
            connection = PostgresConnection(self._client.dsn)
            try:
                for name, value in _SESSION.items():
                    connection.run(f"SET {name} = {literal(value)}")
                # A commit that was answered must outlive a crash of the server. Stricter settings stay.
                connection.run(
                    "SELECT set_config('synchronous_commit', 'on', false) "
                    "WHERE current_setting('synchronous_commit') = 'off'"
                )
                if self._staged:
                    connection.run(self._staging_table())
                else:
                    self._schema = self._schema_of(connection)
                connection.commit()
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _schema_of(self, connection: PostgresConnection) -> str | None:
        """Returns the schema of the table. Without one, the driver would look in the first one of search_path only."""
        write = self._client.write
        place = literal(place_of(write.schema, write.table))
        found = connection.rows(
            f"SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            f"WHERE c.oid = to_regclass({place})"
        )
        return found[0][0] if found else write.schema

    def _missing(self, connection: PostgresConnection, key: CommitKey, buckets: Set[int]) -> frozenset[int]:
        """Returns the buckets that still have to be committed, because they have no token of this or a later
        checkpoint.
        """
        rows = connection.rows(
            f"SELECT bucket FROM {self._tokens} WHERE sink = {literal(key.sink)} AND job_id = {literal(key.job_id)} "
            f"AND checkpoint_id >= {key.checkpoint_id} AND bucket IN ({', '.join(map(str, sorted(buckets)))})"
        )
        return frozenset(buckets) - {bucket for (bucket,) in rows}

    def _store_tokens(self, connection: PostgresConnection, key: CommitKey, buckets: Set[int]) -> bool:
        """Stores the tokens. Returns False if another process has stored the same or a later token meanwhile."""
        values = f"{literal(key.sink)}, {literal(key.job_id)}, bucket, {key.checkpoint_id}"
        stored = connection.run(
            f"INSERT INTO {self._tokens} AS stored (sink, job_id, bucket, checkpoint_id) SELECT {values} "
            f"FROM unnest(ARRAY[{', '.join(map(str, sorted(buckets)))}]::integer[]) AS bucket ORDER BY bucket "
            "ON CONFLICT (sink, job_id, bucket) DO UPDATE SET checkpoint_id = EXCLUDED.checkpoint_id, "
            "committed_at = now() WHERE stored.checkpoint_id < EXCLUDED.checkpoint_id"
        )
        return stored == len(buckets)

    def _send(self, connection: PostgresConnection, batches: Iterator[pa.RecordBatch]) -> int:
        """Sends the rows of all files by COPY. Returns the number of files."""
        count = 0
        write = self._client.write
        for count, batch in enumerate(batches, 1):
            rows = batch
            if self._staged:
                rows = batch.append_column(FILE, pa.repeat(pa.scalar(count - 1, pa.int32()), batch.num_rows))
            reader = pa.RecordBatchReader.from_batches(rows.schema, [rows])
            if self._staged:
                connection.copy(None, STAGING, reader, temporary=True)
            else:
                connection.copy(self._schema, write.table, reader)
        return count

    def _merge(self, connection: PostgresConnection, file: int | None) -> None:
        """Applies the rows of one file.

        Each key occurs only once in a file. `file` is None if there is only one file.
        """
        write = self._client.write
        place = place_of(write.schema, write.table)
        of_file = "TRUE" if file is None else f"staged.{FILE} = {file}"
        if write.deletes:
            same = " AND ".join(
                f"stored.{identifier(c.name)} = {_sent(c)}" for c in self._columns if c.name in write.keys
            )
            connection.run(
                f"DELETE FROM {place} AS stored USING {STAGING} AS staged "
                f"WHERE {of_file} AND staged.{DELETED} AND {same}"
            )
            of_file += f" AND NOT staged.{DELETED}"
        names = ", ".join(identifier(column.name) for column in self._columns)
        values = ", ".join(_sent(column) for column in self._columns)
        connection.run(
            f"INSERT INTO {place} ({names}) SELECT {values} FROM {STAGING} AS staged "
            f"WHERE {of_file}{self._on_conflict()}"
        )

    def _on_conflict(self) -> str:
        write = self._client.write
        if write.on_conflict == "error":
            return ""
        target = f" ({', '.join(map(identifier, write.keys))})" if write.keys else ""
        changed = [identifier(column.name) for column in self._columns if column.name not in write.keys]
        if write.on_conflict == "ignore" or not changed:
            return f" ON CONFLICT{target} DO NOTHING"
        return f" ON CONFLICT{target} DO UPDATE SET {', '.join(f'{name} = EXCLUDED.{name}' for name in changed)}"

    def _staging_table(self) -> str:
        columns = [f"{identifier(field.name)} {type_in_postgres(field.type)}" for field in self._sent]
        return f"CREATE TEMPORARY TABLE {STAGING} ({', '.join([*columns, f'{FILE} integer'])}) ON COMMIT DELETE ROWS"


_SESSION = {
    "application_name": "tidegate",
    "idle_in_transaction_session_timeout": "60s",
    "lock_timeout": f"{LOCK_WAIT_S}s",
    "statement_timeout": "0",
    "client_min_messages": "warning",
}


def _sent(column: TableColumn) -> str:
    """Returns the SQL expression that casts a value in the temporary table to the type of the column."""
    value = f"staged.{identifier(column.name)}"
    return f"CAST({value} AS {column.type_text})" if column.cast else value


def type_in_postgres(data_type: pa.DataType) -> str | None:
    """Returns the PostgreSQL type that stores values of an Arrow type, or None if there is none."""
    types = pa.types
    if types.is_integer(data_type):
        width = data_type.bit_width * (1 if types.is_signed_integer(data_type) else 2)
        return {8: "smallint", 16: "smallint", 32: "integer", 64: "bigint", 128: "numeric(20, 0)"}[width]
    if types.is_decimal(data_type):
        return f"numeric({data_type.precision}, {data_type.scale})" if data_type.scale >= 0 else None
    return _PLAIN.get(kind_of(data_type))


_PLAIN = {
    "bool": "boolean",
    "float32": "real",
    "float64": "double precision",
    "text": "text",
    "binary": "bytea",
    "date": "date",
    "time": "time",
    "naive": "timestamp",
    "zoned": "timestamptz",
    "interval": "interval",
}

_COLUMNS = """
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), t.typname::text, t.typtype::text, a.atttypmod,
       NOT a.attnotnull, a.atthasdef OR a.attidentity <> '', a.attgenerated::text, a.attidentity::text,
       coalesce(c.collisdeterministic, true),
       (SELECT array_agg(e.enumlabel::text ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_collation c ON c.oid = a.attcollation
WHERE a.attrelid = to_regclass({place}) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_UNIQUE = """
SELECT array_agg(a.attname::text) FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey::smallint[]) WITH ORDINALITY AS part(number, position)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.number
WHERE i.indrelid = to_regclass({place}) AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL AND part.position <= i.indnkeyatts
GROUP BY i.indexrelid
"""

_Simple = tuple[Accepts, pa.DataType]
_SIMPLE: dict[str, _Simple] = {
    "bool": ("bool", pa.bool_()),
    "int2": ("int", pa.int16()),
    "int4": ("int", pa.int32()),
    "int8": ("int", pa.int64()),
    "float4": ("float32", pa.float32()),
    "float8": ("float64", pa.float64()),
    "text": ("text", pa.string()),
    "varchar": ("text", pa.string()),
    "bpchar": ("text", pa.string()),
    "bytea": ("binary", pa.binary()),
    "date": ("date", pa.date32()),
}
_TIMES: dict[str, Accepts] = {"time": "time", "timestamp": "naive", "timestamptz": "zoned"}
_TEXTS = ("uuid", "json", "jsonb", "citext")
_UNITS = {0: "s", 3: "ms", 6: "us", -1: "us"}


def _column(
    name: str,
    type_text: str,
    type_name: str,
    type_kind: str,
    modifier: int,
    nullable: bool,
    has_default: bool,
    generated: str,
    identity: str,
    deterministic: bool,
    labels: Sequence[str] | None,
) -> TableColumn:
    """Converts a row of PostgreSQL's catalog to a `TableColumn`."""
    column = TableColumn(name, type_text, None, None, nullable, nullable or has_default or bool(generated))
    if generated:
        return replace(column, why_not="is computed by the database")
    if identity == "a":
        return replace(column, why_not="is GENERATED ALWAYS AS IDENTITY")
    if type_kind == "e":
        return replace(column, accepts="text", arrow=pa.string(), cast=True, labels=tuple(labels or ()))
    if type_kind != "b":
        return column
    if type_name in _SIMPLE:
        accepts, arrow = _SIMPLE[type_name]
        column = replace(column, accepts=accepts, arrow=arrow)
        if accepts in ("float32", "float64"):
            return replace(column, why_no_key=FLOAT_KEY)
        if accepts == "date":
            return replace(column, limits=DATES)
        if accepts == "text":
            why = _PADDED_KEY if type_name == "bpchar" else None if deterministic else _COMPARED_KEY
            return replace(column, characters_max=modifier - 4 if modifier >= 4 else None, why_no_key=why)
        return column
    if type_name == "numeric":
        return _numeric(column, modifier)
    if type_name in _TIMES and modifier in _UNITS:
        return _time(column, type_name, _UNITS[modifier])
    if type_name == "interval" and modifier == -1:
        return replace(column, accepts="interval", arrow=pa.duration("us"), why_no_key=_COMPARED_KEY)
    if type_name in _TEXTS:
        form: Format | None = "uuid" if type_name == "uuid" else "json" if type_name.startswith("json") else None
        why = None if type_name == "uuid" else _COMPARED_KEY
        return replace(
            column,
            accepts="text",
            arrow=pa.string(),
            cast=True,
            format=form,
            why_no_key=why,
        )
    return column


def numeric_type(modifier: int) -> pa.DataType | None:
    """Returns the Arrow type for a type modifier of numeric(precision, scale), or None if Arrow has none."""
    return decimal_type((modifier - 4) >> 16 & 0xFFFF, ((modifier - 4 & 0x7FF) ^ 1024) - 1024)


def _numeric(column: TableColumn, modifier: int) -> TableColumn:
    if modifier < 4:
        return replace(column, accepts="decimal", arrow=None)
    arrow = numeric_type(modifier)
    return column if arrow is None else replace(column, accepts="decimal", arrow=arrow)


def _time(column: TableColumn, type_name: str, unit: str) -> TableColumn:
    accepts = _TIMES[type_name]
    if accepts == "time":
        arrow = pa.time64("us") if unit == "us" else pa.time32(unit)
        return replace(column, accepts=accepts, arrow=arrow)
    parts = {"s": _MICROS, "ms": 1_000, "us": 1}[unit]
    arrow = pa.timestamp(unit, "UTC" if accepts == "zoned" else None)
    return replace(column, accepts=accepts, arrow=arrow, limits=(TIMESTAMPS[0] // parts, TIMESTAMPS[1] // parts))
