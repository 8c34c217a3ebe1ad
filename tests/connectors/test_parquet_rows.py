"""Rows of Parquet files: values as they were written or an error, times of all years, and bounded memory."""

from __future__ import annotations

import base64
import datetime as dt
import gc
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.connectors.files.open_file import UnreadableFileError
from tidegate.connectors.files.source import source_of_files
from tidegate.connectors.formats.parquet import (
    LIMIT_BYTES,
    PIECE_BYTES,
    ParquetRows,
    PieceSizes,
    leaves_of,
    parquet_schema,
    whole_parquet,
)
from tidegate.connectors.pushed_filters import rows_kept
from tidegate.storage.errors import ConfigurationError


def rows_of(path: Path, schema: pa.Schema | None = None, rows_max: int = 1_000) -> pa.Table:
    """All rows, read one slice after the other."""
    schema = parquet_schema(path) if schema is None else schema
    rows, batches, at = ParquetRows(path, path.name, schema), [], 0
    while (batch := rows.read(at, rows_max)) is not None:
        assert 0 < batch.num_rows <= rows_max
        batches.append(batch)
        at += batch.num_rows
    return pa.Table.from_batches(batches, schema)


def read(path: Path, schema: pa.Schema) -> pa.RecordBatch | None:
    """The first rows of a file, as a job reads them."""
    source = source_of_files(str(path), "parquet", schema)
    return source.reader().read(source.splits()[0], 0, 1_000).batch


def read_all(pattern: str, schema: pa.Schema) -> None:
    """Read a file to its end."""
    source = source_of_files(pattern, "parquet", schema)
    reader, split, at = source.reader(), source.splits()[0], 0
    while (found := reader.read(split, at, 10)).batch is not None:
        at += found.batch.num_rows


DICTIONARY_THEN_DELTAS = base64.b85decode(
    "P(e~L6$BOJwHOte0ZbJX6#x<d04TLD{h)FU0{~P309YYT003byF)}kWH3tA63-A)+fc-)ou(J>c>=NRD{X!fRhwY5R*})s7001aq"
    "Ha9pq1W*A0A<iD+>><wXFZdMz6(AKdEEN<L5ETX$1{?qY04TLD{U8v500062000yL1O*T>RCbsE000#L6^hsb6_^Js6}%4>4iyF!"
    "1{?qY04TLD{a^)E6%GIv6GS&qWokMA-RK%XZsm?|##swC>nS`ivqqw~n@S9?XcrX!0$fntL_{P=Xr;GofdRzIF@TXwTLv=#F919M"
    "0cL|ZwNxcIwe<5j%zzjNxZlO@T6<l)OIcCemHSofVy(TFvM0#@O0Iwag%o8qvAZ1NR#jEq1mLC-#5lmr{+IkS|9s}0f1VABG`%$C"
    "pE=T0VMHfJ=fQtIUz$#g&JIm2BgoI^O4C_DXFJUPq^hWrQdRWx8Dc==bcHNlCuBT?1gOWD4U7yPjden3EEt3myiUkKJ;uzVu>zmh"
    "ahsN5pVx7lmSK{~=XKnsW!UF++@@vNL^8=paDojH`(Ii{lz--*&s9`Ovp<`rl}%WvamkrEp(HJ-nFF8#v74#`67Uiwnl@J4Q2hT<"
    "=$-+~SxD=)#8ztI)}kd#rp%!x+2Uh<i{vg-<ECUoP7a5+4MZRC9&MGRP&XnZ@f)a-@niszuw6h;hY*Ks2wU=GO@}083_9uQI8ZLb"
    "{87?6jXB;0!6!`ZlPe;t9pnhQT=CIDNg5U7LIOYE%4~>(nE*wFrDe#&+ajARu*90XB^sMCstm9sN)?H(0u=-qEHwZa26JO*Wo=;<"
    "0ss{ZB?1@$b0q*w8~^|S7SInF92p!Y02~zz8ASjF4iFg_0do}$7SInCgpV5*+6gAa0VW6l02YLg8y3(HCI}YV2>>V{aA9(Bb!Bud"
    "V{mXSVRCYBcOZ6Ua&u{KZXhx?E-)@J85|q{004ae002-yQZW"
)
"""1,000 texts of 20 kB in a file as parquet-mr writes it: 10 in a dictionary, the others in DELTA_BYTE_ARRAY.

Arrow writes no such file, so pages of two of its files were put together.
"""

OLD_AND_NEW = [
    dt.datetime(1, 1, 1),
    dt.datetime(1582, 10, 15),
    None,
    dt.datetime(2024, 2, 29),
    dt.datetime(9999, 12, 31),
]


def test_times_of_spark_are_of_all_years(tmp_path: Path) -> None:
    """INT96 has no unit: Arrow would take it for nanoseconds, which end in 2262. Nested ones too."""
    column = pa.array(OLD_AND_NEW, pa.timestamp("us"))
    table = pa.table({"t": column, "l": pa.array([[t] for t in OLD_AND_NEW], pa.list_(pa.timestamp("us")))})
    pq.write_table(table, path := tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert parquet_schema(path).field("t").type == pa.timestamp("us")
    assert rows_of(path).to_pydict() == table.to_pydict()
    assert whole_parquet(str(path), "a").to_pydict() == table.to_pydict()
    utc = pa.schema([("t", pa.timestamp("ms", "UTC"))])
    assert rows_of(path, utc).column("t").cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us")) == table.column("t")


def test_nanoseconds_are_kept_or_refused(tmp_path: Path) -> None:
    """Digits below a microsecond come where the schema has nanoseconds, and no time becomes another one."""
    nanos = pa.table({"t": pa.array([0, 1_000, 1_001, -1], pa.timestamp("ns"))})
    pq.write_table(nanos, path := tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert rows_of(path, nanos.schema) == nanos
    assert whole_parquet(str(path), "a") == nanos
    with pytest.raises(
        ConfigurationError, match=r"column 't', row 2 .* and some nanoseconds does not fit timestamp\[us"
    ):
        rows_of(path)
    far = pa.table({"t": pa.array([dt.datetime(2024, 1, 1), dt.datetime(9999, 12, 31)], pa.timestamp("us"))})
    pq.write_table(far, path, use_deprecated_int96_timestamps=True)
    with pytest.raises(ConfigurationError, match=r"column 't', row 1 .*9999.* does not fit timestamp\[ns"):
        rows_of(path, nanos.schema)


@given(st.lists(st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)) | st.none(), min_size=1))
def test_any_time_comes_back(tmp_path_factory: pytest.TempPathFactory, times: list[dt.datetime | None]) -> None:
    """Of INT96, in microseconds, for all dates that Python and Spark know."""
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    path = tmp_path_factory.mktemp("times") / "a.parquet"
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=3)
    assert rows_of(path, rows_max=2) == table


@pytest.mark.parametrize(
    ("value", "stored", "wanted"),
    [
        (dt.datetime(2024, 1, 1, 23, 59), pa.timestamp("us"), pa.date32()),
        (0.125, pa.float64(), pa.decimal128(10, 2)),
        (1e300, pa.float64(), pa.float32()),
        (7, pa.int64(), pa.bool_()),
        (1704067200000, pa.int64(), pa.timestamp("us")),
        ({"A": 1}, pa.struct([("A", pa.int64())]), pa.struct([("a", pa.int64())])),
        ([{"v": 300}], pa.list_(pa.struct([("v", pa.int64())])), pa.list_(pa.struct([("v", pa.int8())]))),
    ],
)
def test_a_value_that_does_not_fit_names_file_column_row_and_value(
    tmp_path: Path, value: object, stored: pa.DataType, wanted: pa.DataType
) -> None:
    """Nothing is rounded, cut or left out to make it fit."""
    pq.write_table(
        pa.table({"x": pa.array([None, None, None, value], stored)}), tmp_path / "a.parquet", row_group_size=2
    )
    with pytest.raises(UnreadableFileError) as caught:
        read_all(f"{tmp_path}/a.parquet", pa.schema([("x", wanted)]))
    text = str(caught.value)
    assert f"{tmp_path}/a.parquet" in text
    assert "column 'x'" in text
    assert "row 3" in text
    assert repr(value) in text


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 40], ids=["one text", "many texts"])
def test_a_small_file_with_much_text_is_read_in_pieces(tmp_path: Path, others: int) -> None:
    """A dictionary stores a long string once. 512 MB of rows come from a few kilobytes, never many at a time."""
    texts, count = [letter * 2**16 for letter in "xyz"[: 1 if not others else 3]], 4_096
    texts += [f"{n}{'a' * 2**16}" for n in range(others)]
    names = pa.DictionaryArray.from_arrays(pa.array(np.arange(count, dtype=np.int32) % len(texts)), pa.array(texts))
    nested = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), names)
    table = pa.table({"i": range(count), "s": names, "l": nested})
    pq.write_table(table, path := tmp_path / "a.parquet", store_schema=False, dictionary_pagesize_limit=2**24)
    assert path.stat().st_size < 2**20
    schema = pa.schema([("i", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.string()))])
    before = pa.total_allocated_bytes()
    rows, at, most = ParquetRows(path, "a.parquet", schema), 0, 0
    while (batch := rows.read(at, count)) is not None:
        assert batch.column("i").to_pylist() == list(range(at, at + batch.num_rows))
        assert batch.column("s")[0].as_py() == texts[at % len(texts)]
        at += batch.num_rows
        assert batch.column("l")[-1].as_py() == [texts[(at - 1) % len(texts)]]
        most = max(most, pa.total_allocated_bytes() - before)
    assert at == count
    assert most < 4 * PIECE_BYTES < 2 * count * len(texts[0])


def _most_memory(path: Path, schema: pa.Schema) -> tuple[int, int]:
    """Bytes that Arrow held at most while a file was read, and all bytes of its rows."""
    before = pa.total_allocated_bytes()
    rows, at, most, size = ParquetRows(path, path.name, schema), 0, 0, 0
    while (batch := rows.read(at, 2**20)) is not None:
        at += batch.num_rows
        size += batch.nbytes
        most = max(most, pa.total_allocated_bytes() - before)
    return most, size


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_texts_that_share_their_begin_are_read_in_pieces(tmp_path: Path, version: str) -> None:
    """DELTA_BYTE_ARRAY stores what a text shares with the one before as a number. Behind short texts as well."""
    short, long = [f"{n:05}" for n in range(10_000)], [f"{'a' * 2**16}{n}" for n in range(4_608)]
    table = pa.table({"i": range(14_608), "s": short + long})
    pq.write_table(
        table,
        path := tmp_path / "a.parquet",
        use_dictionary=["i"],
        column_encoding={"s": "DELTA_BYTE_ARRAY"},
        data_page_version=version,
    )
    assert path.stat().st_size < 2**18
    most, size = _most_memory(path, table.schema)
    assert most < 4 * PIECE_BYTES < size
    assert rows_of(path, rows_max=1_000).slice(9_990, 20) == table.slice(9_990, 20)


@pytest.mark.slow
def test_long_texts_behind_many_short_ones_are_read_in_pieces(tmp_path: Path) -> None:
    """The average of a row group is no measure where compression has made long texts small."""
    table = pa.table({"s": pa.concat_arrays([pa.repeat("", 2**20), pa.repeat("a" * 2**16, 4_608)])})
    pq.write_table(
        table, path := tmp_path / "a.parquet", 2**21, use_dictionary=False, compression="zstd", write_batch_size=64
    )
    assert pq.ParquetFile(path).num_row_groups == 1
    assert path.stat().st_size < 2**20
    most, size = _most_memory(path, table.schema)
    assert most < 4 * PIECE_BYTES < size


@pytest.mark.slow
def test_a_plain_text_beside_a_dictionary_is_read_in_pieces(tmp_path: Path) -> None:
    """In one struct, whose type in the file has a dictionary for one of its fields only."""
    texts = pa.array([f"{'a' * 2**16}{n}" for n in range(2)])
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 1_024, pa.int32()), texts)
    struct = pa.StructArray.from_arrays(
        [pa.array(["x"] * 2_048).dictionary_encode(), coded.cast(pa.string())], ["a", "b"]
    )
    pq.write_table(pa.table({"s": struct}), path := tmp_path / "a.parquet")
    assert path.stat().st_size < 2**16
    schema = pa.schema([("s", pa.struct([("a", pa.string()), ("b", pa.string())]))])
    first = ParquetRows(path, "a.parquet", schema).read(0, 2_048)
    assert first is not None
    assert first.nbytes <= PIECE_BYTES < struct.nbytes
    assert rows_of(path, schema).column("s").to_pylist() == struct.to_pylist()


def test_a_dictionary_before_pages_that_share_prefixes(tmp_path: Path) -> None:
    """Arrow cannot read such pages as a dictionary, also not to look at the first rows."""
    path = tmp_path / "a.parquet"
    path.write_bytes(DICTIONARY_THEN_DELTAS)
    assert rows_of(path).column("s").to_pylist() == [f"{'a' * 20_000}{n}" for n in range(1_000)]


def test_large_pages_whose_bytes_are_in_the_file_are_read(tmp_path: Path) -> None:
    """Only pages of few bytes have a limit, also in DELTA_BYTE_ARRAY."""
    texts = [bytes(each) for each in np.random.default_rng(1).integers(0, 256, (64, 2**18), dtype=np.uint8)]
    table = pa.table({"b": pa.array(texts, pa.binary())})
    pq.write_table(
        table, path := tmp_path / "a.parquet", use_dictionary=False, column_encoding={"b": "DELTA_BYTE_ARRAY"}
    )
    assert path.stat().st_size > 2**24
    found = ParquetRows(path, "a.parquet", table.schema, limit_bytes=2**20).read(0, 64)
    assert found is not None
    assert found.column("b").to_pylist() == texts


def test_a_look_at_a_dictionary_reads_nothing_beside_it(tmp_path: Path) -> None:
    """The other fields of a struct may have long texts, which the look is there to find."""
    rows = 1_024
    texts = [pa.array([f"{at}{'b' * 1_000}{n}" for n in range(rows)]) for at in range(2)]
    long = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["a" * 2**16])).cast(pa.string())
    table = pa.table({"s": pa.StructArray.from_arrays([*texts, long], ["a", "b", "long"])})
    pq.write_table(table, path := tmp_path / "a.parquet", dictionary_pagesize_limit=2**22)
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        parquet = pq.ParquetFile(path)
        size = PieceSizes(parquet, path, leaves_of(parquet, ["s"]), set(), LIMIT_BYTES).of(0)
    finally:
        pa.set_memory_pool(before)
    assert size.rows < rows
    assert pool.max_memory() < 2**24 < long.nbytes


@pytest.mark.slow
def test_bytes_of_a_fixed_length_are_read_in_pieces(tmp_path: Path) -> None:
    """A dictionary stores them once, and their length is in the schema."""
    table = pa.table({"b": pa.repeat(pa.scalar(b"x" * 2**16, pa.binary(2**16)), 8_192)})
    pq.write_table(table, path := tmp_path / "a.parquet")
    assert path.stat().st_size < 2**16
    most, size = _most_memory(path, table.schema)
    assert most < 4 * PIECE_BYTES < size


@pytest.mark.slow
def test_a_large_page_of_few_bytes_is_refused(tmp_path: Path) -> None:
    """Arrow decompresses a page as a whole. The error names column and what to do, and the limit can be raised."""
    table = pa.table({"n": range(64), "s": pa.repeat("a" * 2**20, 64)})
    options = {"use_dictionary": False, "compression": "zstd", "data_page_size": 2**30}
    pq.write_table(table, path := tmp_path / "a.parquet", **options)
    rows = ParquetRows(path, "a.parquet", table.schema, limit_bytes=2**25)
    with pytest.raises(
        ConfigurationError, match=r"in column 's'\. Write .* smaller pages .*use from_files.*max_row_size="
    ):
        rows.read(0, 10)
    assert rows_of(path, table.schema) == table
    others = ParquetRows(path, "a.parquet", pa.schema([("n", pa.int64())]), limit_bytes=2**25)
    assert others.read(0, 64) is not None
    pq.write_table(table, path, use_dictionary=False, compression="zstd", write_batch_size=4)
    assert ParquetRows(path, "a.parquet", table.schema, limit_bytes=2**25).read(0, 10) is not None


@pytest.mark.parametrize(
    "value",
    [pa.array([["a" * 2**12] * 2**11]), pa.array([[7] * 2**20])],
    ids=["texts of a dictionary", "numbers"],
)
def test_a_row_of_few_bytes_over_the_limit_is_refused(tmp_path: Path, value: pa.Array) -> None:
    """Nothing can cut a row. It is refused before it is decoded."""
    table = pa.table({"l": value})
    pq.write_table(table, path := tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"row.* 8,388,608 bytes .*max_row_size="):
        ParquetRows(path, "a.parquet", table.schema, limit_bytes=2**22).read(0, 1)
    assert rows_of(path, table.schema) == table


def test_the_same_slices_come_from_any_row_on(tmp_path: Path) -> None:
    """What a read returns is a function of its arguments, also where pieces are joined."""
    texts = [f"{'a' * 2_000}{n % 7}" if n % 900 == 5 else f"{n}" for n in range(20_000)]
    table = pa.table({"s": texts, "n": range(20_000)})
    pq.write_table(
        table, path := tmp_path / "a.parquet", use_dictionary=False, column_encoding={"s": "DELTA_BYTE_ARRAY"}
    )
    through, at, found = ParquetRows(path, "a.parquet", table.schema), 0, []
    while (batch := through.read(at, 7_000)) is not None:
        assert batch.equals(table.slice(at, batch.num_rows).combine_chunks().to_batches()[0])
        found.append((at, batch.num_rows))
        at += batch.num_rows
    for row, count in reversed(found):
        batch = ParquetRows(path, "a.parquet", table.schema).read(row, 7_000)
        assert batch is not None
        assert batch.num_rows == count


def test_any_row_can_be_the_first(tmp_path: Path) -> None:
    """A reader goes back to earlier rows, and on to later ones."""
    pq.write_table(pa.table({"i": range(50)}), path := tmp_path / "a.parquet", row_group_size=7)
    rows = ParquetRows(path, "a.parquet", pa.schema([("i", pa.int64())]))
    for row in [10, 3, 3, 49, 0, 48, 20]:
        batch = rows.read(row, 2)
        assert batch is not None
        assert batch.column("i")[0].as_py() == row
    assert rows.read(50, 2) is None


def test_a_null_where_none_may_be_is_an_error(tmp_path: Path) -> None:
    """A schema that promises values gets them."""
    pq.write_table(pa.table({"x": [1, None]}), path := tmp_path / "a.parquet")
    with pytest.raises(UnreadableFileError, match="row 1"):
        read(path, pa.schema([pa.field("x", pa.int64(), nullable=False)]))


def test_row_groups_without_a_text_are_passed_over(tmp_path: Path) -> None:
    """Also where the column is read as a dictionary."""
    table = pa.table({"s": ["a"] * 5 + ["b"] * 5})
    pq.write_table(table, path := tmp_path / "a.parquet", row_group_size=5)
    rows = ParquetRows(path, "a.parquet", table.schema, rows_kept(pl.col("s") == "b", None))
    assert rows.next_row(0) == 5
    batch = rows.read(5, 10)
    assert batch is not None
    assert batch.column("s").to_pylist() == ["b"] * 5


def test_what_was_read_is_freed_at_the_end_of_a_file(tmp_path: Path) -> None:
    """At once, and not when Python looks for cycles: the next file would take fresh memory."""
    pq.write_table(pa.table({"s": [f"text {number}" for number in range(100_000)]}), tmp_path / "a.parquet")
    schema = pq.read_schema(tmp_path / "a.parquet")
    gc.collect()
    gc.disable()
    try:
        before = pa.total_allocated_bytes()
        rows = ParquetRows(str(tmp_path / "a.parquet"), "a.parquet", schema)
        at = 0
        while (batch := rows.read(at, 50_000)) is not None:
            at += batch.num_rows
        assert at == 100_000
        del rows
        assert pa.total_allocated_bytes() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("around", ["plain", "dictionary", "list", "struct"])
def test_a_string_that_is_not_utf8_names_its_row(tmp_path: Path, around: str) -> None:
    """Arrow reads and writes it, and no reader could open a table that has it. As bytes it is read."""
    rows = [b"a", b"\xc3\xbc", b"b" * 20, b"\xff", b"c"]
    offsets = pa.array(np.cumsum([0, *map(len, rows)]), pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), len(rows), [None, offsets, pa.py_buffer(b"".join(rows))])
    column = {
        "plain": lambda: texts,
        "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array(range(5), pa.int32()), texts),
        "list": lambda: pa.ListArray.from_arrays(range(6), texts),
        "struct": lambda: pa.StructArray.from_arrays([texts], ["s"]),
    }[around]()
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(UnreadableFileError, match=r"column 'x', row 3 \(counted from 0\): the string is not UTF-8"):
        read(tmp_path / "a.parquet", pa.schema([("x", column.type)]))
    with pytest.raises(ConfigurationError, match="column 'x' has a string that is not UTF-8"):
        whole_parquet(tmp_path / "a.parquet", "a.parquet")
    if around == "plain":
        found = read(tmp_path / "a.parquet", pa.schema([("x", pa.binary())]))
        assert found is not None
        assert found["x"].to_pylist() == rows
