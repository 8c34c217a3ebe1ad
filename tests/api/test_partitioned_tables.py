"""Partitioned tables of local jobs: where files lie, what is refused, and that a restore changes nothing of it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening, rows
from pyarrow.dataset import dataset

import tidegate as tg

FLIGHTS = pa.table({"carrier": ["AA", None, "B/6", "AA", ""], "day": [1, 1, 2, 2, 1], "delay": [5, 3, 7, 1, 0]})


def folders(table: Path) -> set[str]:
    """The folders of partitions that have files."""
    return {"/".join(path.parent.relative_to(table / "data").parts[2:]) for path in table.glob("data/**/*.parquet")}


def test_rows_lie_in_folders_of_their_values(tmp_path: Path) -> None:
    """As Hive names them; every row comes back, with the types of the table."""
    with local(parallelism=2, rows_max=2) as env:
        table = env.from_batches(FLIGHTS).to_table(tmp_path / "out", partition_by=["carrier", "day"])
        finish(env, tmp_path / "checkpoints")

    null = "carrier=__HIVE_DEFAULT_PARTITION__/day=1"
    assert folders(tmp_path / "out") == {
        "carrier=AA/day=1",
        "carrier=AA/day=2",
        null,
        "carrier=B%2F6/day=2",
        "carrier=/day=1",
    }
    assert table.to_arrow().schema == FLIGHTS.schema
    assert rows(table.to_arrow()) == rows(FLIGHTS)


def test_updates_of_an_aggregate_by_partition(tmp_path: Path) -> None:
    """One row a key, the newest, whatever files of its partition it was in."""
    with local(parallelism=2, rows_max=1) as env:
        sums = env.from_batches(FLIGHTS).key_by("day", "carrier").aggregate(total=tg.sum("delay"))
        table = sums.to_table(tmp_path / "out", mode="upsert", keys=["day", "carrier"], partition_by=["day"])
        finish(env, tmp_path / "checkpoints")

    assert folders(tmp_path / "out") == {"day=1", "day=2"}
    assert rows(table.to_arrow()) == sorted(
        [(1, "AA", 5), (1, None, 3), (2, "B/6", 7), (2, "AA", 1), (1, "", 0)], key=repr
    )


def test_wrong_partitions_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Where the stream is made, or when the job is submitted and the table is partitioned otherwise."""
    with local() as env, pytest.raises(tg.TableError, match="partition column 'x' is not among"):
        env.from_batches(FLIGHTS).to_table(tmp_path / "out", partition_by=["x"])
    for by, options in ((["day"], {}), (["carrier"], {"if_exists": "append"})):
        with local() as env:
            env.from_batches(FLIGHTS).to_table(tmp_path / "out", partition_by=by, **options)  # type: ignore[arg-type]
            if by == ["day"]:
                finish(env, tmp_path / "checkpoints")
                continue
            with pytest.raises(tg.TableError, match=r"has partition_by \('day',\), the job writes with \('carrier',\)"):
                env.execute("other", checkpoints=config(tmp_path / "checkpoints"))


def test_a_restored_job_has_every_row_once_in_its_partition(tmp_path: Path) -> None:
    """Rows behind the savepoint are written again, and those that were there go with the first commit."""
    saved = None
    for run in (1, 2):
        with opening(GatedSource(30, gates=[20])) as source, local() as env:
            stream = env.from_source(source, parallelism=1, uid="in")
            table = stream.to_table(tmp_path / "out", partition_by=["k"], uid="out")
            job = env.execute(
                "split", checkpoints=config(tmp_path / f"checkpoints{run}"), restart=NO_RESTART, restore=saved
            )
            if saved is None:
                source.await_gate(20)
                saved = job.savepoint(str(tmp_path / "saved"))
            source.open_gate(20)
            assert job.wait("4min") == "finished"
        assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(30))
    assert folders(tmp_path / "out") == {f"k={k}" for k in range(5)}


def test_other_engines_read_what_is_committed(tmp_path: Path) -> None:
    """In a program that only reads: as Arrow and Polars, and by the list of files; partitions are chosen by filters."""
    with local(parallelism=2, rows_max=2) as env:
        env.from_batches(FLIGHTS).to_table(tmp_path / "out", partition_by=["day"])
        finish(env, tmp_path / "checkpoints")
    table = tg.open_table(tmp_path / "out")
    first = [("day", "=", 1)]
    expected = [row for row in rows(FLIGHTS) if row[1] == 1]

    assert table.info.partition_by == ("day",)
    assert rows(table.to_arrow(filters=first)) == expected
    assert rows(table.to_polars(filters=first)) == expected
    assert rows(dataset(table.files(filters=first), format="parquet", partitioning=None).to_table()) == expected
    assert rows(pl.scan_parquet(table.files(), glob=False, hive_partitioning=False).collect()) == rows(FLIGHTS)
    assert table.files(as_of=table.history()[-1].number) == table.files()


def test_what_cannot_be_read_so_is_refused(tmp_path: Path) -> None:
    """A place without a table, and files of a table in which only the newest row of a key counts."""
    with pytest.raises(tg.TableError, match="there is no table at"):
        tg.open_table(tmp_path / "nothing")
    with local() as env:
        table = env.from_batches(FLIGHTS).to_table(tmp_path / "out", mode="upsert", keys=["day"])
        finish(env, tmp_path / "checkpoints")
    with pytest.raises(tg.TableError, match="read it with to_arrow"):
        table.files()
