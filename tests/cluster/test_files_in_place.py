"""DataFrames that only read files, read from these: the same rows and types as Spark's own read of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from source_contract import check_source

import tidegate as tg
from tidegate.connectors.files.open_file import UnreadableFileError
from tidegate.connectors.formats.parquet import ParquetRows, parquet_schema
from tidegate.connectors.source import Source
from tidegate.spark_bridge import DataFrameSource, ParquetSource, RayDPSession
from tidegate.spark_bridge.dataframes import files_in_place
from tidegate.spark_bridge.dataframes.files_in_place import FilesInPlace, placed_files
from tidegate.storage.files.file_system_store import open_store

ROWS = 100


@pytest.fixture(scope="module")
def folder(raydp_session: RayDPSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six files in folders of two columns, with every kind of column and nulls. The check takes long for many files."""
    n, url = F.col("n"), str(tmp_path_factory.mktemp("in place") / "a%b c")
    columns = {
        "n": n,
        "text": F.when(n % 5 == 0, None).otherwise(F.concat(F.lit("x"), n % 7)),
        "real": F.when(n % 9 == 0, None).otherwise(n / 3),
        "small": (n % 100).cast("short"),
        "flag": n % 2 == 0,
        "at": F.timestamp_seconds(n * 100_000),
        "far": F.timestamp_seconds(n * 1_000_000_000),
        "wall": F.timestamp_seconds(n).cast("timestamp_ntz"),
        "day": F.date_add(F.lit("1700-01-01").cast("date"), n.cast("int")),
        "amount": n.cast("decimal(10,2)"),
        "tags": F.array(n, F.lit(None)),
        "point": F.struct(n.alias("x")),
        "shop": F.when(n % 4 == 0, None).otherwise("a/b=1"),
        "part": (n % 3).cast("int"),
    }
    rows = (
        raydp_session.spark.range(ROWS)
        .withColumnRenamed("id", "n")
        .select(*(column.alias(name) for name, column in columns.items()))
    )
    rows.coalesce(1).write.partitionBy("shop", "part").parquet(url)
    return url


def by_n(rows: list[dict[str, Any]]) -> list[str]:
    """Rows in an order, comparable."""
    return sorted(str(sorted((name, str(value)) for name, value in row.items())) for row in rows)


SAME: dict[str, Callable[[DataFrame], DataFrame]] = {
    "all": lambda df: df,
    "columns of files and folders under other names": lambda df: df.select(F.col("text").alias("t"), "part", "n"),
    "folders alone": lambda df: df.select("shop"),
    "filter by a folder": lambda df: df.filter("part = 1 and shop is not null").select("n"),
    "filter by what is not selected": lambda df: df.filter("at >= timestamp'1970-01-20'").select("real"),
    "or, not, in": lambda df: df.filter("not (n between 3 and 50) and text in ('x1', 'x2') or shop is null"),
    "a list": lambda df: df.filter(F.col("n").isin(list(range(30)))).filter("not flag"),
    "constants on the left": lambda df: df.filter("30 > n and 5 <= n").select("n"),
    "null-safe": lambda df: df.filter("text <=> 'x3'").filter("text != 'x4'").select("n", "text"),
    "old dates and reals": lambda df: df.filter("day < date'1700-03-01' and real >= 5").select("day", "real"),
    "nothing": lambda df: df.filter("part = 7"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_the_rows_are_those_of_spark(
    raydp_session: RayDPSession,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[DataFrame], DataFrame],
) -> None:
    """With their types, whatever is chosen and filtered; positions keep the contract of sources."""
    monkeypatch.setattr(files_in_place, "SPLIT_ROWS", 5)
    df = change(raydp_session.spark.read.parquet(folder))
    source = DataFrameSource(df, stage=False).stage(str(tmp_path))
    assert isinstance(source, FilesInPlace)
    batches = df._collect_as_arrow()
    wanted = pa.Table.from_batches(batches) if batches else source.schema.empty_table()
    assert source.schema.names == wanted.schema.names
    assert [field.type for field in source.schema] == [DataFrameSource(df).schema.field(f).type for f in df.columns]
    assert by_n(check_source(source)) == by_n(wanted.to_pylist())
    for name in source.schema.names[:1]:
        only = source.projected([name])
        assert by_n(check_source(only)) == by_n(wanted.select([name]).to_pylist())


NEEDS_SPARK: dict[str, tuple[str, Callable[[DataFrame], DataFrame]]] = {
    "computes": ("the DataFrame computes", lambda df: df.select((F.col("n") + 1).alias("n"))),
    "filters by a function": ("the DataFrame filters by", lambda df: df.filter("n % 2 = 0")),
    "decimals": ("constants of type decimal", lambda df: df.filter("amount > 3")),
    "limit": ("the plan of the DataFrame has the step GlobalLimit", lambda df: df.limit(3)),
    "sort": ("the plan of the DataFrame has the step Sort", lambda df: df.orderBy("n")),
    "shuffle": ("the plan of the DataFrame has the step Repartition", lambda df: df.repartition(2)),
    "two reads": ("the plan of the DataFrame has the step Union", lambda df: df.union(df)),
    "name of file": ("the DataFrame computes", lambda df: df.withColumn("file", F.input_file_name())),
    "hidden column": ("the DataFrame computes", lambda df: df.select("_metadata.file_path")),
    "another type": (
        "stores small in another way",
        lambda df: df.sparkSession.read.schema("small int").parquet(of(df)),
    ),
    "an option": ("the option", lambda df: df.sparkSession.read.option("int96RebaseMode", "LEGACY").parquet(of(df))),
    "text": ("files of the format Text", lambda df: df.sparkSession.read.text(of(df))),
}


def of(df: DataFrame) -> str:
    """A folder of files that it reads."""
    return os.path.dirname(df.inputFiles()[0]).removeprefix("file://").replace("%25", "%").replace("%20", " ")


@pytest.mark.parametrize(("words", "change"), NEEDS_SPARK.values(), ids=NEEDS_SPARK.keys())
def test_what_spark_has_to_do_is_named(
    raydp_session: RayDPSession, folder: str, tmp_path: Path, words: str, change: Callable[[DataFrame], DataFrame]
) -> None:
    """With stage=False that is an error; nothing is written."""
    df = change(raydp_session.spark.read.parquet(f"{folder}/shop=a%2Fb%3D1"))
    with pytest.raises(tg.ConfigurationError, match=f"only Spark can read this DataFrame.*{words}"):
        DataFrameSource(df, stage=False).stage(str(tmp_path / "in"))
    assert not (tmp_path / "in").exists()


def test_what_is_cached_is_not_read_again(raydp_session: RayDPSession, folder: str, tmp_path: Path) -> None:
    """Its files may be other ones by now; also if the plan was made before it was cached."""
    df = raydp_session.spark.read.parquet(folder).select("n")
    # That of the DataFrame itself, and not of one made of it.
    assert len(df.collect()) == ROWS
    df.cache()
    try:
        with pytest.raises(tg.ConfigurationError, match="the plan of the DataFrame has the step InMemoryRelation"):
            DataFrameSource(df, stage=False).stage(str(tmp_path))
    finally:
        df.unpersist()


def test_a_restored_job_reads_what_the_first_one_had_found(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Files that came later do not count, and one that has changed is an error that names it."""
    files, work = tmp_path / "files", str(tmp_path / "work")
    raydp_session.spark.range(10).coalesce(1).write.parquet(str(files))
    df = raydp_session.spark.read.parquet(str(files))
    first = DataFrameSource(df).stage(work)
    raydp_session.spark.range(10, 30).coalesce(1).write.mode("append").parquet(str(files))
    again = DataFrameSource(raydp_session.spark.read.parquet(str(files))).reopen(work)
    assert isinstance(again, FilesInPlace)
    assert again.splits() == first.splits()
    assert [row["id"] for row in check_source(again)] == list(range(10))

    (changed,) = (split.split_id for split in first.splits())
    (files / changed).write_bytes((files / changed).read_bytes() + b"more")
    with pytest.raises(UnreadableFileError, match=rf"{changed} was changed.*stage=True"):
        again.reader().read(again.splits()[0], 0, 10)
    (files / changed).unlink()
    with pytest.raises(UnreadableFileError, match=rf"{changed} was deleted before.*stage=True"):
        again.reader().read(again.splits()[0], 0, 10)


def test_stage_decides(raydp_session: RayDPSession, folder: str, tmp_path: Path) -> None:
    """True writes the rows down; without it a DataFrame that Spark has to read is staged."""
    df = raydp_session.spark.read.parquet(folder).select("n")
    assert isinstance(DataFrameSource(df, stage=True).stage(str(tmp_path / "a")), ParquetSource)
    assert placed_files(open_store(str(tmp_path / "a"))) is None
    computed = DataFrameSource(df.select(F.col("n") * 2))
    assert isinstance(computed.stage(str(tmp_path / "b")), ParquetSource)
    assert isinstance(computed.reopen(str(tmp_path / "b")), ParquetSource)
    streaming = raydp_session.spark.readStream.format("rate").load()
    with tg.StreamEnvironment.local() as env, pytest.raises(tg.ConfigurationError, match=r"stage=.*bounded DataFrames"):
        env.from_dataframe(streaming, stage=True)


NUMBERS = ["-1.5", "-0.0", "0.0", "1.5", "'-Infinity'", "'Infinity'", "'NaN'"]
SPECIAL = {
    "x": [f"double({number})" for number in NUMBERS],
    "f": [f"float({number})" for number in NUMBERS],
    "n": ["-3L", "0L", "3L"],
    "i": ["-3", "0", "3"],
    "s": ["''", "'a'", "'a '", "'é'", "'😀'"],
    "b": ["true", "false"],
    "d": ["date'1500-01-01'", "date'1970-01-01'", "date'9999-12-31'"],
    "t": ["timestamp'0001-01-01'", "timestamp'1969-12-31 23:59:59.999999'", "timestamp'9999-12-31'"],
}
LEAVES = (
    st.sampled_from([*SPECIAL])
    .flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(SPECIAL[name]), st.lists(st.sampled_from(SPECIAL[name])))
    )
    .flatmap(
        lambda found: st.sampled_from(
            [f"{found[0]} {sign} {found[1]}" for sign in ("=", "!=", "<", "<=", ">", ">=", "<=>")]
            + [f"{found[1]} {sign} {found[0]}" for sign in ("=", "<", ">=")]
            + [f"{found[0]} {word} ({', '.join([found[1], *found[2]])})" for word in ("in", "not in")]
            + [f"{found[0]} is null", f"{found[0]} is not null"]
        )
    )
)
FILTERS = st.recursive(
    LEAVES,
    lambda parts: (
        st.tuples(parts, st.sampled_from(["and", "or"]), parts).map(lambda p: f"({p[0]} {p[1]} {p[2]})")
        | parts.map(lambda part: f"not ({part})")
    ),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def special(raydp_session: RayDPSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each special value of each column, beside nulls and some of the others, in several row groups."""
    rows = []
    for number, step in enumerate([1] * 12 + [3] * 12 + [5] * 12):
        values = [[*values, "null"][number * step % (len(values) + 1)] for values in SPECIAL.values()]
        rows.append(f"({number}, {', '.join(values)})")
    url = str(tmp_path_factory.mktemp("special") / "rows")
    names = ", ".join(["row", *SPECIAL])
    df = raydp_session.spark.sql(f"select * from values {', '.join(rows)} as t({names})")
    modes = [f"spark.sql.parquet.{kind}RebaseModeInWrite" for kind in ("datetime", "int96")]
    for mode in modes:
        raydp_session.spark.conf.set(mode, "CORRECTED")
    df.repartitionByRange(6, "row").write.parquet(url)
    for mode in modes:
        raydp_session.spark.conf.unset(mode)
    return url


@settings(max_examples=6)
@given(conditions=st.lists(FILTERS, min_size=10, max_size=10))
def test_any_condition_keeps_the_rows_that_spark_keeps(
    raydp_session: RayDPSession, special: str, tmp_path_factory: pytest.TempPathFactory, conditions: list[str]
) -> None:
    """For -0.0, NaN, infinity, null, old and far times, in every kind of condition that is not left to Spark."""
    frame = raydp_session.spark.read.parquet(special)
    # One job of Spark for all conditions. They are columns here: Spark's filters of row groups compare zeros by their
    # bits, so what a filter keeps would depend on the files.
    columns = [F.expr(condition).alias(f"c{number}") for number, condition in enumerate(conditions)]
    truths = frame.select("row", *columns).collect()
    for number, condition in enumerate(conditions):
        df = frame.filter(condition).select("row")
        source = DataFrameSource(df).stage(str(tmp_path_factory.mktemp("in")))
        event("in place" if isinstance(source, FilesInPlace) else "read by Spark")
        assert rows_of(source) == sorted(row.row for row in truths if row[f"c{number}"]), condition


def rows_of(source: Source) -> list[int]:
    """Returns the values of the column `row`, sorted."""
    reader = source.reader()
    found: list[int] = []
    for split in source.splits():
        offset, at_end = 0, False
        while not at_end:
            result = reader.read(split, offset, 1_000)
            offset, at_end = result.next_offset, result.at_end
            found += [] if result.batch is None else result.batch.column("row").to_pylist()
    return sorted(found)


def test_a_column_of_a_dictionary_and_shared_prefixes_is_read(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Writers of Parquet's second version store texts by prefixes as soon as a dictionary is full."""
    n, count = F.col("id"), 200_000
    text = F.when(n < count // 2, F.concat(F.lit("w"), n % 5)).otherwise(F.concat(F.lit("a long text "), n))
    rows = raydp_session.spark.range(count).select(n, text.alias("text"), F.array(text).alias("texts")).coalesce(1)
    rows.write.option("parquet.writer.version", "v2").parquet(f"{tmp_path}/in")
    (file,) = (tmp_path / "in").glob("*.parquet")
    parquet = pq.ParquetFile(file)
    for column in (1, 2):
        assert {"DELTA_BYTE_ARRAY", "RLE_DICTIONARY"} <= set(parquet.metadata.row_group(0).column(column).encodings)
    read, at = ParquetRows(str(file), "a", parquet_schema(str(file))), 0
    expected = parquet.read()
    while (batch := read.read(at, 50_000)) is not None:
        assert pa.Table.from_batches([batch]).equals(expected.slice(at, batch.num_rows))
        at += batch.num_rows
    assert at == count
