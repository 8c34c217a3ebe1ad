"""A Delta table into which a job merges has the newest row of each key, whatever fails, and whoever writes at the same
time."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from delta_by_hand import append_to_log, delete_rows, newest, set_features, set_field_metadata, set_properties
from deltalake import DeltaTable, QueryBuilder, Schema, write_deltalake
from deltalake.table import TableMerger
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening
from seaweed import BUCKET, S3Server, forget_clients
from sink_commits import committed, prepared
from waiting import LIMIT_S, until

import tidegate as tg
from tidegate.connectors.delta.client import DeltaPlace
from tidegate.connectors.delta.sink import STAGED_FOLDER, DeltaUpsert
from tidegate.storage.errors import StorageError
from tidegate.testing import check_sink

SCHEMA = pa.schema([("k", pa.int64()), ("x", pa.int64())])
ROWS = pa.table({"k": [x % 5 for x in range(300)], "x": list(range(300))}, SCHEMA)
Row = dict[str, object]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The folder of a table that does not exist yet."""
    return str(tmp_path / "table")


def sink_of(
    url: str, keys: tuple[str, ...] = ("k",), schema: pa.Schema = SCHEMA, by: tuple[str, ...] = ()
) -> DeltaUpsert:
    """A sink as a submission leaves it."""
    sink = DeltaUpsert(DeltaPlace(url, schema, by, None), keys)
    sink.check()
    return sink


def rows_of(url: str) -> list[Row]:
    """The rows of the newest version."""
    found = QueryBuilder().register("t", DeltaTable(url)).execute("SELECT * FROM t")
    rows: list[Row] = pa.table(found).to_pylist()
    return rows


def by_key(url: str) -> dict[object, object]:
    """The value of each key."""
    rows = rows_of(url)
    found = {row["k"]: row["x"] for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found


def changes(rows: dict[int, int | None]) -> pa.Table:
    """Rows with keys; those without a value are deleted."""
    deleted = [x is None for x in rows.values()]
    table = pa.table({"k": list(rows), "x": list(rows.values())}, SCHEMA)
    return table.append_column("_tidegate_deleted", pa.array(deleted, pa.bool_()))


def other_writer(url: str, rows: dict[int, int]) -> None:
    """Another program appends rows."""
    write_deltalake(url, pa.table({"k": list(rows), "x": list(rows.values())}, SCHEMA), mode="append")


def test_upserts_keep_the_contract_of_sinks(url: str) -> None:
    """Rows appear with a commit, and an older commit that is repeated changes nothing."""
    batches = ROWS.to_batches(max_chunksize=100)
    check_sink(sink_of(url), batches, lambda: rows_of(url), keys=["k"])


def test_a_checkpoint_is_one_transaction_with_its_token(url: str) -> None:
    """The rows of all subtasks are in it, and the checkpoint is Delta's transaction identifier."""
    sink = sink_of(url)
    before = DeltaTable(url).version()
    committed(sink, 7, [*prepared(sink, ROWS.slice(0, 100)), *prepared(sink, ROWS.slice(100, 100))])
    assert DeltaTable(url).version() == before + 1
    assert newest(url, "txn") == {"appId": "tidegate.sink.job-1", "version": 7}
    assert by_key(url) == {0: 195, 1: 196, 2: 197, 3: 198, 4: 199}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_is_killed_can_be_repeated(url: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is lost before Delta's log has changed, or after that and before its rows that wait are deleted."""
    sink = sink_of(url)
    rows = prepared(sink, changes({1: 10, 2: 20}))
    before = DeltaTable(url).version()
    real = TableMerger.execute

    def killed(self: TableMerger) -> dict[str, Any]:
        if when == "after":
            real(self)
        raise OSError("the process is gone")

    monkeypatch.setattr(TableMerger, "execute", killed)
    with pytest.raises(StorageError, match="gone"):
        committed(sink, 1, rows)
    monkeypatch.undo()
    assert DeltaTable(url).version() == before + (when == "after")
    committed(sink, 1, rows)
    assert DeltaTable(url).version() == before + 1
    assert by_key(url) == {1: 10, 2: 20}
    assert not list(Path(url, STAGED_FOLDER).iterdir())


@pytest.mark.parametrize("later", [False, True], ids=["the same checkpoint", "a later one"])
def test_of_two_coordinators_one_commits(url: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was thought dead has found no token, sleeps, and commits after its successor."""
    sink = sink_of(url)
    rows = prepared(sink, changes({1: 10, 2: 20}))
    more = prepared(sink, changes({1: 11, 2: None}))
    before = DeltaTable(url).version()
    real, main = TableMerger.execute, threading.current_thread()
    others: list[int] = []

    def slow(self: TableMerger) -> dict[str, Any]:
        if threading.current_thread() is main and not others:
            others.append(1)
            successor = threading.Thread(target=succeed)
            successor.start()
            successor.join(LIMIT_S)
            assert not successor.is_alive()
        return real(self)

    def succeed() -> None:
        committed(sink, 1, rows)
        if later:
            committed(sink, 2, more)

    monkeypatch.setattr(TableMerger, "execute", slow)
    committed(sink, 1, rows)
    assert others
    assert DeltaTable(url).version() == before + 1 + later
    assert by_key(url) == ({1: 11} if later else {1: 10, 2: 20})


def test_a_commit_of_another_program_in_between_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge is made again on the newer version, so that it finds the keys that the other one has added."""
    sink = sink_of(url)
    rows = prepared(sink, changes({1: 10, 2: 20}))
    real = TableMerger.execute
    others: list[int] = []

    def slow(self: TableMerger) -> dict[str, Any]:
        if not others:
            others.append(1)
            other_writer(url, {2: -2, 77: -7})
        return real(self)

    monkeypatch.setattr(TableMerger, "execute", slow)
    committed(sink, 1, rows)
    assert by_key(url) == {1: 10, 2: 20, 77: -7}


def test_a_checkpoint_without_effect_has_its_token(url: str) -> None:
    """It deletes a key that is not there. Repeated later, it must not delete the row that another program added."""
    sink = sink_of(url)
    rows = prepared(sink, changes({5: None}))
    committed(sink, 1, rows)
    assert newest(url, "txn") == {"appId": "tidegate.sink.job-1", "version": 1}
    other_writer(url, {5: 50})
    committed(sink, 1, rows)
    assert by_key(url) == {5: 50}


def test_an_upsert_replaces_and_deletes(url: str) -> None:
    """Files without one of the keys stay, and files of rows that wait are gone afterwards."""
    sink = sink_of(url)
    committed(sink, 1, prepared(sink, changes({1: 10, 2: 20})))
    before = set(DeltaTable(url).file_uris())
    other_writer(url, {100: 0, 101: 0})
    kept = set(DeltaTable(url).file_uris()) - before
    committed(sink, 2, prepared(sink, changes({3: 30, 2: None, 1: 11})))
    assert by_key(url) == {1: 11, 3: 30, 100: 0, 101: 0}
    assert kept < set(DeltaTable(url).file_uris())
    assert not list(Path(url, STAGED_FOLDER).iterdir())


def test_rows_of_failed_attempts_are_deleted_at_the_end(url: str) -> None:
    """Those of another job stay."""
    sink = sink_of(url)
    prepared(sink, ROWS)
    theirs = prepared(sink, changes({1: 10}), job="job-2")
    cloudpickle.loads(cloudpickle.dumps(sink)).abort("job-1")
    committed(sink, 1, theirs, job="job-2")
    assert by_key(url) == {1: 10}
    assert not list(Path(url, STAGED_FOLDER).iterdir())


@pytest.mark.parametrize("day", [-719_163, 2_932_897, 2**30])
def test_a_key_that_is_no_date_of_python_is_refused(url: str, day: int) -> None:
    """Before the checkpoint: a commit could not compare it."""
    schema = pa.schema([("k", pa.date32()), ("x", pa.int64())])
    with pytest.raises(tg.ConfigurationError, match="'k' has a date outside of the years 1 to 9999"):
        prepared(sink_of(url, schema=schema), pa.table({"k": pa.array([1, day], pa.date32()), "x": [1, 2]}))


_VALUES: dict[str, tuple[pa.DataType, Callable[[Random], object]]] = {
    "i": (pa.int64(), lambda random: random.choice([random.randrange(-4, 4), 2**62, -(2**62), 2**53 + 1])),
    "s": (pa.string(), lambda random: random.choice(["a", "é", "it's", "%41", "a/b=c", "x" * random.randrange(64)])),
    "d": (pa.date32(), lambda random: dt.date(2000, 1, 1) + dt.timedelta(random.randrange(-40_000, 40_000, 20_000))),
    "b": (pa.bool_(), lambda random: random.random() < 0.5),
    "y": (pa.binary(), lambda random: random.choice([b"", b"\xff" * random.randrange(99), b"a"])),
    "n": (pa.decimal128(20, 3), lambda random: decimal.Decimal(random.randrange(-3, 3)).scaleb(-3) + 10**15),
    "t": (
        pa.timestamp("us", "UTC"),
        lambda random: dt.datetime(2020, 1, 1, 0, 0, 0, random.randrange(0, 3_000, 501), tzinfo=dt.UTC),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7))
def test_keys_of_every_type_are_found_again(url: str, seed: int) -> None:
    """Random changes, in tables with and without partitions, beside a dictionary that does the same."""
    random = Random(seed)
    first = sorted(_VALUES)[seed]
    keys = [first, *random.sample(sorted(set(_VALUES) - {first}), seed % 2)]
    by = tuple(key for key in keys if key not in ("y", "n", "t"))[: seed % 3]
    schema = pa.schema([*((key, _VALUES[key][0]) for key in keys), ('x"`', pa.int64())])
    sink = sink_of(url, tuple(keys), schema, by)
    model: dict[tuple[object, ...], int] = {}
    for checkpoint in range(1, 5):
        new: dict[tuple[object, ...], tuple[int, bool]] = {}
        for _ in range(12):
            new[tuple(_VALUES[key][1](random) for key in keys)] = random.randrange(100), random.random() < 0.3
        new = {key: value for key, value in new.items() if not (by and "" in key)}
        columns: dict[str, Any] = {name: [key[at] for key in new] for at, name in enumerate(keys)}
        rows = pa.table(columns | {'x"`': [x for x, _ in new.values()]}, schema)
        rows = rows.append_column("_tidegate_deleted", pa.array([gone for _, gone in new.values()]))
        committed(sink, checkpoint, prepared(sink, rows))
        for key, (x, gone) in new.items():
            if gone:
                model.pop(key, None)
            else:
                model[key] = x
        found = rows_of(url)
        assert {tuple(row[key] for key in keys): row['x"`'] for row in found} == model
        assert len(found) == len(model)


@pytest.mark.parametrize("stats", [None, '{"numRecords": 2}'], ids=["none", "a number of rows"])
def test_files_without_statistics_are_searched(url: str, stats: str | None) -> None:
    """A file without statistics may have any key, because a writer need not write them."""
    sink = sink_of(url)
    other_writer(url, {1: 1, 2: 2})
    add = newest(url, "add")
    remove = {"path": add["path"], "dataChange": False, "deletionTimestamp": 1, "partitionValues": {}}
    append_to_log(url, {"remove": remove})
    append_to_log(url, {"add": {**add, "stats": stats}})
    committed(sink, 1, prepared(sink, changes({1: 10, 3: 30})))
    assert by_key(url) == {1: 10, 2: 2, 3: 30}


def test_rows_that_a_deletion_vector_has_deleted_stay_deleted(url: str) -> None:
    """The merge reads the file without them, and removes the file together with its vector."""
    sink = sink_of(url)
    other_writer(url, {1: 1, 2: 2, 3: 3})
    set_features(url, "deletionVectors", readers=True)
    set_properties(url, delta__enableDeletionVectors="true")
    delete_rows(url, newest(url, "add")["path"], 3, [1])
    committed(sink, 1, prepared(sink, changes({1: 10, 4: 40})))
    assert by_key(url) == {1: 10, 3: 3, 4: 40}
    assert newest(url, "remove")["deletionVector"]["cardinality"] == 1
    committed(sink, 2, prepared(sink, changes({2: 20})))
    assert by_key(url) == {1: 10, 2: 20, 3: 3, 4: 40}


def test_the_change_data_feed_has_the_changes(url: str) -> None:
    """A table may have one: MERGE writes it."""
    write_deltalake(url, changes({1: 1, 2: 2}).drop_columns("_tidegate_deleted"))
    set_version_and_feed(url)
    sink = sink_of(url)
    committed(sink, 1, prepared(sink, changes({1: 10, 2: None, 3: 30})))
    version = DeltaTable(url).version()
    feed = pa.table(DeltaTable(url).load_cdf(starting_version=version).read_all()).to_pylist()
    kinds = sorted((row["k"], row["x"], row["_change_type"]) for row in feed)
    assert kinds == [
        (1, 1, "update_preimage"),
        (1, 10, "update_postimage"),
        (2, 2, "delete"),
        (3, 30, "insert"),
    ]


def set_version_and_feed(url: str) -> None:
    """Switch the change data feed on, as `ALTER TABLE` does."""
    append_to_log(url, {"protocol": {"minReaderVersion": 1, "minWriterVersion": 4}})
    set_properties(url, delta__enableChangeDataFeed="true")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda url: set_properties(url, delta__appendOnly="true"), "allows only appends"),
        (lambda url: set_properties(url, delta__columnMapping__mode="name"), "column mapping"),
        (lambda url: set_properties(url, delta__constraints__small="x < 9"), "CHECK constraint small"),
        (lambda url: set_features(url, "rowTracking"), "rowTracking"),
        (lambda url: set_field_metadata(url, "x", {"delta.generationExpression": "1"}), "generated column x"),
        (
            lambda url: set_properties(url, delta__setTransactionRetentionDuration="interval 7 days"),
            "forgets identifiers",
        ),
        (lambda url: _set_columns(url, pa.schema([*SCHEMA, ("z", pa.int64())])), "column 'z', which the stream lacks"),
        (lambda url: _set_columns(url, pa.schema([("k", pa.int64()), ("x", pa.string())])), "'x' as string"),
        (lambda url: _set_columns(url, pa.schema([("k", pa.int64())])), "has no column 'x'"),
        (lambda url: append_to_log(url, {"metaData": newest(url, "metaData") | {"id": "another"}}), "another one"),
    ],
)
def test_a_table_that_others_have_changed_is_refused(url: str, change: Callable[[str], None], words: str) -> None:
    """While the job runs, before anything is written; and by the next submission, unless it is another table."""
    sink = sink_of(url)
    rows = prepared(sink, changes({1: 10}))
    change(url)
    before = DeltaTable(url).version()
    with pytest.raises(tg.TableError, match=words):
        committed(sink, 1, rows)
    assert DeltaTable(url).version() == before
    if words != "another one":
        with pytest.raises(tg.TableError, match=words):
            local().from_batches(ROWS).to_delta(url, mode="upsert", keys="k")


def _set_columns(url: str, schema: pa.Schema) -> None:
    metadata = newest(url, "metaData")
    append_to_log(url, {"metaData": metadata | {"schemaString": Schema.from_arrow(schema).to_json()}})


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    """Each with what to do, before a job runs."""
    url = str(tmp_path / "table")
    stream = local().from_batches(ROWS)
    with pytest.raises(tg.ConfigurationError, match="needs keys="):
        stream.to_delta(url, mode="upsert", keys=())
    with pytest.raises(tg.ConfigurationError, match=r'keys=.* are for mode="upsert"'):
        stream.to_delta(url, keys="k")  # type: ignore[call-overload]
    with pytest.raises(tg.ConfigurationError, match='are for mode="append"'):
        stream.to_delta(url, mode="upsert", keys="k", if_exists="append")  # type: ignore[call-overload]
    floats = local().from_batches(pa.table({"k": [0.5], "x": [1]}))
    with pytest.raises(tg.ConfigurationError, match="the key 'k' is double"):
        floats.to_delta(url, mode="upsert", keys="k")
    with pytest.raises(tg.TableError, match="partition column 'y'"):
        stream.to_delta(url, mode="upsert", keys="k", partition_by="y")
    assert not Path(url).exists()
    write_deltalake(url, ROWS, partition_by=["k"])
    with pytest.raises(tg.TableError, match=r"partitioned by \['k'\], the job by \['x'\]"):
        stream.to_delta(url, mode="upsert", keys="k", partition_by="x")
    stream.to_delta(url, mode="upsert", keys="k")
    appended = str(tmp_path / "appended")
    with local() as env:
        env.from_batches(ROWS).to_delta(appended)
        finish(env, tmp_path / "checkpoints")
    with pytest.raises(tg.TableError, match="mode='append' as well"):
        stream.to_delta(appended, mode="upsert", keys="k")


def test_rows_that_the_table_cannot_hold_are_refused(tmp_path: Path) -> None:
    """A key without a value, a null in a required column, and an empty string where Delta would store a null: before
    the checkpoint, which could never be committed.
    """
    url = str(tmp_path / "required")
    required = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("x", pa.int64(), nullable=False)])
    DeltaTable.create(url, Schema.from_arrow(required))
    sink = sink_of(url)
    with pytest.raises(tg.ConfigurationError, match="key column 'k'"):
        prepared(sink, pa.table({"k": [None], "x": [1]}, SCHEMA))
    with pytest.raises(tg.TableError, match="requires a value in the column 'x'"):
        prepared(sink, pa.table({"k": [1], "x": [None]}, SCHEMA))
    committed(sink, 1, prepared(sink, changes({1: 1, 2: None})))
    assert by_key(url) == {1: 1}
    url = str(tmp_path / "texts")
    schema = pa.schema([("s", pa.string()), ("x", pa.int64())])
    sink = sink_of(url, ("s",), schema, ("s",))
    with pytest.raises(tg.TableError, match="empty string in the column 's'"):
        prepared(sink, pa.table({"s": ["", "a"], "x": [1, 2]}, schema))
    with pytest.raises(tg.TableError, match="bytes, but names of folders"):
        prepared(sink, pa.table({"s": ["a" * 300], "x": [1]}, schema))


def test_a_table_that_was_put_back_needs_its_rows(url: str) -> None:
    """The transaction is not in the table any more, and the files of its rows were deleted after the commit."""
    sink = sink_of(url)
    rows = prepared(sink, changes({1: 10}))
    committed(sink, 1, rows)
    newest_entry = max(Path(url, "_delta_log").glob("*.json"))
    newest_entry.unlink()
    with pytest.raises(tg.CorruptionError, match=r"staged rows in .* are missing, and 1 rows cannot be committed"):
        committed(sink, 1, rows)


def test_keys_that_others_have_written_twice_are_reported(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """MERGE changes all of these rows."""
    sink = sink_of(url)
    other_writer(url, {1: 1})
    other_writer(url, {1: 2})
    committed(sink, 1, prepared(sink, changes({1: 10})))
    assert rows_of(url) == [{"k": 1, "x": 10}] * 2
    assert "in several rows" in caplog.text


def test_changes_of_a_stream_delete(url: str, tmp_path: Path) -> None:
    """A running count by a running count: keys that lose all their rows leave the table."""
    with local() as env:
        events = env.from_batches(pa.table({"user": [1, 1, 1, 2, 2, 3]}), uid="events")
        counts = events.key_by("user").aggregate(n=tg.count(), emit="changes", uid="counts")
        users = counts.key_by("n").aggregate(users=tg.count(), emit="changes", uid="users")
        users.to_delta(url, mode="upsert", keys="n", partition_by="n", uid="sink")
        finish(env, tmp_path / "checkpoints")
    assert {row["n"]: row["users"] for row in rows_of(url)} == {3: 1, 2: 1, 1: 1}
    assert DeltaTable(url).metadata().partition_columns == ["n"]
    assert DeltaTable(url).metadata().configuration["delta.deletedFileRetentionDuration"] == "interval 604800 seconds"


def test_a_job_that_goes_back_gives_the_same_table(url: str, tmp_path: Path) -> None:
    """Restored from a savepoint, it writes its later rows again."""
    source = GatedSource(100, gates=(50,))

    def build(env: tg.StreamEnvironment) -> None:
        env.from_source(source, uid="rows").to_delta(url, mode="upsert", keys="k", uid="sink")

    with opening(source), local() as env:
        build(env)
        job = env.execute("a job", checkpoints=config(tmp_path / "ck"), restart=NO_RESTART)
        source.await_gate(50)
        saved = job.savepoint(str(tmp_path / "savepoint"))
        source.open_all()
        assert job.wait("4min") == "finished"
    assert by_key(url) == {0: 95, 1: 96, 2: 97, 3: 98, 4: 99}
    with local() as env:
        build(env)
        finish(env, tmp_path / "ck2", restore=saved)
    assert by_key(url) == {0: 95, 1: 96, 2: 97, 3: 98, 4: 99}


def test_an_upsert_on_s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is a conditional create over the wire: of two coordinators at the same time one commits."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(s3_server.options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(s3_server.options["secret"]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(s3_server.options["endpoint_url"]))
    forget_clients()
    url = f"s3://{BUCKET}/delta/merged"
    sink = sink_of(url)
    rows = prepared(sink, changes({1: 10, 2: 20}))
    calls = [threading.Thread(target=committed, args=(sink, 1, rows)) for _ in range(2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join(LIMIT_S)
        assert not call.is_alive()
    committed(sink, 2, prepared(sink, changes({1: None})))
    table = DeltaTable(url, storage_options={"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"})
    assert table.version() == 2
    found = QueryBuilder().register("t", table).execute("SELECT * FROM t")
    assert pa.table(found).to_pylist() == [{"k": 2, "x": 20}]


_PROGRAM = """
import sys
import tidegate as tg
env = tg.StreamEnvironment.local(2)
rows = env.from_rate(2_000, rows=4_000, splits=2, uid="rows").select("value")
rows.to_delta(sys.argv[2], mode="upsert", keys="value", uid="sink")
checkpoints = tg.CheckpointConfig(interval="100ms", storage=sys.argv[1])
env.execute("rates", checkpoints=checkpoints, restore="latest_or_fresh").wait()
"""


@pytest.mark.slow
def test_a_job_that_is_killed_writes_each_row_once(url: str, tmp_path: Path) -> None:
    """The process dies three times after a commit, and is started again from its newest checkpoint."""
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "ck"), url]
    seen = 0
    for kill in range(4):
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TIDEGATE_PROGRESS": "off"})
        try:
            if kill == 3:
                assert process.wait(LIMIT_S) == 0
                break
            until("there is another version", _newer(url, process, seen))
            seen = DeltaTable(url).version()
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait(LIMIT_S)
    assert sorted(row["value"] for row in rows_of(url)) == list(range(4_000))  # type: ignore[type-var]


def _newer(url: str, process: subprocess.Popen[bytes], seen: int) -> Callable[[], bool]:
    def found() -> bool:
        return process.poll() is not None or (DeltaTable.is_deltatable(url) and DeltaTable(url).version() > seen)

    return found
