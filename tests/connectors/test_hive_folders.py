"""Columns that stand in the names of folders: values, types, and files that do not have them."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
import pytest
from source_contract import check_source

from tidegate.connectors.files.patterns import FilePattern, folder_values
from tidegate.connectors.files.source import FileForm, FilesSource, FolderSource, source_of_files
from tidegate.storage.errors import ConfigurationError

BY = pa.schema([("day", pa.date32()), ("shop", pa.string()), ("hour", pa.int32())])
ROWS = pa.table({"x": [1, 2]})


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_values_come_from_folders(tmp_path: Path, kind: str) -> None:
    """Decoded, in their types, behind the columns of the file, which count for nothing there; in every projection."""
    for number, folder in enumerate(["day=2013-01-01/shop=a%2Fb/hour=01", "day=2013-01-02/shop=50%25/hour=2"]):
        path = tmp_path / folder / f"part=1.{kind}"
        path.parent.mkdir(parents=True)
        table = ROWS.append_column("hour", pa.array([7, 8])) if number else ROWS
        (pq.write_table if kind == "parquet" else pa_csv.write_csv)(table, path)
    source = source_of_files(f"{tmp_path}/**/*.{kind}", partitions=BY)
    assert isinstance(source, FilesSource)
    expected = [
        {"x": x, "day": dt.date(2013, 1, day), "shop": shop, "hour": day}
        for day, shop in ((1, "a/b"), (2, "50%"))
        for x in (1, 2)
    ]
    assert source.schema.names == ["x", "day", "shop", "hour"]
    assert check_source(source) == expected
    for names in (["shop"], ["x", "hour"], ["x"]):
        assert check_source(source.projected(names)) == [{name: row[name] for name in names} for row in expected]


def test_another_writer_s_folders_are_read(tmp_path: Path) -> None:
    """With a null among the values, which has a folder of its own."""
    table = pa.table({"x": [1, 2, 3], "shop": ["a b", "c=d", None]})
    partitioning = pa_dataset.partitioning(pa.schema([("shop", pa.string())]), flavor="hive")
    pa_dataset.write_dataset(table, tmp_path, format="parquet", partitioning=partitioning)
    by = pa.schema([("shop", pa.string())])
    source = source_of_files(f"{tmp_path}/**/*.parquet", partitions=by)
    assert sorted(check_source(source), key=lambda row: row["x"]) == table.to_pylist()  # type: ignore[arg-type, return-value]


def test_a_folder_that_grows_has_them_too(tmp_path: Path) -> None:
    """They follow the file that a lane is at."""
    for hour in (1, 2):
        (tmp_path / f"hour={hour}").mkdir()
        pq.write_table(ROWS, tmp_path / f"hour={hour}" / "a.parquet")
    schema, by = pa.schema([("x", pa.int64()), ("hour", pa.int32())]), pa.schema([("hour", pa.int32())])
    pattern = FilePattern.of(f"{tmp_path}/**/*.parquet")
    source = FolderSource(pattern, FileForm(schema, partitions=by), schema, 10, 10**9, 1)
    rows = check_source(source)
    assert sorted((row["hour"], row["x"]) for row in rows) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    """When the job is submitted, with its name; so is a value of another type."""
    with pytest.raises(ConfigurationError, match=r"^a/x\.csv is in no folder day=\.\.\."):
        folder_values("a/x.csv", BY)
    with pytest.raises(ConfigurationError, match=r"day=tomorrow is not of type date32"):
        folder_values("day=tomorrow/shop=a/hour=1/x.csv", BY)
    pq.write_table(ROWS, tmp_path / "a.parquet")
    source = source_of_files(f"{tmp_path}/*.parquet", partitions=BY)
    with pytest.raises(ConfigurationError, match="is in no folder"):
        source.splits()


@pytest.mark.parametrize(
    ("folder", "kind", "reason"),
    [
        ("k=%FF", pa.string(), "k=%FF is not UTF-8"),
        ("k=1e400", pa.float64(), "k=1e400 is not of type double"),
        ("k=0x10", pa.int64(), "k=0x10 is not of type int64"),
        ("k=" + "9" * 39, pa.decimal128(38, 0), r"is not of type decimal128\(38, 0\)"),
        ("k=1/k=2", pa.int64(), r"is in two folders k=\.\.\."),
    ],
)
def test_a_value_that_its_column_cannot_hold_is_refused(folder: str, kind: pa.DataType, reason: str) -> None:
    """Instead of a replacement character, infinity, another number or one of two values."""
    with pytest.raises(ConfigurationError, match=reason):
        folder_values(f"{folder}/x.csv", pa.schema([("k", kind)]))


def test_floats_that_are_not_finite_and_nulls() -> None:
    """Floats have the words of Spark and of Arrow; a null needs a column that may be null."""
    by = pa.schema([("k", pa.float64())])
    assert [folder_values(f"k={word}/x", by)["k"][0].as_py() for word in ("inf", "Infinity", "-inf")] == [
        math.inf,
        math.inf,
        -math.inf,
    ]
    assert folder_values("k=__HIVE_DEFAULT_PARTITION__/x", by)["k"].to_pylist() == [None]
    with pytest.raises(ConfigurationError, match="k is null there"):
        folder_values("k=__HIVE_DEFAULT_PARTITION__/x", pa.schema([pa.field("k", pa.float64(), nullable=False)]))
