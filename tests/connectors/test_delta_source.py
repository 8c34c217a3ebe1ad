"""A Delta table as a source: one version of it, with the rows that other readers see, or an error that says why not."""

from __future__ import annotations

import datetime as dt
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from source_contract import check_source

import tidegate as tg
from tidegate.connectors import pushed_filters
from tidegate.connectors.delta.source import DeltaSource
from tidegate.connectors.files.open_file import OpenFile, UnreadableFileError
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.storage.errors import ConfigurationError

DAY = dt.date(2013, 1, 1)
ROWS = pa.table(
    {
        "day": pa.array([DAY, DAY + dt.timedelta(days=1), None, DAY], pa.date32()),
        "shop": ["a/b", "50%", "c", None],
        "x": [1, 2, 3, 4],
        "at": pa.array([0, 1, None, 3], pa.timestamp("us", "UTC")),
    }
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A table with a folder for each day and shop."""
    write_deltalake(str(tmp_path / "table"), ROWS, partition_by=["day", "shop"])
    return str(tmp_path / "table")


def by_x(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in an order."""
    return sorted(rows, key=lambda row: (row["x"], str(row)))


def test_rows_are_those_of_other_readers(url: str) -> None:
    """Partition columns with nulls and characters that are escaped twice included; and it keeps the contract."""
    assert by_x(check_source(DeltaSource.open(url))) == by_x(ROWS.to_pylist())
    assert by_x(pl.read_delta(url).to_dicts()) == by_x(ROWS.to_pylist())
    assert DeltaSource.open(url).schema.equals(ROWS.schema)
    only = DeltaSource.open(url).projected(["day"])
    assert sorted(str(row["day"]) for row in check_source(only)) == sorted(map(str, ROWS["day"].to_pylist()))


def test_a_version_stays_what_it_was(url: str) -> None:
    """Whatever comes after it; a restored job goes on in its files."""
    write_deltalake(url, ROWS.slice(0, 1), mode="append")
    first, newest = DeltaSource.open(url, 0), DeltaSource.open(url)
    assert (first.version, newest.version) == (0, 1)
    assert len(check_source(first)) == 4
    assert len(check_source(newest)) == 5
    write_deltalake(url, ROWS.slice(0, 1), mode="overwrite")
    assert len(check_source(newest)) == 5
    newest.check_restored(first.splits())
    with pytest.raises(ConfigurationError, match="is not a file of a Delta table"):
        newest.check_restored([SourceSplit("x", b"\x01")])


def test_columns_that_were_added_later_are_null_before(url: str) -> None:
    """In files that lack them."""
    more = ROWS.slice(0, 1).append_column("tip", pa.array([0.5]))
    write_deltalake(url, more, mode="append", schema_mode="merge")
    rows = by_x(check_source(DeltaSource.open(url)))
    assert [(row["x"], row["tip"]) for row in rows] == [(1, 0.5), (1, None), (2, None), (3, None), (4, None)]


def test_files_of_other_partitions_are_not_opened(url: str) -> None:
    """Where a filter drops all of their rows; also those of which it is known that they are null."""

    def left(condition: pl.Expr) -> list[int]:
        tests = pushed_filters.tests_of(condition)
        assert tests is not None
        source = DeltaSource.open(url).filtered((tests,))
        return sorted(row["x"] for row in check_source(source))

    assert left(pl.col("day") > DAY) == [2]
    assert left(pl.col("shop").is_null()) == [4]
    assert left(pl.col("shop") == "a/b") == [1]
    assert left((pl.col("day") == DAY) & (pl.col("x") > 3)) == [4]
    assert left(pl.col("x") > 9) == []
    tests = pushed_filters.tests_of(pl.col("day") > DAY)
    assert tests is not None
    source = DeltaSource.open(url).filtered((tests,))
    reads = [source.reader().read(split, 0, 9) for split in source.splits()]
    assert reads.count(ReadResult(None, 1, at_end=True, skipped=1)) == 3


def test_a_value_in_delta_s_log_counts_and_not_that_of_the_file(tmp_path: Path) -> None:
    """A file may have the column as well; an empty string is a null to Delta."""
    url = str(tmp_path / "table")
    write_deltalake(url, pa.table({"s": ["", "b"], "x": [1, 2]}), partition_by=["s"])
    for path in DeltaTable(url).file_uris():
        pq.write_table(pq.ParquetFile(path).read().append_column("s", pa.array(["other"])), path)
    rows = by_x(check_source(DeltaSource.open(url)))
    assert [(row["x"], row["s"]) for row in rows] == [(1, None), (2, "b")]
    tests = pushed_filters.tests_of(pl.col("s").is_null())
    assert tests is not None
    assert [row["x"] for row in check_source(DeltaSource.open(url).filtered((tests,)))] == [1]


def test_old_timestamps_of_spark_are_read(tmp_path: Path) -> None:
    """Those that it writes in 96 bits, also of years for which nanoseconds have no room."""
    url = str(tmp_path / "table")
    at = [dt.datetime(1500, 1, 1, tzinfo=dt.UTC), dt.datetime(2500, 1, 1, 1, tzinfo=dt.UTC)]
    table = pa.table({"x": [1, 2], "at": pa.array(at, pa.timestamp("us", "UTC"))})
    write_deltalake(url, table)
    (path,) = DeltaTable(url).file_uris()
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    assert [row["at"] for row in by_x(check_source(DeltaSource.open(url)))] == at


def test_a_file_that_was_changed_is_refused(url: str) -> None:
    """And one that is gone, when the table is opened or read."""
    source = DeltaSource.open(url)
    path = DeltaTable(url).file_uris()[0]
    split = next(split for split in source.splits() if path.endswith(split.split_id))
    os.utime(path, ns=(1, 1))
    with pytest.raises(UnreadableFileError, match="was changed"):
        source.reader().read(split, 0, 9)
    Path(path).unlink()
    with pytest.raises(UnreadableFileError, match="was deleted before"):
        source.reader().read(split, 0, 9)
    with pytest.raises(ConfigurationError, match=r"which does not exist\. A vacuum may have deleted it"):
        DeltaSource.open(url)


def test_a_row_over_the_limit_is_no_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the size and what to do about it. Nothing about vacuums or restores, because the file is whole."""
    url = str(tmp_path / "large")
    monkeypatch.setitem(OpenFile.__init__.__kwdefaults__, "limit_bytes", 2**20)
    write_deltalake(url, pa.table({"s": ["a" * 2**24]}))
    source = DeltaSource.open(url)
    with pytest.raises(UnreadableFileError, match=r"The limit is 1,048,576 bytes.*\. Shorten the values") as refused:
        check_source(source)
    assert "acuum" not in str(refused.value)
    assert "restore" not in str(refused.value)


def _features(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(entry: dict[str, Any]) -> None:
        if "protocol" in entry:
            features = {"readerFeatures": list(names), "writerFeatures": list(names)}
            entry["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}

    return change


def _mapped(entry: dict[str, Any]) -> None:
    _features("columnMapping")(entry)
    if "metaData" in entry:
        entry["metaData"]["configuration"] = {
            "delta.columnMapping.mode": "name",
            "delta.columnMapping.maxColumnId": "1",
        }
        schema = json.loads(entry["metaData"]["schemaString"])
        for number, field in enumerate(schema["fields"]):
            field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
        entry["metaData"]["schemaString"] = json.dumps(schema)


def _deleted(entry: dict[str, Any]) -> None:
    _features("deletionVectors")(entry)
    if "add" in entry:
        # A bitmap with the number 3, as Delta's protocol writes it down, in Z85.
        bitmap = struct.pack("<IQIIIHHIHxx", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 3)
        vector = {"storageType": "i", "pathOrInlineDv": _z85(bitmap), "sizeInBytes": 34, "cardinality": 1}
        entry["add"]["deletionVector"] = vector


def _char(entry: dict[str, Any]) -> None:
    if "metaData" in entry:
        schema = json.loads(entry["metaData"]["schemaString"])
        schema["fields"][0]["metadata"] = {"__CHAR_VARCHAR_TYPE_STRING": "char(4)"}
        entry["metaData"]["schemaString"] = json.dumps(schema)


def _z85(data: bytes) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    words = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(digits[word // 85**place % 85] for word in words for place in range(4, -1, -1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_mapped, "has column mapping"),
        (_deleted, "has deletion vectors"),
        (_char, r"declares column 'x' as char\(4\), whose values readers of Spark fill with spaces"),
        (_features("typeWidening"), "needs what only other readers know"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    """With what to do instead."""
    url = str(tmp_path / "table")
    write_deltalake(url, pa.table({"x": range(50)}))
    _rewrite(url, change)
    with pytest.raises(ConfigurationError, match=rf"{reason}.* let Spark read it"):
        DeltaSource.open(url)


def test_a_lookup_join_refuses_padded_columns(tmp_path: Path) -> None:
    """A key `ab` would not be found as the `ab  ` that Spark reads."""
    url = str(tmp_path / "table")
    write_deltalake(url, pa.table({"k": ["ab"], "v": [1]}))
    _rewrite(url, _char)
    with (
        tg.StreamEnvironment.local(1) as env,
        pytest.raises(ConfigurationError, match=r"lookup_join: the Delta table at .* declares column 'k' as char\(4\)"),
    ):
        env.from_rows([{"k": "ab"}]).lookup_join(url, on="k")


def test_a_table_that_is_partitioned_by_bytes_is_refused(tmp_path: Path) -> None:
    """`deltalake` writes the bytes `ab` as text that it does not read back, and Spark writes them as they are."""
    url = str(tmp_path / "table")
    write_deltalake(url, pa.table({"k": [1], "p": pa.array([b"ab"], pa.binary())}), partition_by=["p"])
    with pytest.raises(ConfigurationError, match=r"is partitioned by the bytes of 'p'.* let Spark read it"):
        DeltaSource.open(url)
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_batches(pa.table({"k": [1], "p": pa.array([b"ab"], pa.binary())}))
        with pytest.raises(ConfigurationError, match=r"lookup_join: the Delta table at .* the bytes of 'p'"):
            rows.lookup_join(url, on="k")
        with pytest.raises(tg.TableError, match=r"is partitioned by the bytes of 'p'.* write to another url"):
            rows.to_delta(url, mode="upsert", keys="k")


def test_what_a_table_may_have_and_has_not_is_fine(tmp_path: Path) -> None:
    """Deletion vectors that are allowed, and none is there."""
    url = str(tmp_path / "table")
    write_deltalake(url, pa.table({"x": [1]}))
    _rewrite(url, _features("deletionVectors"))
    assert check_source(DeltaSource.open(url)) == [{"x": 1}]


def test_no_table_and_no_version_are_errors(tmp_path: Path, url: str) -> None:
    """That name the place."""
    for there, version in ((str(tmp_path / "nothing"), None), (url, 9)):
        with pytest.raises(ConfigurationError, match=rf"from_delta\('{there}'\): cannot read"):
            DeltaSource.open(there, version)
    with pytest.raises(ConfigurationError, match="version=-1; give a whole number"):
        DeltaSource.open(url, -1)
    with pytest.raises(ConfigurationError, match="cannot be in memory"):
        DeltaSource.open("memory://x")
    with pytest.raises(ConfigurationError, match="decode '%20' and would look in another folder"):
        DeltaSource.open(f"{tmp_path}/a%20b")


def _rewrite(url: str, change: Callable[[dict[str, Any]], None]) -> None:
    (log,) = (Path(url) / "_delta_log").glob("*.json")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        change(entry)
    log.write_text("\n".join(map(json.dumps, entries)))
