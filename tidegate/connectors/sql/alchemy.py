"""Tables of SQLite, MySQL and MariaDB through SQLAlchemy.

One transaction commits the rows of a subtask. It locks the rows of its tokens first (SQLite: the database), skips the
buckets that are committed already, and inserts rows by `executemany`. Each row is converted to Python values for these
drivers, which is far slower than PostgreSQL's COPY.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.connectors.sql.client import (
    DELETED,
    LOCK_WAIT_S,
    CommitKey,
    DatabaseError,
    Files,
    TableClient,
    TableSession,
    first_line,
)
from tidegate.connectors.sql.columns import FLOAT_KEY, TableColumn, TableShape, decimal_type, kind_of
from tidegate.connectors.sql.options import TableWrite
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

if TYPE_CHECKING:
    import sqlalchemy as sa

ROWS_AT_ONCE = 5_000
"""Number of rows that are converted to Python values at a time."""

_LOCKED = -1
"""Checkpoint id of a token row that was only inserted to be locked."""

_MYSQL = ("mysql", "mariadb")


def alchemy() -> Any:
    """Imports and returns SQLAlchemy. Raises ConfigurationError if it is not installed."""
    return load("a table of a database", "databases", "sqlalchemy")


def engine_of(url: str, where: str, *, writes: bool = False) -> sa.Engine:
    """Creates an engine, without connecting.

    `where` begins error texts. Raises ConfigurationError for a URL that cannot be used.
    """
    sa = alchemy()
    try:
        found = sa.make_url(url)
        name = found.get_backend_name()
        if name == "sqlite":
            if found.database in (None, "", ":memory:"):
                raise ConfigurationError(f"{where}: each connection has its own SQLite database in memory; give a file")
            engine = sa.create_engine(found, connect_args={"timeout": LOCK_WAIT_S, "check_same_thread": False})
            if writes:
                _begin_at_once(engine)
            return engine  # type: ignore[no-any-return]
        return sa.create_engine(found, pool_pre_ping=True)  # type: ignore[no-any-return]
    except (sa.exc.SQLAlchemyError, ImportError) as error:
        raise ConfigurationError(
            f"{where}: the URL of the database cannot be used: {first_line(error)}. Give one of SQLAlchemy, such as "
            "sqlite:////folder/file.db or mysql+pymysql://user@host/database, and install its driver"
        ) from error


def check_file(engine: sa.Engine, where: str) -> None:
    """Raises ConfigurationError if the file of a SQLite database does not exist, because a query would create it."""
    file = engine.url.database
    if engine.dialect.name == "sqlite" and not engine.url.query and file is not None and not Path(file).exists():
        raise ConfigurationError(f"{where}: there is no file {file}; check the URL")


def use_utc(engine: sa.Engine) -> None:
    """Makes MySQL and MariaDB connections of the engine return timestamps in UTC."""
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00'")


def _begin_at_once(engine: sa.Engine) -> None:
    """Makes SQLite lock the database when a transaction begins, as SQLAlchemy's page on pysqlite shows.

    Otherwise a transaction that reads first fails if another transaction writes meanwhile.
    """
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Returns a context that converts errors of SQLAlchemy to ConfigurationErrors that begin with `where`."""
    try:
        yield
    except alchemy().exc.SQLAlchemyError as error:
        raise ConfigurationError(
            f"{where}: the database reported: {reason(error)}; check the query, the table and the rights of the user"
        ) from error


@contextmanager
def unknown_types_allowed() -> Iterator[None]:
    """Returns a context that hides SQLAlchemy's warnings about unsupported column types.

    Such types are reported when used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", alchemy().exc.SAWarning)
        yield


def columns_of(engine: sa.Engine, schema: str | None, table: str) -> tuple[TableColumn, ...]:
    """Returns the columns of a table or view. Raises SQLAlchemy's NoSuchTableError."""
    with unknown_types_allowed():
        found = alchemy().inspect(engine).get_columns(table, schema=schema)
    return tuple(_column(each, engine.dialect.name, None, False) for each in found)


def reason(error: BaseException) -> str:
    """Returns the driver's error message, without the statement and the values that SQLAlchemy adds."""
    return first_line(getattr(error, "orig", None) or error)


_SQLITE_PERMANENT = frozenset({1, 18, 19, 20, 25})
"""Result codes of SQLite that are permanent: SQLITE_ERROR, _TOOBIG, _CONSTRAINT, _MISMATCH and _RANGE."""

_MYSQL_PERMANENT = frozenset(
    {
        # Names, statements, and statements or rows that are too large
        1052, 1054, 1064, 1109, 1118, 1136, 1146, 1153, 1242, 1426,
        # Privileges
        1142, 1143, 1227, 1370,
        # Constraints and partitions
        1048, 1062, 1216, 1217, 1364, 1451, 1452, 1526, 1557, 1748, 3819, 4025,
        # Values, and collations that cannot be compared
        1264, 1265, 1267, 1270, 1271, 1292, 1365, 1366, 1367, 1406, 1411, 1416, 1690,
        3140, 3141, 3156, 3157, 3158, 4078,
        # Triggers
        1442, 1644,
    }
)  # fmt: skip
"""Error numbers of MySQL and MariaDB that are permanent. Drivers report many of them as OperationalError, as they do a
server that is away.
"""


def is_permanent(error: BaseException) -> bool:
    """Returns whether a statement that failed with this error of SQLAlchemy would fail again."""
    exc = alchemy().exc
    if isinstance(error, exc.IntegrityError | exc.DataError | exc.ProgrammingError):
        return True
    cause: Any = getattr(error, "orig", None)
    if cause is None:
        return False
    of_sqlite = getattr(cause, "sqlite_errorcode", None)
    if of_sqlite is not None:
        return of_sqlite & 0xFF in _SQLITE_PERMANENT
    return bool(cause.args) and cause.args[0] in _MYSQL_PERMANENT


@dataclass(frozen=True)
class AlchemyClient(TableClient):
    """A `TableClient` for a table of a database at a URL of SQLAlchemy."""

    url: str
    write: TableWrite
    where: str
    _engines: dict[str, Any] = field(default_factory=dict, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        return AlchemyClient, (self.url, self.write, self.where)

    @property
    def engine(self) -> sa.Engine:
        """Returns the engine of this process, created at the first use."""
        if "engine" not in self._engines:
            self._engines["engine"] = engine_of(self.url, self.where, writes=True)
        found: sa.Engine = self._engines["engine"]
        return found

    def prepare(self, schema: pa.Schema, create: bool) -> TableShape:
        """Checks the table, creates missing tables, and returns the columns and unique indexes of the table."""
        name = self.engine.dialect.name
        if name == "postgresql":
            raise ConfigurationError(
                f"{self.where}: the URL is of PostgreSQL; use to_postgres, which is several times faster"
            )
        if name not in ("sqlite", *_MYSQL):
            raise ConfigurationError(
                f"{self.where}: {name} is not a supported database; give the URL of SQLite, MySQL or MariaDB"
            )
        percent = [each for each in schema.names if "%" in each and each not in self.write.keys]
        if name in _MYSQL and self.write.mode == "upsert" and percent:
            raise ConfigurationError(
                f"{self.where}: column {percent[0]!r}: drivers of MySQL do not write the name of a column with a "
                "percent sign in an upsert; rename the column"
            )
        with named_errors(f"{self.where}: table {self.write.place}"):
            if create:
                self._create(schema)
            self.tokens().create(self.engine, checkfirst=True)
            return self._shape()

    def open(self, columns: tuple[TableColumn, ...], sent: pa.Schema) -> AlchemySession:
        """Returns a session that commits rows."""
        return AlchemySession(self, columns)

    def tokens(self) -> sa.Table:
        """Returns SQLAlchemy's description of the table of commit tokens."""
        sa, write = alchemy(), self.write
        return sa.Table(  # type: ignore[no-any-return]
            write.token_table,
            sa.MetaData(),
            # Together at most 3,072 bytes in MySQL, whose characters have four.
            sa.Column("sink", sa.String(250), primary_key=True),
            sa.Column("job_id", sa.String(250), primary_key=True),
            sa.Column("bucket", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("checkpoint_id", sa.BigInteger, nullable=False),
            schema=write.token_schema,
            mysql_engine="InnoDB",
            mysql_charset="utf8mb4",
            mysql_collate="utf8mb4_bin",
            mariadb_engine="InnoDB",
            mariadb_charset="utf8mb4",
            mariadb_collate="utf8mb4_bin",
        )

    def _create(self, schema: pa.Schema) -> None:
        sa, write = alchemy(), self.write
        columns = []
        for each in schema:
            wanted = _type_for(each.type, self.engine.dialect.name, each.name in write.keys)
            if wanted is None:
                raise ConfigurationError(
                    f"{self.where}: create=True: column {each.name!r} has type {each.type}, for which there is no type "
                    "here; cast it, or create the table yourself"
                )
            key = each.name in write.keys
            columns.append(
                sa.Column(each.name, wanted, primary_key=key, autoincrement=False, nullable=each.nullable and not key)
            )
        options = {f"{name}_engine": "InnoDB" for name in _MYSQL}
        sa.Table(write.table, sa.MetaData(), *columns, schema=write.schema, **options).create(
            self.engine, checkfirst=True
        )

    def _shape(self) -> TableShape:
        sa, write = alchemy(), self.write
        inspector = sa.inspect(self.engine)
        name = self.engine.dialect.name
        if not inspector.has_table(write.table, schema=write.schema):
            raise ConfigurationError(f"{self.where}: there is no table {write.place}; create it, or give create=True")
        if write.table in inspector.get_view_names(schema=write.schema):
            raise ConfigurationError(f"{self.where}: {write.place} is a view; give a table")
        with unknown_types_allowed():
            reflected = inspector.get_columns(write.table, schema=write.schema)
            indexes = inspector.get_indexes(write.table, schema=write.schema)
            key = inspector.get_pk_constraint(write.table, schema=write.schema)["constrained_columns"]
            unique = inspector.get_unique_constraints(write.table, schema=write.schema)
        collations = self._collations()
        columns = tuple(
            self._limited(_column(each, name, collations.get(each["name"]), each["name"] in key)) for each in reflected
        )
        found = {frozenset(key)} | {frozenset(each["column_names"]) for each in unique}
        found |= {frozenset(each["column_names"]) for each in indexes if _is_plain_unique(each)}
        if name in _MYSQL:
            self._check_mysql(found - {frozenset()})
        return TableShape(columns, tuple(names for names in found if names))

    def _limited(self, column: TableColumn) -> TableColumn:
        """Returns a column with the limits of a TIMESTAMP of MySQL or MariaDB, which depend on the server's version."""
        if column.accepts != "zoned" or column.arrow is None:
            return column
        dialect = self.engine.dialect
        is_later = bool(getattr(dialect, "is_mariadb", False)) and (dialect.server_version_info or ()) >= (11, 5)
        per_second = {"s": 1, "ms": 1_000, "us": 1_000_000}[column.arrow.unit]
        last = (0xFFFF_FFFF if is_later else 0x7FFF_FFFF) + 1
        return replace(
            column, limits=(per_second, last * per_second - 1), years=f"1970 to {2106 if is_later else 2038}"
        )

    def _collations(self) -> dict[str, str]:
        """Returns the collations of text columns by name. For SQLite, only columns of unique indexes are included."""
        write = self.write
        found: dict[str, str] = {}
        with self.engine.connect() as connection:
            if self.engine.dialect.name == "sqlite":
                schema = "main" if write.schema is None else write.schema
                sql = (
                    "SELECT part.name, part.coll FROM pragma_index_list(:name, :of) AS one, "
                    'pragma_index_xinfo(one.name, :of) AS part WHERE one."unique" AND part.key AND part.name NOT NULL'
                )
                for column, collation in connection.execute(alchemy().text(sql), {"name": write.table, "of": schema}):
                    if found.get(column, "BINARY") == "BINARY":
                        found[column] = collation
            else:
                sql = (
                    "SELECT COLUMN_NAME, COLLATION_NAME FROM information_schema.COLUMNS WHERE TABLE_NAME = :name AND "
                    "TABLE_SCHEMA = COALESCE(:of, DATABASE()) AND COLLATION_NAME IS NOT NULL"
                )
                found.update(connection.execute(alchemy().text(sql), {"name": write.table, "of": write.schema}).all())
        return found

    def _check_mysql(self, unique: set[frozenset[str]]) -> None:
        """Raises ConfigurationError for a table without transactions, and for an upsert table with another unique
        index.
        """
        write = self.write
        sql = (
            "SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES WHERE (TABLE_NAME = :name AND TABLE_SCHEMA = "
            "COALESCE(:of, DATABASE())) OR (TABLE_NAME = :tokens AND TABLE_SCHEMA = COALESCE(:tokens_of, DATABASE()))"
        )
        given = {"name": write.table, "of": write.schema, "tokens": write.token_table, "tokens_of": write.token_schema}
        with self.engine.connect() as connection:
            for table, engine in connection.execute(alchemy().text(sql), given):
                if str(engine).lower() != "innodb":
                    raise ConfigurationError(
                        f"{self.where}: table {table} has the engine {engine}, which has no transactions; use InnoDB"
                    )
        others = unique - {frozenset(write.keys)}
        if write.mode == "upsert" and others:
            raise ConfigurationError(
                f"{self.where}: table {write.place} has further unique indexes, on "
                f"{' and '.join(str(sorted(names)) for names in others)}. MySQL would replace a row that has the same "
                "values in any of them. Drop them, or write to a table without them"
            )


class AlchemySession(TableSession):
    """A connection through SQLAlchemy that commits rows to one table."""

    def __init__(self, client: AlchemyClient, columns: tuple[TableColumn, ...]) -> None:
        self._client, self._columns = client, columns

    def commit(self, key: CommitKey, buckets: Set[int], files: Files) -> None:
        """Writes rows and tokens in one transaction, for buckets without a token of this or a later checkpoint."""
        exc = alchemy().exc
        where = self._client.where
        try:
            with self._client.engine.begin() as connection:
                self._set_up(connection)
                missing = self._locked(connection, key, buckets)
                if missing:
                    for batch in files(missing):
                        self._merge(connection, batch)
        except exc.SQLAlchemyError as error:
            if is_permanent(error):
                raise ConfigurationError(
                    f"{where}: the database refuses the rows of checkpoint {key.checkpoint_id} for table "
                    f"{self._client.write.place}: {reason(error)}. The rows wait in the checkpoint: correct the table, "
                    "and start the program again with restore"
                ) from error
            self.close()
            raise DatabaseError(
                f"{where}: the database failed to store the rows of checkpoint {key.checkpoint_id}: {reason(error)}; "
                "check that it runs"
            ) from error

    def close(self) -> None:
        """Closes all connections of the engine."""
        self._client.engine.dispose()

    def _set_up(self, connection: sa.Connection) -> None:
        if connection.dialect.name in _MYSQL:
            # A value that does not fit is an error, and a stopped process keeps its locks for a minute at most.
            connection.exec_driver_sql("SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')")
            connection.exec_driver_sql("SET SESSION time_zone = '+00:00', wait_timeout = 60")
            connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {LOCK_WAIT_S}")

    def _locked(self, connection: sa.Connection, key: CommitKey, buckets: Set[int]) -> frozenset[int]:
        """Locks the token rows, and stores the new tokens. Returns the buckets that were not committed yet."""
        sa, tokens = alchemy(), self._client.tokens()
        names = {"sink": key.sink, "job_id": key.job_id}
        made = [{**names, "bucket": bucket, "checkpoint_id": _LOCKED} for bucket in sorted(buckets)]
        connection.execute(_insert(connection, tokens, ("sink", "job_id", "bucket"), "ignore"), made)
        mine = sa.and_(tokens.c.sink == key.sink, tokens.c.job_id == key.job_id, tokens.c.bucket.in_(sorted(buckets)))
        found = connection.execute(sa.select(tokens.c.bucket, tokens.c.checkpoint_id).where(mine).with_for_update())
        missing = frozenset(bucket for bucket, checkpoint_id in found if checkpoint_id < key.checkpoint_id)
        if missing:
            newer = sa.update(tokens).where(mine, tokens.c.bucket.in_(sorted(missing)))
            connection.execute(newer.values(checkpoint_id=key.checkpoint_id))
        return missing

    def _merge(self, connection: sa.Connection, batch: pa.RecordBatch) -> None:
        """Applies the rows of one file. With keys, each key occurs only once in a file."""
        sa, write = alchemy(), self._client.write
        columns = [sa.Column(column.name, bound_type(column)) for column in self._columns]
        table = sa.Table(write.table, sa.MetaData(), *columns, schema=write.schema)
        if write.deletes:
            gone = batch.filter(batch.column(DELETED))
            batch = batch.filter(pa.compute.invert(batch.column(DELETED)))
            if gone.num_rows:
                names = {name: f"key_{number}" for number, name in enumerate(write.keys)}
                same = [
                    self._key(connection, table, name) == sa.bindparam(bound, type_=table.c[name].type)
                    for name, bound in names.items()
                ]
                keys = gone.select(list(names)).rename_columns(list(names.values()))
                for rows in _python_rows(keys):
                    connection.execute(sa.delete(table).where(*same), rows)
        statement = _insert(connection, table, write.keys, write.on_conflict)
        for rows in _python_rows(batch.select([column.name for column in self._columns])):
            connection.execute(statement, rows)

    def _key(self, connection: sa.Connection, table: sa.Table, name: str) -> Any:
        """Returns a key column for a comparison by all characters.

        A text column of SQLite may have another collation than its unique index.
        """
        is_text = any(column.name == name and column.accepts == "text" for column in self._columns)
        return table.c[name].collate("BINARY") if is_text and connection.dialect.name == "sqlite" else table.c[name]


def _python_rows(batch: pa.RecordBatch) -> Iterator[list[dict[str, Any]]]:
    """Yields lists of rows as Python values. Timestamps with a zone are converted to UTC without a zone."""
    arrays = [
        column.cast(pa.timestamp(column.type.unit)) if pa.types.is_timestamp(column.type) and column.type.tz else column
        for column in batch.columns
    ]
    plain = pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
    for start in range(0, plain.num_rows, ROWS_AT_ONCE):
        yield plain.slice(start, ROWS_AT_ONCE).to_pylist()


def _insert(connection: sa.Connection, table: sa.Table, keys: Iterable[str], on_conflict: str) -> Any:
    """Returns the INSERT statement for rows. `on_conflict` is "error", "ignore" or "update"."""
    keys = list(keys)
    changed = [column.name for column in table.columns if column.name not in keys]
    if connection.dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite

        to_sqlite = sqlite.insert(table)
        if on_conflict == "error":
            return to_sqlite
        if on_conflict == "ignore" or not changed:
            return to_sqlite.on_conflict_do_nothing(index_elements=keys or None)
        return to_sqlite.on_conflict_do_update(
            index_elements=keys, set_={name: to_sqlite.excluded[name] for name in changed}
        )
    from sqlalchemy.dialects import mysql

    to_mysql = mysql.insert(table)
    if on_conflict == "error":
        return to_mysql
    if on_conflict == "ignore" or not changed:
        # INSERT IGNORE would ignore every other error as well, such as a value that does not fit.
        first = next(iter(table.columns))
        return to_mysql.on_duplicate_key_update({first.name: first})
    return to_mysql.on_duplicate_key_update({name: to_mysql.inserted[name] for name in changed})


def bound_type(column: TableColumn) -> Any:
    """Returns the SQLAlchemy type as which values of a column are passed to the driver."""
    sa = alchemy()
    kinds = {"naive": sa.DateTime, "zoned": sa.DateTime, "date": sa.Date, "time": sa.Time, "binary": sa.LargeBinary}
    return kinds.get(column.accepts or "", sa.types.NullType)()


def _is_plain_unique(index: Any) -> bool:
    options = index.get("dialect_options", {})
    limited = options.get("sqlite_where") is not None or options.get("mysql_length") or options.get("mariadb_length")
    return bool(index["unique"]) and not limited and None not in index["column_names"]


def _column(found: Any, dialect: str, collation: str | None, is_key: bool) -> TableColumn:
    """Converts SQLAlchemy's description of a column to a `TableColumn`."""
    sa = alchemy()
    data_type = found["type"]
    text = str(data_type.compile()) if not isinstance(data_type, sa.types.NullType) else "unknown"
    generated = found.get("computed") is not None
    fills_itself = bool(found.get("autoincrement") is True or (dialect == "sqlite" and is_key and text == "INTEGER"))
    missing = found["nullable"] or found.get("default") is not None or generated or fills_itself
    accepts, arrow, characters = _accepted(data_type, dialect)
    of_mysql = dialect in _MYSQL
    if of_mysql and accepts == "bool":
        text = "TINYINT(1)"
    bytes_max, bytes_exact = _sizes(data_type, collation) if of_mysql else (None, None)
    why_not = "is computed by the database" if generated else None
    if of_mysql and isinstance(data_type, sa.Float) and data_type.scale is not None:
        why_not = "has a fixed number of digits, to which the database rounds (change it to FLOAT or DOUBLE)"
    why = None
    if accepts in ("float32", "float64"):
        why = FLOAT_KEY
    elif accepts == "text" and collation is not None and collation != "BINARY" and not collation.endswith("_bin"):
        why = f"its collation {collation} treats different texts as equal; use a binary one, such as utf8mb4_bin"
    return TableColumn(
        found["name"],
        text,
        accepts,
        arrow,
        bool(found["nullable"]),
        may_be_missing=bool(missing),
        format="json" if isinstance(data_type, sa.JSON) else None,
        characters_max=characters,
        limits=_limits(arrow),
        years="1 to 9999",
        no_nan=True,
        bytes_max=bytes_max,
        bytes_exact=bytes_exact,
        ignores_last_spaces=of_mysql and collation is not None and not ("nopad" in collation or "_0900_" in collation),
        drops_last_spaces=of_mysql and type(data_type).__name__ == "CHAR",
        changes_numbers=dialect == "sqlite" and isinstance(data_type, sa.JSON),
        no_infinity=of_mysql,
        why_no_key=why,
        why_not=why_not,
    )


_BYTES_MAX = {"TINYTEXT": 255, "TINYBLOB": 255, "TEXT": 65_535, "BLOB": 65_535}
_BYTES_MAX |= {"MEDIUMTEXT": 16_777_215, "MEDIUMBLOB": 16_777_215}


def _sizes(data_type: Any, collation: str | None) -> tuple[int | None, int | None]:
    """Returns the maximum number of bytes of a value in MySQL, and the number that every value must have."""
    name = type(data_type).__name__
    if name == "BINARY":
        return None, data_type.length or 1
    if name == "VARBINARY":
        return data_type.length, None
    if collation is not None and not collation.startswith("utf8"):
        return None, None  # Its characters have another number of bytes than here.
    return _BYTES_MAX.get(name), None


DAYS = (-719_162, 2_932_896)
"""The dates that Python has, in days since 1970. These drivers take Python values."""


def _limits(arrow: pa.DataType | None) -> tuple[int, int] | None:
    """Returns the range of dates and timestamps that the database accepts, as integers in the unit of the Arrow type.
    None without a limit.
    """
    if arrow is None or not (pa.types.is_date(arrow) or pa.types.is_timestamp(arrow)):
        return None
    per_day = 1 if pa.types.is_date(arrow) else 86_400 * {"s": 1, "ms": 1_000, "us": 1_000_000}[arrow.unit]
    return DAYS[0] * per_day, (DAYS[1] + 1) * per_day - 1


def _accepted(data_type: Any, dialect: str) -> tuple[Any, pa.DataType | None, int | None]:
    """Returns three values about a column type: the kind of Arrow types that it accepts, the Arrow type in which values
    are sent, and the maximum number of characters.
    """
    sa = alchemy()
    of_mysql = dialect in _MYSQL
    unsigned = bool(getattr(data_type, "unsigned", False))
    name = type(data_type).__name__
    if isinstance(data_type, sa.Boolean) or (name == "TINYINT" and getattr(data_type, "display_width", None) == 1):
        return "bool", pa.bool_(), None
    if isinstance(data_type, sa.Integer):
        if not of_mysql:
            return "int", pa.int64(), None
        bits = {"TINYINT": 8, "SMALLINT": 16, "INTEGER": 32, "BIGINT": 64}.get(name)
        return ("int", getattr(pa, f"{'u' if unsigned else ''}int{bits}")(), None) if bits else (None, None, None)
    if isinstance(data_type, sa.Float):
        return ("float32", pa.float32(), None) if name == "FLOAT" and of_mysql else ("float64", pa.float64(), None)
    if isinstance(data_type, sa.Numeric):
        arrow = decimal_type(data_type.precision or 10, data_type.scale or 0) if of_mysql and not unsigned else None
        return ("decimal", arrow, None) if arrow is not None else (None, None, None)
    if isinstance(data_type, sa.JSON):
        return "text", pa.string(), None
    if isinstance(data_type, sa.Enum):
        return None, None, None
    if isinstance(data_type, sa.String):
        return "text", pa.string(), data_type.length if of_mysql and name in ("VARCHAR", "CHAR") else None
    if isinstance(data_type, sa.LargeBinary | sa.types._Binary):
        return "binary", pa.binary(), None
    if isinstance(data_type, sa.Date):
        return "date", pa.date32(), None
    if isinstance(data_type, sa.DateTime):
        unit = "us" if not of_mysql else {None: "s", 0: "s", 3: "ms", 6: "us"}.get(getattr(data_type, "fsp", None))
        if unit is None:
            return None, None, None
        zoned = of_mysql and name == "TIMESTAMP"
        return ("zoned", pa.timestamp(unit, "UTC"), None) if zoned else ("naive", pa.timestamp(unit), None)
    if isinstance(data_type, sa.Time) and not of_mysql:
        return "time", pa.time64("us"), None
    return None, None, None


def _type_for(data_type: pa.DataType, dialect: str, is_key: bool) -> Any:
    """Returns SQLAlchemy's type for a new column with values of an Arrow type, or None if there is none."""
    sa = alchemy()
    from sqlalchemy.dialects import mysql

    kind = kind_of(data_type)
    if dialect == "sqlite":
        plain = {"bool": sa.Boolean, "int": sa.BigInteger, "text": sa.Text, "time": sa.Time, "naive": sa.DateTime}
        plain |= {"float32": sa.Double, "float64": sa.Double, "binary": sa.LargeBinary, "date": sa.Date}
        return plain[kind]() if kind in plain else None
    if kind == "decimal":
        return sa.Numeric(data_type.precision, data_type.scale) if 0 <= data_type.scale <= 30 else None
    text = sa.String(250, collation="utf8mb4_bin") if is_key else mysql.LONGTEXT()
    whole = mysql.BIGINT(unsigned=data_type == pa.uint64())
    made: dict[str, Any] = {"bool": mysql.TINYINT(1), "int": whole, "float32": mysql.FLOAT(), "float64": mysql.DOUBLE()}
    made |= {
        "text": text,
        "binary": mysql.VARBINARY(250) if is_key else mysql.LONGBLOB(),
        "date": sa.Date(),
        "naive": mysql.DATETIME(fsp=6),
    }
    return made.get(kind)
