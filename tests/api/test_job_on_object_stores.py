"""Whole jobs over the wire: files, checkpoints, savepoints and tables on Google Cloud Storage, Azure and HDFS."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import CommandRunner
from local_jobs import config, local
from object_servers import ObjectServer
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.cli.main import app
from tidegate.storage.files.file_system_store import FileSystemStore, open_store

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
ROWS = 3_000


@pytest.fixture(params=["gcs", "azure", "hdfs"])
def server(request: pytest.FixtureRequest) -> ObjectServer:
    """Each server in turn."""
    chosen: ObjectServer = request.getfixturevalue(f"{request.param}_server")
    return chosen


def put(store: FileSystemStore, number: int) -> None:
    """A file of rows."""
    rows = [number * ROWS + row for row in range(ROWS)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"k": [row % 7 for row in rows], "v": rows}, SCHEMA), sink)
    store.write(f"in/{number}.parquet", [sink.getvalue()])


def expected(files: int) -> list[tuple[int, int, int]]:
    """Key, count and sum of all rows of n files."""
    values = range(files * ROWS)
    of_key = [[value for value in values if value % 7 == key] for key in range(7)]
    return [(key, len(each), sum(each)) for key, each in enumerate(of_key)]


def test_a_job_keeps_everything_there(server: ObjectServer) -> None:
    """It is stopped with a savepoint and restored: each row of each file is counted once, and the CLI finds all."""
    url = server.new_url()
    files = open_store(url)
    path: str | None = None
    for attempt in (1, 2):
        put(files, attempt - 1)
        with local(2, rows_max=500) as env:
            stream = env.from_files(f"{url}/in/*.parquet", schema=SCHEMA, discover="200ms", uid="files")
            totals = stream.key_by("k").aggregate(n=tg.count(), total=tg.sum("v"), emit="update", uid="totals")
            table = totals.to_table(
                f"{url}/out", mode="upsert", keys=["k"], uid="out", if_exists="append" if path else "error"
            )
            checkpoints = config(f"{url}/checkpoints", inline_threshold=100)
            job = env.execute("stored", checkpoints=checkpoints, restore=path)
            until("the rows", lambda: job.progress().rows_in.get("totals") == ROWS)  # noqa: B023
            job.trigger_checkpoint()
            path = job.stop(savepoint=f"{url}/savepoints")
            assert job.wait("4min") == "suspended"
        rows = table.to_arrow().sort_by("k")
        assert list(zip(*(rows[name].to_pylist() for name in ("k", "n", "total")), strict=True)) == expected(attempt)
    assert path is not None
    assert path.startswith(f"{url}/savepoints/savepoint-stored-")
    assert recovery.verify(path).ok
    newest = recovery.latest(f"{url}/checkpoints", job="stored")
    assert newest is not None
    assert recovery.verify(newest.path).ok
    listed = CommandRunner().invoke(app, ["checkpoints", "list", f"{url}/savepoints"])
    assert listed.exit_code == 0, listed.output
    assert path in listed.output.replace("\n", "")


def test_a_parquet_file_there_is_looked_up(server: ObjectServer) -> None:
    """By its own url and by the url of its folder."""
    url = server.new_url()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"k": [0, 1], "name": ["zero", "one"]}), sink)
    open_store(url).write("names/a.parquet", [sink.getvalue()])
    for place in (f"{url}/names", f"{url}/names/a.parquet"):
        with local() as env:
            named = env.from_batches(pa.table({"k": [1, 0, 1]})).lookup_join(place, on="k").collect()
            env.execute("names").wait("4min")
            assert named.to_arrow()["name"].to_pylist() == ["one", "zero", "one"]


def test_a_delta_table_there_is_refused(server: ObjectServer) -> None:
    """Before anything runs."""
    url = server.new_url()
    with local() as env:
        env.from_batches(pa.table({"k": [1]})).to_delta(f"{url}/delta")
        with pytest.raises(tg.ConfigurationError, match=r"Delta tables in folders and at s3:// only"):
            env.execute("delta", checkpoints=config(f"{url}/checkpoints"))
    assert list(open_store(url).walk("")) == []


def test_a_missing_place_is_told_at_submission(server: ObjectServer) -> None:
    """A bucket or container is not made by a job; a folder of HDFS is, where the user may."""
    root = server.root.replace("tidegate-tests", "no-such-place")
    with local() as env:
        env.from_batches(pa.table({"k": [1]})).collect()
        with pytest.raises(tg.StorageError, match=r"does not exist|Permission denied: user=tidegate"):
            env.execute("nowhere", checkpoints=config(f"{root}/checkpoints"))
