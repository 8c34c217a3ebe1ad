"""Tables at rest that are compacted: same rows, fewer files, and jobs that go on with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening, rows
from waiting import until

import tidegate as tg
from tidegate.api.tables import output_tables
from tidegate.storage.errors import FencedError
from tidegate.storage.ids import JobId


def written(folder: Path, values: list[int]) -> tg.OutputTable:
    """A job adds files of three partitions, by two subtasks."""
    data = pa.table({"k": [value % 3 for value in values], "v": values})
    with local(parallelism=2, rows_max=2) as env:
        table = env.from_batches(data, splits=2).to_table(folder / "out", partition_by=["k"], if_exists="append")
        finish(env, folder / f"checkpoints{values[0]}")
    return table


def data_files(folder: Path) -> int:
    """All files of rows that lie there, whether they count or not."""
    return len(list(folder.glob("out/data/**/*.parquet")))


def test_readers_see_the_same_rows_in_fewer_files(tmp_path: Path) -> None:
    """Of two jobs, in three partitions; a second time there is nothing to do, and older versions stay."""
    written(tmp_path, list(range(12)))
    table = written(tmp_path, list(range(100, 112)))
    before, newest = table.to_arrow(), table.history()[-1].number

    done = table.compact()

    assert done.files_after == 6 < done.files_before
    assert len(table.log.snapshot().files) == 6
    assert rows(table.to_arrow()) == rows(before) == rows(table.to_arrow(as_of=newest))
    assert rows(table.to_arrow(filters=[("k", "=", 1)])) == [row for row in rows(before) if row[0] == 1]
    entries = len(table.log.entries())
    assert table.compact() == output_tables.TableCompaction(6, 6)
    assert len(table.log.entries()) == entries


def test_a_table_whose_job_lives_is_left_alone(tmp_path: Path) -> None:
    """Then a restored job goes on with the large files, and every row is there once."""
    with opening(GatedSource(30, gates=[10, 20])) as source, local() as env:
        table = env.from_source(source, parallelism=1, uid="in").to_table(tmp_path / "out", uid="out")
        job = env.execute("lives", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        for gate in (10, 20):
            source.await_gate(gate)
            job.savepoint(str(tmp_path / f"saved{gate}"))
            with pytest.raises(tg.ConfigurationError, match=r"is being written by job lives-.*, which is alive"):
                table.compact(file_bytes=10**9)
            source.open_gate(gate)
        assert job.wait("4min") == "finished"
    assert table.compact().files_after == 1

    with opening(GatedSource(30)) as source, local() as env:
        table = env.from_source(source, parallelism=1, uid="in").to_table(tmp_path / "out", uid="out")
        job = env.execute("lives", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore="latest")
        assert job.wait("4min") == "finished"
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(30))
    assert len(table.log.snapshot().files) == 1


def test_what_was_written_in_vain_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compaction that a job has overtaken; and by the next one, where it was killed."""
    table = written(tmp_path, list(range(12)))
    there = data_files(tmp_path)
    write = output_tables.rewritten

    def overtaken(*args: object, **options: object) -> object:
        files = write(*args, **options)  # type: ignore[arg-type]
        table.log.claim(JobId("b-1"), None, "append")
        return files

    monkeypatch.setattr(output_tables, "rewritten", overtaken)
    with pytest.raises(FencedError, match="is owned by 'b-1'"):
        table.compact()
    assert data_files(tmp_path) == there

    def killed(*args: object, **options: object) -> object:
        write(*args, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(output_tables, "delete_unreferenced", lambda *_: 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(output_tables, "rewritten", killed)
    with pytest.raises(KeyboardInterrupt):
        table.compact()
    assert data_files(tmp_path) > there
    monkeypatch.undo()
    done = table.compact()
    assert (done.files_after, data_files(tmp_path)) == (3, there + 3)


def test_rows_that_are_handed_on_are_not_written_again(tmp_path: Path) -> None:
    """They would come to the function a second time, under another id."""
    handed: list[int] = []
    with local() as env:
        env.from_batches(pa.table({"x": [1, 2]})).for_each_checkpoint(
            lambda found, _: handed.extend(found["x"].to_pylist()), uid="calls"
        )
        finish(env, tmp_path / "checkpoints")
    (folder,) = tmp_path.glob("checkpoints/*/taskowned/collect-*")
    assert sorted(handed) == [1, 2]
    with pytest.raises(tg.TableError, match="are handed to a function"):
        tg.open_table(folder).compact()


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    """Before the table is looked at."""
    with pytest.raises(tg.ConfigurationError, match="file_bytes=0 must be greater than 0"):
        written(tmp_path, [1]).compact(file_bytes=0)


def was_compacted(table: tg.OutputTable) -> bool:
    """Whether files were put together beside the job."""
    return any(entry.rewrite for entry in table.log.entries())


@pytest.mark.slow
def test_files_stay_few_while_a_job_runs(tmp_path: Path) -> None:
    """Every row is there once, also after a restore from the middle; with `auto_compact=False` every file stays."""
    gates = list(range(1, 25))
    counts = {}
    for auto_compact in (True, False):
        folder = tmp_path / str(auto_compact)
        with opening(GatedSource(26, gates=gates)) as source, local(1) as env:
            table = env.from_source(source, uid="in").to_table(folder / "out", auto_compact=auto_compact, uid="out")
            job = env.execute("many", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART)
            for gate in gates:
                source.await_gate(gate)
                job.savepoint(str(folder / f"saved{gate}"))
                if gate == gates[-1] and auto_compact:
                    until("a compaction", partial(was_compacted, table))
                source.open_gate(gate)
            assert job.wait("4min") == "finished"
        assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(26))
        counts[auto_compact] = len(table.log.snapshot().files)
    assert counts[False] == 25
    assert counts[True] < 20
    assert not was_compacted(table)

    folder = tmp_path / "True"
    with opening(GatedSource(26)) as source, local(1) as env:
        table = env.from_source(source, uid="in").to_table(folder / "out", uid="out")
        saved = str(next((folder / "saved7").iterdir()))
        job = env.execute("many", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=saved)
        assert job.wait("4min") == "finished"
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(26))


@pytest.mark.parametrize("size", ["0", "-1", "many", "1.5b"])
def test_a_target_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    """In the call that says it, which is named."""
    with local() as env, pytest.raises(tg.ConfigurationError, match="to_table 'to_table': target_file_size"):
        env.from_batches(pa.table({"x": [1]})).to_table(tmp_path / "out", target_file_size=size)
