"""Vacuums of real tables: files go, readers and jobs go on, and who needs more gets an error."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from command_line import CommandRunner
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening, rows

import tidegate as tg
from tidegate.cli.main import app


def data_files(folder: Path) -> int:
    """All files of rows that lie there, whether they count or not."""
    return len(list(folder.glob("out/data/**/*.parquet")))


def overwritten(folder: Path) -> tg.OutputTable:
    """A table whose first rows were replaced, a moment ago."""
    for run in (1, 2):
        with local(1) as env:
            table = env.from_batches(pa.table({"x": [run] * run})).to_table(folder / "out", if_exists="overwrite")
            finish(env, folder / f"checkpoints{run}")
    return table


def test_only_what_was_hidden_for_long_goes(tmp_path: Path) -> None:
    """A dry run says what would; a second vacuum has nothing left; an earlier commit is an error."""
    table = overwritten(tmp_path)
    before = data_files(tmp_path)
    first = table.history()[0].number
    assert table.vacuum().files == 0
    would = table.vacuum(retain="0s", dry_run=True)
    assert (would.files, data_files(tmp_path)) == (1, before)
    assert rows(table.to_arrow(as_of=first)) == [(1,)]

    done = table.vacuum(retain="0s")
    assert done == would
    assert done.bytes > 0
    assert data_files(tmp_path) == before - 1
    assert rows(table.to_arrow()) == [(2,), (2,)]
    with pytest.raises(tg.TableError, match=rf"commit {first} .* were deleted by a vacuum"):
        table.to_arrow(as_of=first)
    assert table.vacuum(retain="0s").files == 0


def test_the_command_does_the_same(tmp_path: Path) -> None:
    """For people and for programs; a url without a table is wrong usage."""
    overwritten(tmp_path)
    run = CommandRunner()
    url = str(tmp_path / "out")
    dry = run.invoke(app, ["vacuum", url, "--retain", "0s", "--dry-run"])
    assert dry.exit_code == 0
    assert "1 files with" in dry.output
    assert "would be deleted" in dry.output
    found = json.loads(run.invoke(app, ["vacuum", url, "--retain", "0s", "--json"]).output)
    assert (found["files"], found["dry_run"], len(found["paths"])) == (1, False, 1)
    assert run.invoke(app, ["vacuum", str(tmp_path / "none")]).exit_code != 0


def test_a_running_job_goes_on_and_a_savepoint_from_before_is_refused(tmp_path: Path) -> None:
    """Nothing has changed then; a newer savepoint is restored."""
    with opening(GatedSource(30, gates=[10, 20])) as source, local(1) as env:
        table = env.from_source(source, uid="in").to_table(tmp_path / "out", uid="out")
        job = env.execute("lives", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        saved = {}
        for gate in (10, 20):
            source.await_gate(gate)
            saved[gate] = str(job.savepoint(str(tmp_path / f"saved{gate}")))
            assert table.vacuum(retain="0s").files == 0
            source.open_gate(gate)
        assert job.wait("4min") == "finished"
    table.compact()
    assert table.vacuum(retain="0s").files > 0
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(30))

    def restored(saved: str) -> tg.OutputTable:
        with opening(GatedSource(30)) as source, local(1) as env:
            table = env.from_source(source, uid="in").to_table(tmp_path / "out", uid="out")
            job = env.execute("lives", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore=saved)
            assert job.wait("4min") == "finished"
        return table

    with pytest.raises(tg.TableError, match="a vacuum has deleted rows of the table"):
        restored(saved[10])
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(30))
    assert sorted(restored("latest").to_arrow()["x"].to_pylist()) == list(range(30))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"retain": "soon"}, "retain: cannot read 'soon'"),
        ({"retain_commits": 0}, "retain_commits=0: give 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, object], text: str) -> None:
    """Before anything is looked at."""
    with local(1) as env:
        table = env.from_batches(pa.table({"x": [1]})).to_table(tmp_path / "out")
        finish(env, tmp_path / "checkpoints")
    with pytest.raises(tg.ConfigurationError, match=text):
        table.vacuum(**wrong)  # type: ignore[arg-type]
