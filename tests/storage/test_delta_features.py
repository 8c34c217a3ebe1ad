"""A Delta table to which others have given features: each is written as it asks, or refused by name, and at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from delta_by_hand import (
    append_to_log,
    delete_rows,
    newest,
    set_features,
    set_field_metadata,
    set_properties,
    set_version,
)
from deltalake import DeltaTable, write_deltalake
from table_logs import SCHEMA, A, B
from test_delta_compaction import Job

from tidegate.api.tables.output_tables import compact_table
from tidegate.storage.errors import TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.table_files import data_dir
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

DELTA = TableInfo.of(SCHEMA, "append", delta_id="tidegate-test")
NOT_WRITTEN = [
    "allowColumnDefaults",
    "checkpointProtection",
    "clustering",
    "domainMetadata",
    "icebergCompatV1",
    "icebergCompatV2",
    "identityColumns",
    "inCommitTimestamp",
    "materializePartitionColumns",
    "of-the-future",
    "rowTracking",
]
READERS_TOO = ["catalogManaged", "of-the-future", "typeWidening", "vacuumProtocolCheck", "variantType"]


def path_of(number: int) -> str:
    """Where `Job` writes the file of a checkpoint."""
    return f"{data_dir(A, AttemptNumber(0))}/{number}.parquet"


def checked(folder: Path) -> None:
    """What a job does when it is submitted."""
    TableLog(open_store(str(folder))).check_claim(DELTA, A, None, "append")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(
            (lambda url, f=f: set_features(url, f), f"has the writer feature {f}\\b.*DROP FEATURE {f}")
            for f in NOT_WRITTEN
        ),
        *(
            (lambda url, f=f: set_features(url, f, readers=True), f.replace("catalogManaged", "catalog-managed"))
            for f in READERS_TOO
        ),
        (lambda url: set_version(url, 2, 6), "writer feature identityColumns"),
        (lambda url: set_version(url, 4, 8), "Delta table at"),
        (lambda url: set_properties(url, delta__columnMapping__mode="name"), "has column mapping .* = name"),
        (lambda url: set_properties(url, delta__constraints__small="v < 9"), r"CHECK constraint small \(v < 9\)"),
        (
            lambda url: set_properties(url, delta__setTransactionRetentionDuration="interval 7 days"),
            "forgets identifiers of transactions .* = interval 7 days.*UNSET TBLPROPERTIES",
        ),
        (lambda url: set_field_metadata(url, "v", {"delta.generationExpression": "1 + 1"}), "generated column v"),
        (lambda url: set_field_metadata(url, "v", {"delta.identity.start": 1}), "identity column v"),
        (lambda url: set_field_metadata(url, "v", {"delta.invariants": "{}"}), "invariant .* of column v"),
        (
            lambda url: set_field_metadata(url, "k", {"__CHAR_VARCHAR_TYPE_STRING": "varchar(2)"}),
            r"column k as varchar\(2\)",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, change: Callable[[Path], None], text: str) -> None:
    """At submission, and at the next commit of a job that runs; as an error that another attempt would meet again."""
    (tmp_path / "new").mkdir()
    write_deltalake(str(tmp_path / "new"), SCHEMA.empty_table())
    change(tmp_path / "new")
    with pytest.raises(TableError, match=text):
        checked(tmp_path / "new")
    assert not TableLog(open_store(str(tmp_path / "new"))).exists()
    job = Job(tmp_path / "running")
    job.commit(1)
    change(tmp_path / "running")
    with pytest.raises(TableError, match=text):
        job.commit(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda url: set_features(
            url, "appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed"
        ),
        lambda url: set_features(url, "deletionVectors", "v2Checkpoint", "timestampNtz", "columnMapping", readers=True),
        lambda url: set_version(url, 2, 5),
        lambda url: set_properties(url, delta__appendOnly="true", delta__columnMapping__mode="none"),
        lambda url: set_field_metadata(url, "k", {"comment": "a name"}),
    ],
)
def test_features_that_nothing_uses_are_written(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Also such as appear while the job runs."""
    job = Job(tmp_path)
    job.commit(1)
    change(tmp_path)
    job.commit(2)
    assert active(tmp_path) == ["1.parquet", "2.parquet"]


def test_features_of_a_field_in_a_struct_are_found(tmp_path: Path) -> None:
    """The path of the field is named."""
    point = pa.struct([("x", pa.int64())])
    schema = pa.schema([("points", pa.list_(point))])
    write_deltalake(str(tmp_path), schema.empty_table())
    table = newest(tmp_path, "metaData")
    found = json.loads(table["schemaString"])
    found["fields"][0]["type"]["elementType"]["fields"][0]["metadata"] = {"delta.invariants": "x > 3"}
    append_to_log(tmp_path, {"metaData": table | {"schemaString": json.dumps(found)}})
    log = TableLog(open_store(str(tmp_path)))
    with pytest.raises(TableError, match=r"invariant x > 3 of column points\.x"):
        log.check_claim(TableInfo.of(schema, "append", delta_id="tidegate-test"), A, None, "append")


def test_a_feature_that_appears_during_a_transaction_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came after the table was read, and before the transaction: Delta refuses that, and the table is read again."""
    job = Job(tmp_path)
    job.commit(1)
    write = DeltaTable.create_write_transaction
    calls: list[None] = []

    def late(table: DeltaTable, *args: object, **options: object) -> None:
        if not calls:
            set_features(tmp_path, "rowTracking", "domainMetadata")
        calls.append(None)
        write(table, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    with pytest.raises(TableError, match=r"writer feature domainMetadata .*; rowTracking .* which tidegate does not"):
        job.commit(2)
    assert len(calls) == 1
    assert DeltaTable(str(tmp_path)).version() == 2


def test_a_compaction_at_rest_is_refused_before_it_writes(tmp_path: Path) -> None:
    """The table's own log does not change either."""
    job = Job(tmp_path)
    for number in (1, 2):
        job.commit(number)
    set_features(tmp_path, "clustering", "domainMetadata")
    before = [entry.seq for entry in job.log.entries_after(-1)]
    with pytest.raises(TableError, match="writer feature clustering"):
        compact_table(str(tmp_path), open_store, 10**6)
    assert [entry.seq for entry in TableLog(open_store(str(tmp_path))).entries_after(-1)] == before


def with_deleted_rows(folder: Path) -> Job:
    """A job with files of one row; others have deleted that of the second file."""
    job = Job(folder)
    for number in (1, 2, 3):
        job.commit(number)
    set_features(folder, "deletionVectors", readers=True)
    delete_rows(folder, path_of(2), 1, [0])
    return job


def active(folder: Path) -> list[str]:
    """Names of the files that Delta has."""
    paths = pa.table(DeltaTable(str(folder)).get_add_actions(flatten=True)).column("path").to_pylist()
    return sorted(path.rpartition("/")[2] for path in paths)


def test_files_with_deletion_vectors_are_not_compacted(tmp_path: Path) -> None:
    """The rewriting would bring the deleted rows back; so Delta keeps the files, and later commits come to them."""
    job = with_deleted_rows(tmp_path)
    assert job.compaction.step()
    assert active(tmp_path) == ["1.parquet", "2.parquet", "3.parquet"]
    assert newest(tmp_path, "add")["deletionVector"]["cardinality"] == 1
    for number in (4, 5, 6):
        job.commit(number)
    assert job.compaction.step()
    assert len(active(tmp_path)) == 4
    assert vectors_of(tmp_path) == [("2.parquet", [False])]


def vectors_of(folder: Path) -> list[tuple[str, list[bool]]]:
    """Files with deleted rows, and which rows are left."""
    found = pa.table(DeltaTable(str(folder)).deletion_vectors()).to_pylist()
    return [(vector["filepath"].rpartition("/")[2], vector["selection_vector"]) for vector in found]


def test_a_vacuum_keeps_files_that_delta_still_has(tmp_path: Path) -> None:
    """To the table's own log these were replaced by a compaction, which Delta was not told of."""
    job = with_deleted_rows(tmp_path)
    assert job.compaction.step()
    deletable, _ = job.log.vacuum(Retention(10**15))
    assert deletable == {}
    append_to_log(tmp_path, {"remove": {"path": path_of(1), "dataChange": True, "deletionTimestamp": 1}})
    deletable, _ = job.log.vacuum(Retention(10**15))
    assert list(deletable) == [path_of(1)]


def test_rows_with_deletion_vectors_cannot_be_hidden(tmp_path: Path) -> None:
    """A job restored from before them is refused when it is submitted; nothing has changed then."""
    with_deleted_rows(tmp_path)
    log = TableLog(open_store(str(tmp_path)))
    entries = len(log.entries_after(-1))
    with pytest.raises(TableError, match=rf"1 files .* deleted rows of them .*{path_of(2)}.*RESTORE"):
        log.check_claim(DELTA, B, (A, CheckpointId(1)))
    assert len(log.entries_after(-1)) == entries
    log.check_claim(DELTA, B, (A, CheckpointId(2)))
    log.claim(B, (A, CheckpointId(1)))
    with pytest.raises(TableError, match="1 files"):
        log.commit(B, CheckpointId(1), ())
    assert active(tmp_path) == ["1.parquet", "2.parquet", "3.parquet"]


def test_folders_that_are_escaped_have_deletion_vectors_too(tmp_path: Path) -> None:
    """Their names are escaped once more in Delta's log."""
    job = Job(tmp_path, "a b/ü%")
    for number in (1, 2, 3):
        job.commit(number)
    set_features(tmp_path, "deletionVectors", readers=True)
    path = job.log.snapshot().files[1].path
    delete_rows(tmp_path, path, 1, [0])
    assert job.compaction.step()
    assert active(tmp_path) == ["1.parquet", "2.parquet", "3.parquet"]


def test_a_table_for_appends_only_hides_nothing(tmp_path: Path) -> None:
    """Compaction is allowed there; rows that a restored job takes back are refused when it is submitted."""
    job = Job(tmp_path)
    for number in (1, 2, 3):
        job.commit(number)
    set_properties(tmp_path, delta__appendOnly="true")
    assert job.compaction.step()
    assert len(active(tmp_path)) == 1
    job.commit(4)
    with pytest.raises(TableError, match="allows only appends"):
        TableLog(open_store(str(tmp_path))).check_claim(DELTA, B, (A, CheckpointId(3)))


def test_appends_are_marked_as_blind(tmp_path: Path) -> None:
    """A transaction that adds rows and takes none away has read nothing of the table."""
    job = Job(tmp_path)
    for number in (1, 2, 3):
        job.commit(number)
    assert newest(tmp_path, "commitInfo")["isBlindAppend"] is True
    assert job.compaction.step()
    assert newest(tmp_path, "commitInfo")["isBlindAppend"] is False
