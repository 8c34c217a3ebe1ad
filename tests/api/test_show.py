"""`Stream.show`: the first rows of a stream, of a job that leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import config, local

import tidegate as tg
from tidegate.api.submission.temporary_jobs import default_storage
from tidegate.storage.errors import ConfigurationError, JobFailedError

ROWS = pa.table({"k": ["a", "b", "a"], "n": [1, 20, 300]})


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of jobs without storage, of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(default_storage())


def files_of(*folders: Path) -> list[str]:
    """All files below these folders."""
    return sorted(str(path) for folder in folders for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_first_rows_of_a_bounded_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program is run up to the stream, no table is written, and it can be executed afterwards."""
    with local(2) as env:
        rows = env.from_batches(ROWS, splits=1, uid="rows")
        table = rows.to_table(str(tmp_path / "t"), uid="table")
        counts = rows.key_by("k").aggregate(n=tg.count(), total=tg.sum("n"), emit="final", uid="counts")
        counts.show()
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == ["+---+---+-------+", "| k | n | total |", "+---+---+-------+"]
        assert sorted(lines[3:-1]) == ["| a | 2 |   301 |", "| b | 1 |    20 |"]
        rows.show(2)
        assert capsys.readouterr().out.splitlines()[-1] == "only the first 2 rows"
        assert files_of(tmp_path) == []
        env.execute("afterwards").wait("4min")
        assert table.to_arrow().num_rows == 3
        rows.show(9)
        assert capsys.readouterr().out.count("\n") == 7


def test_a_stream_without_an_end_is_left_once_enough_rows_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints where the configuration puts them are gone as well."""
    storage = tmp_path / "c"
    with tg.StreamEnvironment.local(1, config={"execution.checkpointing.dir": str(storage)}) as env:
        ticks = env.from_rate(1_000.0)
        ticks.show(3, timeout="4min")
        lines = capsys.readouterr().out.splitlines()
        assert (len(lines), lines[-1]) == (8, "only the first 3 rows")
        assert files_of(storage) == []
        with pytest.raises(ConfigurationError, match="no job runs there"):
            env.attach("show")


def test_sources_are_read_from_their_beginning_whatever_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A savepoint at which the configuration lets jobs start is for the program that is executed."""
    with local(1) as env:
        rows = env.from_rate(1_000.0, uid="clock").collect(uid="rows")
        job = env.execute("before", checkpoints=config(tmp_path / "c", interval="20ms"))
        next(rows.rows())
        savepoint = job.stop(savepoint=str(tmp_path / "savepoints"))
    with tg.StreamEnvironment.local(1, config={"execution.state-recovery.path": savepoint}) as env:
        env.from_rate(1_000.0, uid="clock").show(1, timeout="4min")
    assert capsys.readouterr().out.splitlines()[3].endswith("|     0 |")


def test_what_has_come_when_time_is_up_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a source that never ends and has too few rows."""
    with local(1) as env:
        env.from_rate(1_000.0, uid="clock").filter(lambda row: row["value"] < 0).show(5, timeout=1)
    assert capsys.readouterr().out.endswith("(uid 'clock'), which never ends\n")


def test_a_function_that_fails_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    """Also where the environment restarts jobs."""
    with local(1) as env:
        rows = env.from_batches(ROWS).map(lambda row: {"x": int(row["k"])}, schema={"x": int}, traced=False)
        with pytest.raises(JobFailedError, match=r"^show: .*invalid literal for int"):
            rows.show()
        with pytest.raises(ConfigurationError, match="show: the number of rows"):
            rows.show(-1)
        assert files_of(tmp_path) == []


@pytest.mark.parametrize("call", ["execute", "show", "plan", "attach", "serve_web", "with"])
def test_a_closed_environment_starts_nothing(tmp_path: Path, call: str) -> None:
    """One error for all that would run a job; rows that were collected can still be read, and close comes twice."""
    with local(1) as env:
        collected = env.from_batches(ROWS).collect()
        env.execute("before").wait("4min")
        rows = env.from_batches(ROWS)
        table = rows.to_table(str(tmp_path / "t"))
    env.close()
    before = files_of(tmp_path)
    calls = {
        "execute": env.execute,
        "show": rows.show,
        "plan": env.plan,
        "attach": lambda: env.attach("before"),
        "serve_web": lambda: env.serve_web(port=0),
        "with": env.__enter__,
    }

    with pytest.raises(ConfigurationError, match=f"{call}: this environment is closed"):
        calls[call]()

    assert files_of(tmp_path) == before
    assert collected.head(2).num_rows == 2
    assert sorted(collected.to_arrow()["n"].to_pylist()) == [1, 20, 300]
    assert repr(table).startswith("OutputTable(")
