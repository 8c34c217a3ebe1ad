"""How long a Delta table keeps its versions: what the job says that makes it, and what the table says later."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tidegate.storage.errors import TableError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.tables.delta_mirror import RETENTION_MS_DEFAULT, interval_ms
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

INFO = TableInfo.of(pa.schema([("v", pa.int64())]), "append", delta_id="tidegate-1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interval 7 days", 604_800_000),
        ("interval 1 week", 604_800_000),
        ("INTERVAL 1 WEEK 2 hours", 612_000_000),
        ("168 hours", 604_800_000),
        ("interval 90 seconds", 90_000),
        ("interval 1 month", None),
        ("interval -1 days", None),
        ("interval days", None),
        ("7", None),
        ("", None),
    ],
)
def test_intervals_of_delta(text: str, expected: int | None) -> None:
    """As Delta and Spark write them; months have no length."""
    assert interval_ms(text) == expected


def test_a_table_that_is_made_keeps_its_versions_for_the_history(tmp_path: Path) -> None:
    """A history of parts of a second is one second."""
    log = TableLog(FileSystemStore(str(tmp_path)))
    log.create(INFO, history_ms=90_500)
    properties = DeltaTable(tmp_path).metadata().configuration
    assert set(properties.values()) == {"interval 91 seconds"}
    assert set(properties) == {"delta.deletedFileRetentionDuration", "delta.logRetentionDuration"}
    assert log.delta_retention_ms() == 91_000


def test_what_the_table_says_counts(tmp_path: Path) -> None:
    """Others may have changed it since; what cannot be understood deletes nothing."""
    log = TableLog(FileSystemStore(str(tmp_path)))
    log.create(INFO)
    assert log.delta_retention_ms() == RETENTION_MS_DEFAULT
    table = DeltaTable(tmp_path)
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 30 days"})
    assert TableLog(FileSystemStore(str(tmp_path))).delta_retention_ms() == 30 * 86_400_000
    properties = {"delta.deletedFileRetentionDuration": "interval 2 fortnights"}
    table.alter.set_table_properties(properties, raise_if_not_exists=False)
    with pytest.raises(TableError, match="'interval 2 fortnights', which is not an interval"):
        TableLog(FileSystemStore(str(tmp_path))).delta_retention_ms()


def test_another_table_has_none(tmp_path: Path) -> None:
    """Only its own history counts."""
    log = TableLog(FileSystemStore(str(tmp_path)))
    log.create(TableInfo.of(pa.schema([("v", pa.int64())]), "append"))
    assert log.delta_retention_ms() == 0
