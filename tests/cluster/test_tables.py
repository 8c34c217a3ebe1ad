"""Committed rows of tables as Spark DataFrames."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.errors import PySparkException
from pyspark.sql import types as T
from source_contract import check_source

import tidegate as tg
from tidegate.connectors.delta.source import DeltaSource
from tidegate.connectors.files.source import source_of_files
from tidegate.spark_bridge import RayDPSession, table_to_dataframe
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables.partitions import folder_name
from tidegate.storage.tables.table_files import read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

JOB = JobId("job-00000001")
SCHEMA = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("n`.x", pa.int64(), nullable=False),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("wall", pa.timestamp("us")),
        ("amount", pa.decimal128(9, 2)),
    ]
)
AT = dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)


def row(key: str | None, n: int) -> dict[str, object]:
    """A row of `SCHEMA` whose values all follow from `n`."""
    at = AT + dt.timedelta(hours=n)
    return {"k": key, "n`.x": n, "day": at.date(), "at": at, "wall": at.replace(tzinfo=None), "amount": n}


class Table:
    """A table that tests write as a job's sinks would."""

    def __init__(
        self, url: str, schema: pa.Schema, keys: tuple[str, ...] = (), partition_by: tuple[str, ...] = ()
    ) -> None:
        self.url = url
        self._store = open_store(url)
        self._log = TableLog(self._store)
        self._schema = schema
        self._upsert = bool(keys)
        self._commits = 0
        self._log.create(TableInfo.of(schema, "upsert" if keys else "append", keys, partition_by))
        self._log.claim(JOB, None, "error")

    def write(self, rows: list[dict[str, object]], version: int = 0, folder: str = "") -> DataFile:
        """Write a data file without committing it."""
        data = pa.Table.from_pylist(rows, schema=self._schema)
        if self._upsert:
            data = data.append_column(VERSION_COLUMN, pa.array([version] * len(rows), pa.int64()))
        name = f"data/{JOB}/000000/{folder}{self._commits}-{version}-{len(rows)}.parquet"
        return write_data_file(self._store, name, data.to_batches())

    def add_columns(self, schema: pa.Schema) -> None:
        """The table has these columns from now on."""
        self._schema = schema
        self._log.create(TableInfo.of(schema, "append"), evolves=True)

    def commit(self, *files: DataFile) -> None:
        self._commits += 1
        self._log.commit(JOB, CheckpointId(self._commits), files)

    def arrow(self) -> pa.Table:
        return read_table(self._store)


def sorted_rows(table: pa.Table) -> list[dict[str, object]]:
    """Rows in an order that does not depend on the reader."""
    return sorted(table.to_pylist(), key=repr)


def collected(session: RayDPSession, url: str) -> list[dict[str, object]]:
    """The rows that Spark shows, with aware timestamps as Arrow gives them."""
    df = table_to_dataframe(session.spark, url)
    rows = [r.asDict() for r in df.collect()]
    for name in (f.name for f in df.schema if isinstance(f.dataType, T.TimestampType)):
        for r in rows:
            if r[name] is not None:
                r[name] = r[name].astimezone(dt.UTC)
    return sorted(rows, key=repr)


def test_an_append_table_shows_what_is_committed_and_no_more(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Rows of committed files appear with their types; a written file without a commit does not."""
    table = Table(str(tmp_path), SCHEMA)
    table.commit(table.write([row("a", 1), row(None, 2)]))
    before = table_to_dataframe(raydp_session.spark, str(tmp_path))
    table.commit(table.write([row("a", 1)], 1), table.write([row("b", 4), row("b", 5)], 2))
    table.write([row("never", 9)], 3)
    assert collected(raydp_session, str(tmp_path)) == sorted_rows(table.arrow())
    assert len(table.arrow()) == 5
    assert before.count() == 2
    assert table_to_dataframe(raydp_session.spark, str(tmp_path), as_of=2).count() == 2
    assert [field.dataType for field in before.schema] == [
        T.StringType(),
        T.LongType(),
        T.DateType(),
        T.TimestampType(),
        T.TimestampNTZType(),
        T.DecimalType(9, 2),
    ]


def test_files_in_folders_of_values_are_read_as_spark_reads_them(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Those that Spark has written, and those of a Delta table: with nulls, and values that names must escape."""
    day = dt.date(2013, 1, 1)
    shops = ["a/b", "50%", "a b", "c=d", "x:y", "+", None]
    data = [{"day": day if x % 3 else None, "shop": shop, "x": x} for x, shop in enumerate(shops)]
    by = pa.schema([("day", pa.date32()), ("shop", pa.string())])
    spark, written, delta = raydp_session.spark, tmp_path / "written", tmp_path / "delta"
    columns = "day date, shop string, x long"
    spark.createDataFrame([tuple(each.values()) for each in data], columns).write.partitionBy("day", "shop").parquet(
        str(written)
    )
    write_deltalake(str(delta), pa.Table.from_pylist(data, by.append(pa.field("x", pa.int64()))), partition_by=by.names)

    def of_spark(url: Path) -> list[dict[str, Any]]:
        frame = spark.read.schema(columns).parquet(str(url))
        return sorted((found.asDict() for found in frame.collect()), key=lambda found: int(found["x"]))

    files = source_of_files(f"{written}/**/*.parquet", partitions=by)
    for source, url in ((files, written), (DeltaSource.open(str(delta)), delta)):
        assert sorted(check_source(source), key=lambda found: int(str(found["x"]))) == of_spark(url) == data


@pytest.mark.parametrize("place", ["plain", "pattern {a,b}"])
def test_an_upsert_table_shows_the_latest_row_of_each_key(
    raydp_session: RayDPSession, tmp_path: Path, place: str
) -> None:
    """In any order of versions, for null keys too, and under a path that Spark would take for a pattern."""
    url = str(tmp_path / place)
    table = Table(url, SCHEMA, keys=("k", "day"))
    table.commit(table.write([row("a", 1), row("b", 2), row(None, 3)], version=1))
    table.commit(table.write([row("a", 4)], version=3), table.write([row("a", 5), row(None, 6)], version=2))
    shown = collected(raydp_session, url)
    assert [(r["k"], r["n`.x"]) for r in shown] == [("a", 4), ("b", 2), (None, 6)]
    assert shown == sorted_rows(table.arrow())
    assert VERSION_COLUMN not in table_to_dataframe(raydp_session.spark, url).columns


@pytest.mark.parametrize("order_by", [None, "t"])
def test_deletions_and_orders_show_as_arrow_shows_them(
    raydp_session: RayDPSession, tmp_path: Path, order_by: str | None
) -> None:
    """A key that was taken back is not there, and the greatest by a column counts; nulls in rows stay."""
    kinds = ["+I", "+I", "-U", "+U", "-D", "+I"]
    rows = pa.table({"k": [1, 2, 1, 1, 2, 3], "t": [5.0, None, 5.0, 4.0, None, None], "row_kind": kinds})
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=2)) as env:
        stream = env.from_batches(rows if order_by is None else rows.drop_columns(["row_kind"]), splits=1)
        stream = stream if order_by else stream.as_changes(["k"])
        table = stream.to_table(str(tmp_path / "t"), mode="upsert", keys=["k"], order_by=order_by)
        env.execute("table").wait()
    found = collected(raydp_session, table.url)
    assert found == sorted_rows(table.to_arrow())
    expected = {1: 4.0, 3: None} if order_by is None else {1: 5.0, 2: None, 3: None}
    assert {each["k"]: each["t"] for each in found} == expected


@pytest.mark.parametrize("added", [pa.int64(), pa.list_(pa.int64())], ids=["Spark reads", "our store reads"])
def test_files_from_before_a_column_was_added_have_nulls(
    raydp_session: RayDPSession, tmp_path: Path, added: pa.DataType
) -> None:
    """In Spark as in Arrow; as of a commit from before, the table has the columns of then."""
    before = pa.schema([("k", pa.string())])
    table = Table(str(tmp_path), before)
    table.commit(table.write([{"k": "a"}]))
    table.add_columns(pa.schema([*before, ("n", added)]))
    table.commit(table.write([{"k": "b", "n": None}, {"k": "c", "n": 1 if pa.types.is_integer(added) else [1]}]))
    shown = collected(raydp_session, str(tmp_path))
    assert shown == sorted_rows(table.arrow())
    assert [r["k"] for r in shown if r["n"] is None] == ["a", "b"]
    assert table_to_dataframe(raydp_session.spark, str(tmp_path), as_of=2).columns == ["k"]


def test_partitions_are_columns_of_the_table(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Spark takes no values from the names of folders, whatever is in them; filters leave files out."""
    keys = ["007", "a/b", None]
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    table = Table(str(tmp_path), schema, partition_by=("k",))
    table.commit(*(table.write([{"k": k, "n": n}], folder=f"{folder_name('k', k)}/") for n, k in enumerate(keys)))
    assert collected(raydp_session, str(tmp_path)) == sorted_rows(table.arrow())
    some = table_to_dataframe(raydp_session.spark, str(tmp_path), filters=[("k", "in", ["a/b", None])])
    assert sorted(some.collect(), key=lambda found: int(found.n)) == [("a/b", 1), (None, 2)]


@pytest.mark.parametrize("keys", [(), ("k",)])
def test_an_empty_table_has_its_schema(raydp_session: RayDPSession, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """No rows, the columns of the table, no hidden one."""
    Table(str(tmp_path), SCHEMA, keys)
    df = table_to_dataframe(raydp_session.spark, str(tmp_path))
    assert df.columns == SCHEMA.names
    assert df.count() == 0


def test_types_that_spark_lacks_are_widened(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Unsigned numbers, nanoseconds and nested columns come through with their values, over many files."""
    schema = pa.schema(
        [
            ("small", pa.uint32()),
            ("big", pa.uint64()),
            ("at", pa.timestamp("ns", "Europe/Berlin")),
            ("tags", pa.large_list(pa.large_string())),
            ("took", pa.duration("ms")),
            ("point", pa.struct([("x", pa.uint8())])),
        ]
    )
    table = Table(str(tmp_path), schema)
    values = {"small": 2**32 - 1, "big": 2**64 - 1, "at": AT, "took": dt.timedelta(milliseconds=5)}
    for n in range(20):
        table.commit(table.write([values | {"tags": [str(n), None], "point": {"x": 200}}], n))
    shown = collected(raydp_session, str(tmp_path))
    assert all(values.items() <= r.items() for r in shown)
    assert sorted(int(r["tags"][0]) for r in shown) == list(range(20))  # type: ignore[index]
    assert {tuple(r["point"]) for r in shown} == {(200,)}  # type: ignore[arg-type]


def test_a_value_that_does_not_fit_is_an_error(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Nanoseconds that microseconds cannot hold fail rather than being cut off."""
    table = Table(str(tmp_path), pa.schema([("at", pa.timestamp("ns"))]))
    nanosecond = pl.DataFrame({"at": pl.Series([1], dtype=pl.Datetime("ns"))}).to_arrow()
    table.commit(table.write(nanosecond.to_pylist()))
    with pytest.raises(PySparkException, match="would lose data"):
        table_to_dataframe(raydp_session.spark, str(tmp_path)).collect()


def test_a_damaged_file_is_found_when_read_through_the_store(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Executors verify checksums."""
    table = Table(str(tmp_path), pa.schema([("n", pa.uint64())]))
    file = table.write([{"n": 1}])
    table.commit(file)
    path = tmp_path / file.path
    data = bytearray(path.read_bytes())
    data[6] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PySparkException, match="checksum does not match"):
        table_to_dataframe(raydp_session.spark, str(tmp_path)).collect()


def test_a_table_in_memory_is_refused(raydp_session: RayDPSession) -> None:
    """Executors do not see the memory of this process; that is said rather than shown as no rows."""
    Table("memory://table-for-spark", SCHEMA)
    with pytest.raises(ConfigurationError, match="do not see"):
        table_to_dataframe(raydp_session.spark, "memory://table-for-spark")


def test_no_table_is_an_error(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """A url without a table is told apart from an empty table."""
    with pytest.raises(TableError, match="table"):
        table_to_dataframe(raydp_session.spark, str(tmp_path))
