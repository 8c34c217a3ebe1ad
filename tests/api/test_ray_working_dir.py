"""Where a program of a Ray job may write: not into the copy of its working_dir, which Ray deletes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy of a working_dir, as Ray makes it, in which this process runs."""
    folder = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def program(table: str | Path) -> tg.StreamEnvironment:
    """Two rows into a table."""
    env = tg.StreamEnvironment.local()
    env.from_batches(pa.table({"k": [1, 2]})).to_table(table)
    return env


@pytest.mark.parametrize(
    ("table", "storage", "savepoints", "said"),
    [
        ("out", "{lasting}/ck", None, "a table of the job would be written to {copy}/out"),
        ("{lasting}/out", "ck", None, "the checkpoints of the job would be written to {copy}/ck"),
        ("{lasting}/out", "file://{copy}/ck", None, "the checkpoints of the job would be written to {copy}/ck"),
        ("{lasting}/out", "{lasting}/ck", "./sp", "savepoints of the job would be written to {copy}/sp"),
    ],
)
def test_nothing_of_a_job_is_written_there(
    table: str, storage: str, savepoints: str | None, said: str, copy: Path, tmp_path: Path
) -> None:
    """The error names the folder and what to give instead, and nothing is made."""
    places = {"lasting": tmp_path / "lasting", "copy": copy}
    checkpoints = tg.CheckpointConfig(
        storage=storage.format(**places), savepoints=None if savepoints is None else savepoints.format(**places)
    )
    with program(table.format(**places)) as env, pytest.raises(tg.ConfigurationError) as refused:
        env.execute("refused", checkpoints=checkpoints)
    assert said.format(**places) in str(refused.value)
    assert "give an absolute path of a folder that all nodes share" in str(refused.value)
    assert list(copy.iterdir()) == []
    assert not (tmp_path / "lasting").exists()


def test_files_that_came_with_the_program_are_read(copy: Path, tmp_path: Path) -> None:
    """A relative path of a source is that of a file in the copy; absolute folders are written to."""
    (copy / "rows.csv").write_text("k\n1\n2\n")
    with tg.StreamEnvironment.local() as env:
        table = env.from_files("rows.csv", schema=pa.schema([("k", pa.int64())])).to_table(tmp_path / "out")
        job = env.execute("read", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "ck")))
        job.wait()
        assert sorted(table.to_arrow()["k"].to_pylist()) == [1, 2]
        with pytest.raises(tg.ConfigurationError, match=r"the savepoint would be written to .*_ray_pkg_0123/later"):
            job.savepoint("later")
