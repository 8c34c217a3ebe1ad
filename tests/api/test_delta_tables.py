"""Delta Lake tables of local jobs, read as others read them: whole, after a restore, on S3; and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening, rows
from seaweed import BUCKET, S3Server, forget_clients

import tidegate as tg

FLIGHTS = pa.table({"carrier": ["AA", None, "B/6", "A A"], "day": [1, 1, 2, 2], "delay": [5, 3, 7, 1]})


def test_every_reader_of_delta_sees_the_rows(tmp_path: Path) -> None:
    """Partitions have the values of the rows, also such as are encoded in names of folders; tidegate reads it too."""
    with local(parallelism=2, rows_max=2) as env:
        table = env.from_batches(FLIGHTS).to_delta(tmp_path / "out", partition_by=["carrier", "day"])
        finish(env, tmp_path / "checkpoints")
    url = str(tmp_path / "out")
    assert rows(pl.read_delta(url)) == rows(FLIGHTS)
    assert rows(pl.scan_delta(url).filter(pl.col("carrier") == "B/6").collect()) == [("B/6", 2, 7)]
    assert rows(DeltaTable(url).to_pyarrow_table(filters=[("day", "=", 1)])) == [r for r in rows(FLIGHTS) if r[1] == 1]
    assert rows(table.to_arrow()) == rows(FLIGHTS)
    assert table.info.format == "delta"


def test_the_empty_string_in_a_partition_is_what_the_page_says(tmp_path: Path) -> None:
    """A null for Delta's own reader, a string for tidegate and Polars."""
    given = pa.table({"id": [1, 2, 3], "p": ["", "a", None]})
    with local() as env:
        table = env.from_batches(given).to_delta(tmp_path / "out", partition_by=["p"])
        finish(env, tmp_path / "checkpoints")
    url = str(tmp_path / "out")
    assert rows(table.to_arrow()) == rows(pl.read_delta(url)) == rows(given)
    assert sorted(DeltaTable(url).to_pyarrow_table()["p"].to_pylist(), key=str) == [None, None, "a"]


@pytest.mark.parametrize("column", ["größe", "order:id", "a+b", "a%41", "a[b]", "_x", "é" * 10])
def test_polars_reads_partitions_of_any_name(tmp_path: Path, column: str) -> None:
    """Polars compares the names of folders with those of columns as they stand, and decodes values alone."""
    given = pa.table({"id": [1, 2, 3], column: ["x y+z:ö", "a/b", None]})
    with local() as env:
        table = env.from_batches(given).to_delta(tmp_path / "out", partition_by=[column], uid=".größe [x]")
        finish(env, tmp_path / "checkpoints")
    url = str(tmp_path / "out")
    assert rows(pl.read_delta(url)) == rows(given)
    assert rows(DeltaTable(url).to_pyarrow_table()) == rows(given)
    assert rows(table.to_arrow(filters=[(column, "=", "a/b")])) == [(2, "a/b")]


def test_a_restored_job_takes_back_what_its_savepoint_does_not_cover(tmp_path: Path) -> None:
    """Each row is there once; what the first job wrote behind the savepoint went in the same transaction."""
    saved = None
    for run in (1, 2):
        with opening(GatedSource(30, gates=[20])) as source, local() as env:
            stream = env.from_source(source, parallelism=1, uid="in")
            stream.to_delta(tmp_path / "out", uid="out")
            job = env.execute(
                "split", checkpoints=config(tmp_path / f"checkpoints{run}"), restart=NO_RESTART, restore=saved
            )
            if saved is None:
                source.await_gate(20)
                saved = job.savepoint(str(tmp_path / "saved"))
            source.open_gate(20)
            assert job.wait("4min") == "finished"
        assert sorted(pl.read_delta(str(tmp_path / "out"))["x"]) == list(range(30))
    table = DeltaTable(str(tmp_path / "out"))
    counts = []
    for version in range(table.version() + 1):
        table.load_as_version(version)
        counts.append(table.to_pyarrow_table().num_rows)
    assert min(counts[counts.index(30) :]) >= 20


def test_on_a_real_s3_server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is a conditional create over the wire."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(s3_server.options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(s3_server.options["secret"]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(s3_server.options["endpoint_url"]))
    forget_clients()
    url = f"s3://{BUCKET}/delta/table"
    with local() as env:
        env.from_batches(FLIGHTS).to_delta(url)
        finish(env, f"s3://{BUCKET}/delta/checkpoints")
    options = {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    assert rows(DeltaTable(url, storage_options=options).to_pyarrow_table()) == rows(FLIGHTS)


def test_what_cannot_be_a_delta_table_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns and updates where the stream is made; the package where the job is submitted."""
    with local() as env:
        nanoseconds = pa.table({"at": pa.array([0], pa.timestamp("ns"))})
        with pytest.raises(tg.TableError, match=r"column 'at' is timestamp\[ns\], which Delta Lake cannot hold"):
            env.from_batches(nanoseconds).to_delta(tmp_path / "out")
        with pytest.raises(tg.ConfigurationError, match=r"to_delta .* cannot follow .*, which emits updates"):
            env.from_batches(FLIGHTS).key_by("day").aggregate(n=tg.count(), emit="update").to_delta(tmp_path / "out")
    for folder in "a%20b", "a\\b":
        with local() as env:
            # `deltalake` would write to the log of a table at "a b" or in "a/b".
            env.from_batches(FLIGHTS).to_delta(tmp_path / folder)
            with pytest.raises(tg.ConfigurationError, match="would look in another folder"):
                env.execute("elsewhere", checkpoints=config(tmp_path / "checkpoints"))
        assert not (tmp_path / folder / "_tidegate").exists()
    with local() as env:
        env.from_batches(FLIGHTS).to_delta(tmp_path / "out")
        monkeypatch.setitem(sys.modules, "deltalake", None)
        with pytest.raises(tg.ConfigurationError, match=r"pip install 'tidegate\[delta\]'"):
            env.execute("without", checkpoints=config(tmp_path / "checkpoints"))
    assert not (tmp_path / "out" / "_tidegate").exists()
