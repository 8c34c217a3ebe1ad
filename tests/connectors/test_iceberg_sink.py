"""An Iceberg table that a job writes has each row of its completed checkpoints once, whatever fails, and whoever writes
at the same time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import finish, local
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import ListType, LongType, MapType, NestedField, StringType, StructType, TimestampType
from sink_commits import committed, prepared
from waiting import LIMIT_S, until

import tidegate as tg
from tidegate.connectors.iceberg.client import TableLayout, TablePlace
from tidegate.connectors.iceberg.options import CatalogOptions
from tidegate.connectors.iceberg.sink import STAGED_FOLDER, IcebergAppend, IcebergUpsert
from tidegate.storage.schemas.column_names import DELETED_COLUMN
from tidegate.testing import check_sink

ROWS = pa.table({"k": [x % 5 for x in range(300)], "x": list(range(300))})
NAME = "shop.orders"
Row = dict[str, object]


class Lake:
    """A catalog on SQLite, and a local warehouse."""

    def __init__(self, folder: Path) -> None:
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.folder = folder

    @property
    def catalog(self) -> Catalog:
        return load_catalog("default", **self.properties)

    @property
    def place(self) -> TablePlace:
        return TablePlace(CatalogOptions.of(self.properties, "test"), NAME)

    def create(self, schema: pa.Schema | Schema = ROWS.schema) -> Table:
        self.catalog.create_namespace_if_not_exists("shop")
        return self.catalog.create_table(NAME, schema)

    def table(self) -> Table:
        return self.catalog.load_table(NAME)

    def rows(self) -> list[Row]:
        return self.table().scan().to_arrow().to_pylist()

    def sink(self, keys: tuple[str, ...] = ()) -> tg.Sink:
        layout = TableLayout.of(self.table())
        return IcebergUpsert(self.place, layout, keys, 1 << 20) if keys else IcebergAppend(self.place, layout, 1 << 20)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty lake."""
    return Lake(tmp_path)


def keys_of(rows: list[Row]) -> dict[object, object]:
    """The value of each key."""
    found = {row["k"]: row["x"] for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found


def test_appends_keep_the_contract_of_sinks(lake: Lake) -> None:
    """Rows appear with a commit, once however often that is repeated."""
    lake.create()
    check_sink(lake.sink(), ROWS.to_batches(max_chunksize=100), lake.rows)


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
def test_a_checkpoint_is_one_snapshot_with_its_token(lake: Lake, keys: tuple[str, ...]) -> None:
    """The token is in the summary of the snapshot, and in a property that no expiry removes."""
    lake.create()
    sink = lake.sink(keys)
    committed(sink, 7, [*prepared(sink, ROWS.slice(0, 100)), *prepared(sink, ROWS.slice(100, 100))])
    (snapshot,) = lake.table().snapshots()
    assert snapshot.summary is not None
    assert snapshot.summary.additional_properties["tidegate-checkpoint"] == "7"
    assert lake.table().properties["tidegate-committed.sink.job-1"] == "7"


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
@pytest.mark.parametrize("left", ["property", "summary"])
def test_either_place_of_the_token_stops_a_repetition(lake: Lake, keys: tuple[str, ...], left: str) -> None:
    """Snapshots expire, and people remove properties: one of both places is enough."""
    lake.create()
    sink = lake.sink(keys)
    first = prepared(sink, ROWS)
    committed(sink, 3, first)
    before = sorted(map(str, lake.rows()))
    lake.table().append(pa.table({"k": [77], "x": [77]}))
    if left == "property":
        oldest = lake.table().snapshots()[0].snapshot_id
        lake.table().maintenance.expire_snapshots().by_id(oldest).commit()
        assert oldest not in {snapshot.snapshot_id for snapshot in lake.table().snapshots()}
    else:
        with lake.table().transaction() as transaction:
            transaction.remove_properties("tidegate-committed.sink.job-1")
    for checkpoint in (3, 2):  # a restore from an older checkpoint commits that one again
        committed(sink, checkpoint, first)
    assert sorted(map(str, lake.rows())) == sorted([*before, str({"k": 77, "x": 77})])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_is_killed_can_be_repeated(
    lake: Lake, keys: tuple[str, ...], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is lost before the catalog has changed, or after that and before its answer has arrived."""
    lake.create()
    sink = lake.sink(keys)
    rows = prepared(sink, ROWS)
    real = Table._do_commit

    def killed(self: Table, *args: Any, **options: Any) -> None:
        if when == "after":
            real(self, *args, **options)
        raise OSError("the process is gone")

    monkeypatch.setattr(Table, "_do_commit", killed)
    with pytest.raises(OSError, match="gone"):
        committed(sink, 1, rows)
    monkeypatch.undo()
    assert len(lake.table().snapshots()) == (when == "after")
    committed(sink, 1, rows)
    assert len(lake.table().snapshots()) == 1
    assert len(lake.rows()) == (5 if keys else 300)


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
@pytest.mark.parametrize("checkpoint", [1, 2])
def test_of_two_coordinators_one_commits(
    lake: Lake, keys: tuple[str, ...], checkpoint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was thought dead looks for the token, sleeps, and commits after its successor."""
    lake.create()
    sink = lake.sink(keys)
    rows = prepared(sink, ROWS.slice(0, 200))
    more = prepared(sink, ROWS.slice(200))
    real, main = Table._do_commit, threading.current_thread()
    others = 0

    def slow(self: Table, *args: Any, **options: Any) -> None:
        nonlocal others
        if threading.current_thread() is main and not others:
            others = 1
            successor = threading.Thread(target=succeed)
            successor.start()
            successor.join(LIMIT_S)
            assert not successor.is_alive()
        real(self, *args, **options)

    def succeed() -> None:
        committed(sink, 1, rows)
        if checkpoint == 2:
            committed(sink, 2, more)

    monkeypatch.setattr(Table, "_do_commit", slow)
    committed(sink, 1, rows)
    assert others == 1
    assert len(lake.table().snapshots()) == checkpoint
    expected = ROWS if checkpoint == 2 else ROWS.slice(0, 200)
    if keys:
        assert keys_of(lake.rows()) == dict(expected.select(["k", "x"]).to_pandas().values.tolist())
    else:
        assert sorted(row["x"] for row in lake.rows()) == expected["x"].to_pylist()  # type: ignore[type-var]


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
def test_a_commit_of_somebody_else_in_between_stays(
    lake: Lake, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of another writer are neither lost nor written over, and the checkpoint is committed once."""
    lake.create()
    sink = lake.sink(keys)
    rows = prepared(sink, ROWS)
    real = Table._do_commit
    others: list[int] = []

    def slow(self: Table, *args: Any, **options: Any) -> None:
        if not others:
            others.append(1)
            lake.table().append(pa.table({"k": [4, 77], "x": [-1, -2]}))
        real(self, *args, **options)

    monkeypatch.setattr(Table, "_do_commit", slow)
    committed(sink, 1, rows)
    found = lake.rows()
    if keys:  # the row of the other writer with a key of the checkpoint is replaced, because it was there before
        assert keys_of(found) == {0: 295, 1: 296, 2: 297, 3: 298, 4: 299, 77: -2}
    else:
        assert sorted(row["x"] for row in found) == [-2, -1, *range(300)]  # type: ignore[type-var]
    assert len(lake.table().snapshots()) == 2


def test_a_refused_commit_that_has_landed_keeps_its_manifests(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer whose repetition is refused: the snapshot is there, so its files must stay."""
    lake.create()
    sink = lake.sink()
    rows = prepared(sink, ROWS)
    real = Table._do_commit

    def refused(self: Table, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        raise CommitFailedException("the table has another snapshot")

    monkeypatch.setattr(Table, "_do_commit", refused)
    committed(sink, 1, rows)
    assert len(lake.rows()) == 300


def test_a_table_that_was_created_again_is_refused(lake: Lake) -> None:
    """Rows of a checkpoint belong to the former table."""
    lake.create()
    sink = lake.sink()
    rows = prepared(sink, ROWS)
    lake.catalog.drop_table(NAME)
    lake.create()
    with pytest.raises(tg.TableError, match="dropped and created again"):
        committed(sink, 1, rows)
    assert lake.rows() == []


def test_a_table_may_change_while_a_job_runs(lake: Lake) -> None:
    """A new column is null in rows of the job, and new partitions are for other writers."""
    lake.create()
    sink = lake.sink()
    rows = prepared(sink, ROWS.slice(0, 10))
    with lake.table().update_schema() as schema:
        schema.add_column("note", StringType())
    with lake.table().update_spec() as spec:
        spec.add_identity("k")
    committed(sink, 1, rows)
    committed(sink, 2, prepared(sink, ROWS.slice(10, 10)))
    lake.table().append(pa.table({"k": [9], "x": [99], "note": ["mine"]}))
    found = sorted(lake.rows(), key=lambda row: row["x"])  # type: ignore[arg-type, return-value]
    assert [row["x"] for row in found] == [*range(20), 99]
    assert [row["note"] for row in found] == [*[None] * 20, "mine"]
    assert len(lake.table().scan(row_filter="k == 3").to_arrow()) == 4


def test_an_upsert_does_not_write_to_another_column_of_the_same_name(lake: Lake) -> None:
    """The column of the job was renamed, and its rows would be split over two columns."""
    lake.create()
    sink = lake.sink(("k",))
    committed(sink, 1, prepared(sink, pa.table({"k": [1], "x": [10]})))
    with lake.table().update_schema() as schema:
        schema.rename_column("x", "former")
    with lake.table().update_schema() as schema:
        schema.add_column("x", LongType())
    with pytest.raises(tg.TableError, match="another column 'x' than when the job was submitted"):
        committed(sink, 2, prepared(sink, pa.table({"k": [1], "x": [11]})))
    assert lake.rows() == [{"k": 1, "former": 10, "x": None}]


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("ns"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.duration("us"),
        pa.time32("ms"),
        pa.decimal256(50, 2),
        pa.date64(),
        pa.uint64(),
        pa.null(),
    ],
    ids=str,
)
def test_a_new_table_has_every_value_of_the_stream(lake: Lake, kind: pa.DataType) -> None:
    """A type that Iceberg does not have is refused before there is a table."""
    rows = pa.table({"k": [1], "v": pa.nulls(1, kind)})
    with pytest.raises(tg.TableError, match=r"(?s)(cannot be created|column 'v').*(v|cast)"):
        local().from_batches(rows).to_iceberg(catalog=lake.properties, table=NAME, create=True)
    assert not lake.catalog.table_exists(NAME)


def test_an_upsert_replaces_and_deletes(lake: Lake) -> None:
    """Files without one of the keys stay, and files of waiting rows are gone afterwards."""
    lake.create()
    sink = lake.sink(("k",))
    committed(sink, 1, prepared(sink, pa.table({"k": [1, 2], "x": [10, 20]})))
    committed(sink, 2, prepared(sink, pa.table({"k": [100, 101], "x": [0, 0]})))
    kept = {task.file.file_path for task in lake.table().scan(row_filter="k > 50").plan_files()}
    deleted = pa.array([False, True, False])
    changes = pa.table({"k": [3, 2, 1], "x": [30, 20, 11], "_tidegate_deleted": deleted})
    committed(sink, 3, prepared(sink, changes))
    assert keys_of(lake.rows()) == {1: 11, 3: 30, 100: 0, 101: 0}
    assert kept < {task.file.file_path for task in lake.table().scan().plan_files()}
    assert not list((lake.folder / "warehouse").rglob(f"{STAGED_FOLDER}/*"))


@pytest.mark.slow
def test_rows_whose_file_is_missing_fail_their_commit_at_once(lake: Lake) -> None:
    """A commit would be tried again after an error of the storage."""
    lake.create()
    sink = lake.sink(("k",))
    rows = prepared(sink, ROWS)
    for path in Path(lake.table().location().removeprefix("file://")).rglob("*"):
        if path.is_file() and "metadata" not in path.parts:
            path.unlink()
    with pytest.raises(tg.CorruptionError, match=r"staged rows in .* are missing, and 5 rows cannot be committed"):
        committed(sink, 1, rows)
    assert lake.rows() == []


def test_many_keys_and_several_columns_are_found(lake: Lake) -> None:
    """With more keys than a condition names, and with keys of two columns."""
    schema = pa.schema([("k", pa.int64()), ("s", pa.string()), ("x", pa.int64())])
    lake.create(schema)
    sink = lake.sink(("k", "s"))
    rows = pa.table({"k": list(range(500)) * 2, "s": ["a"] * 500 + ["b"] * 500, "x": [0] * 1000})
    committed(sink, 1, prepared(sink, rows))
    again = rows.slice(0, 500).set_column(2, "x", pa.array([1] * 500))
    committed(sink, 2, prepared(sink, again))
    found = lake.table().scan().to_arrow()
    assert found.num_rows == 1000
    assert sum(found["x"].to_pylist()) == 500
    assert {row["s"] for row in found.to_pylist() if row["x"]} == {"a"}


def test_a_job_writes_and_partitions(lake: Lake, tmp_path: Path) -> None:
    """A job creates the table. A second one upserts by changes, and deletes what is retracted."""
    env = local()
    rows = env.from_batches(ROWS, splits=4, uid="rows")
    rows.to_iceberg(catalog=lake.properties, table=NAME, create=True, partition_by="bucket(3, k)", uid="sink")
    finish(env, tmp_path / "checkpoints")
    assert sorted(row["x"] for row in lake.rows()) == list(range(300))  # type: ignore[type-var]
    assert [field.name for field in lake.table().spec().fields] == ["k_bucket_3"]


@pytest.mark.slow
def test_changes_of_a_stream_delete(lake: Lake, tmp_path: Path) -> None:
    """A running count by a running count: keys that lose all their rows leave the table."""
    env = local()
    events = env.from_batches(pa.table({"user": [1, 1, 1, 2, 2, 3]}), uid="events")
    counts = events.key_by("user").aggregate(n=tg.count(), emit="changes", uid="counts")
    users = counts.key_by("n").aggregate(users=tg.count(), emit="changes", uid="users")
    users.to_iceberg(catalog=lake.properties, table=NAME, mode="upsert", keys="n", create=True, uid="sink")
    finish(env, tmp_path / "checkpoints")
    assert {row["n"]: row["users"] for row in lake.rows()} == {3: 1, 2: 1, 1: 1}


@pytest.mark.parametrize(
    ("schema", "columns", "words"),
    [
        (
            ROWS.schema.append(pa.field("z", pa.int64())),
            ROWS.slice(0, 1).append_column("w", pa.array([1])),
            "column 'w'",
        ),
        (ROWS.schema, ROWS.set_column(1, "x", pa.array(["a"] * 300)), "'x' as long"),
        (ROWS.schema, ROWS.set_column(1, "x", pa.array([1] * 300, pa.uint64())), "cast it to int64"),
        (
            Schema(
                NestedField(1, "k", LongType()),
                NestedField(2, "x", LongType()),
                NestedField(3, "r", LongType(), required=True),
            ),
            ROWS,
            "requires the column 'r'",
        ),
    ],
    ids=["unknown", "other", "unsigned", "required"],
)
def test_columns_that_do_not_fit_are_refused(
    lake: Lake, schema: pa.Schema | Schema, columns: pa.Table, words: str
) -> None:
    """Before anything runs, with the column and what to do."""
    lake.create(schema)
    with pytest.raises(tg.TableError, match=words):
        local().from_batches(columns).to_iceberg(catalog=lake.properties, table=NAME)


def test_partitions_of_floats_are_refused(lake: Lake) -> None:
    """Rows with 0.0 and -0.0 would be written twice."""
    stream = local().from_batches(pa.table({"k": [0.0, -0.0], "x": [1, 2]}))
    with pytest.raises(tg.ConfigurationError, match="'k' is a column of floats"):
        stream.to_iceberg(catalog=lake.properties, table=NAME, create=True, partition_by="k")
    assert not lake.catalog.table_exists(NAME)
    lake.create(pa.schema([("k", pa.float64()), ("x", pa.int64())]))
    sink = lake.sink(("x",))
    rows = prepared(sink, pa.table({"k": [0.0, -0.0], "x": [1, 2]}))
    with lake.table().update_spec() as spec:
        spec.add_identity("k")
    with pytest.raises(tg.TableError, match="partitioned by the column 'k' of floats"):
        stream.to_iceberg(catalog=lake.properties, table=NAME)
    with pytest.raises(tg.TableError, match="partitioned by the column 'k' of floats"):
        committed(sink, 1, rows)
    assert lake.rows() == []


def test_what_cannot_be_written_is_refused(lake: Lake) -> None:
    """A table that does not exist, a key without a value, and a null in a required column."""
    stream = local().from_batches(ROWS)
    with pytest.raises(tg.ConfigurationError, match="does not exist"):
        stream.to_iceberg(catalog=lake.properties, table=NAME)
    with pytest.raises(tg.ConfigurationError, match="namespace and name"):
        stream.to_iceberg(catalog=lake.properties, table="orders")
    with pytest.raises(tg.ConfigurationError, match=r"bucket\(16, column\)"):
        stream.to_iceberg(catalog=lake.properties, table=NAME, create=True, partition_by="week(k)")
    lake.create(Schema(NestedField(1, "k", LongType(), required=True), NestedField(2, "x", LongType())))
    with pytest.raises(tg.ConfigurationError, match="key column 'k'"):
        prepared(lake.sink(("k",)), pa.table({"k": pa.array([None], pa.int64()), "x": [1]}))
    with pytest.raises(tg.TableError, match="requires a value in the column 'k'"):
        prepared(lake.sink(), pa.table({"k": pa.array([None], pa.int64()), "x": [1]}))
    with pytest.raises(tg.TableError, match="requires a value in the column 'k'"):
        prepared(lake.sink(("x",)), pa.table({"k": pa.array([None], pa.int64()), "x": [1]}))


_PROGRAM = """
import json, sys
import tidegate as tg
folder, catalog, keys = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
env = tg.StreamEnvironment.local(2)
rows = env.from_rate(2_000, rows=4_000, splits=2, uid="rows").select("value")
mode = "upsert" if keys else "append"
rows.to_iceberg(catalog=catalog, table="shop.orders", mode=mode, keys=keys, create=True, uid="sink")
checkpoints = tg.CheckpointConfig(interval="100ms", storage=folder)
env.execute("rates", checkpoints=checkpoints, restore="latest_or_fresh").wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], ["value"]], ids=["append", "upsert"])
def test_a_job_that_is_killed_writes_each_row_once(lake: Lake, tmp_path: Path, keys: list[str]) -> None:
    """The process dies twice after a snapshot, and is started again from its newest checkpoint."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "ck"), json.dumps(lake.properties), json.dumps(keys)]
    seen = 0
    for kill in range(3):
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TIDEGATE_PROGRESS": "off"})
        try:
            if kill == 2:
                assert process.wait(LIMIT_S) == 0
                break
            until("there is another snapshot", _more_snapshots(lake, process, seen))
            seen = len(lake.table().snapshots())
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait(LIMIT_S)
    assert sorted(row["value"] for row in lake.rows()) == list(range(4_000))  # type: ignore[type-var]


def _more_snapshots(lake: Lake, process: subprocess.Popen[bytes], seen: int) -> Callable[[], bool]:
    def found() -> bool:
        if process.poll() is not None:
            return True
        return lake.catalog.table_exists(NAME) and len(lake.table().snapshots()) > seen

    return found


@pytest.mark.parametrize(
    ("there", "given"),
    [
        (pa.int64(), pa.int32()),
        (pa.timestamp("us"), pa.timestamp("s")),
        (pa.decimal128(12, 2), pa.decimal128(4, 2)),
    ],
    ids=str,
)
def test_keys_that_only_others_have_stay(lake: Lake, there: pa.DataType, given: pa.DataType) -> None:
    """A table may have keys that do not fit the narrower type of the stream."""
    large = {pa.int64(): 2**40, pa.timestamp("us"): 1_500_000}.get(there, 10**9)
    others = pa.array([large], pa.int64()).cast(there) if not pa.types.is_decimal(there) else pa.array([large], there)
    lake.create(pa.schema([("k", there), ("x", pa.int64())])).append(pa.table({"k": others, "x": [1]}))
    sink = lake.sink(("k",))
    for checkpoint, x in ((1, 2), (2, 3)):
        committed(sink, checkpoint, prepared(sink, pa.table({"k": pa.array([7], given), "x": [x]})))
    assert sorted(row["x"] for row in lake.rows()) == [1, 3]  # type: ignore[type-var]


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (ListType(3, LongType(), element_required=True), pa.array([[1, None]]), r"a value in v\.element"),
        (
            MapType(3, StringType(), 4, LongType(), value_required=True),
            pa.array([[("q", None)]], pa.map_(pa.string(), pa.int64())),
            r"a value in v\.value",
        ),
        (
            StructType(NestedField(3, "f", LongType(), required=True)),
            pa.array([{"f": None}], pa.struct([("f", pa.int64())])),
            r"a value in v\.f",
        ),
        (TimestampType(), pa.array([2**60], pa.timestamp("s")), "'v' as timestamp.* does not fit"),
    ],
    ids=["list", "map", "struct", "time"],
)
def test_values_that_do_not_fit_fail_before_the_checkpoint(
    lake: Lake, column: Any, values: pa.Array, message: str, keys: tuple[str, ...]
) -> None:
    """A list with a null where elements are required makes the table unreadable for others."""
    lake.create(Schema(NestedField(1, "k", LongType()), NestedField(2, "v", column)))
    with pytest.raises(tg.TableError, match=message):
        prepared(lake.sink(keys), pa.table({"k": [1], "v": values}))
    assert lake.rows() == []


@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
@pytest.mark.parametrize(
    ("there", "key", "message"),
    [
        (pa.timestamp("us"), pa.array([2**62], pa.timestamp("s")), "'k' as timestamp.* does not fit"),
        (pa.date32(), pa.array([2**30], pa.date32()), "outside of the years 1 to 9999"),
    ],
    ids=["time", "date"],
)
def test_keys_that_do_not_fit_fail_before_the_checkpoint(
    lake: Lake, there: pa.DataType, key: pa.Array, message: str, deleted: bool
) -> None:
    """The commit compares the keys of deleted rows too, and would fail again and again."""
    schema = pa.schema([("k", there), ("x", pa.int64())])
    lake.create(schema)
    rows = pa.table({"k": key, "x": [1], DELETED_COLUMN: [deleted]})
    with pytest.raises((tg.TableError, tg.ConfigurationError), match=message):
        prepared(lake.sink(("k",)), rows)
