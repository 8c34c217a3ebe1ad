"""Jobs over files: bounded, and over a folder that grows; stopped, restored, and under faults, every row comes once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_jobs import NO_RESTART, config, local
from waiting import until

import tidegate as tg
from tidegate.connectors.files.patterns import FilePattern
from tidegate.connectors.files.source import FileForm, FolderSource
from tidegate.storage.files.file_system import FileInfo
from tidegate.testing import Faults, simulate

SCHEMA = pa.schema([("at", pa.int64()), ("x", pa.int64())])


def write(folder: Path, number: int, rows: int = 4) -> None:
    """A file that gets its name when it is complete."""
    folder.mkdir(exist_ok=True)
    xs = list(range(number * 100, number * 100 + rows))
    pq.write_table(pa.table({"at": xs, "x": xs}, SCHEMA), folder / f"_{number}")
    (folder / f"_{number}").rename(folder / f"{number:03d}.parquet")


def expected(files: int, rows: int = 4) -> list[int]:
    """What is in so many files."""
    return [number * 100 + row for number in range(files) for row in range(rows)]


def test_a_folder_is_followed_across_a_restore(tmp_path: Path) -> None:
    """At another parallelism: files that came before, meanwhile and later, each once; event time goes on."""
    path, written, table = None, 0, None
    for parallelism in (2, 1):
        with local(parallelism) as env:
            stream = env.from_files(
                f"{tmp_path}/in/*.parquet", schema=SCHEMA, discover="10ms", timestamp="at", idleness="10ms", uid="files"
            )
            table = stream.to_table(str(tmp_path / "out"), uid="out", if_exists="append" if path else "error")
            job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restore=path)
            for _ in range(3):
                write(tmp_path / "in", written)
                written += 1
            until("rows", lambda: len(_xs(table)) >= len(expected(written - 1)), lambda: _xs(table))  # noqa: B023
            write(tmp_path / "in", written)
            written += 1
            path = job.stop(savepoint=str(tmp_path / f"savepoint-{parallelism}"))
            assert job.wait("4min") == "suspended"
    with local(2) as env:
        stream = env.from_files(f"{tmp_path}/in/*.parquet", schema=SCHEMA, discover="10ms", uid="files")
        table = stream.to_table(str(tmp_path / "out"), uid="out", if_exists="append")
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restore=path)
        until("the rest", lambda: len(_xs(table)) >= len(expected(written)), lambda: _xs(table))
        job.cancel()
    assert _xs(table) == expected(written)


def _xs(table: tg.OutputTable) -> list[int]:
    return sorted(table.to_arrow()["x"].to_pylist())


def test_files_that_are_there_at_submission_are_read_to_their_end(tmp_path: Path) -> None:
    """What comes afterwards is not, also when the job is restored."""
    for number in range(5):
        write(tmp_path / "in", number)
    with local(2) as env:
        rows = env.from_files(tmp_path / "in" / "*.parquet", columns=["x"], uid="files").collect()
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    assert sorted(rows.to_arrow()["x"].to_pylist()) == expected(5)

    write(tmp_path / "in", 5)
    with local(3) as env:
        rows = env.from_files(tmp_path / "in" / "*.parquet", columns=["x"], uid="files").collect()
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=NO_RESTART, restore="latest")
        assert job.wait("4min") == "finished"
    assert sorted(rows.to_arrow()["x"].to_pylist()) == expected(5)


def test_a_damaged_file_ends_the_job_with_its_name(tmp_path: Path) -> None:
    """No restart helps."""
    write(tmp_path / "in", 0)
    (tmp_path / "in" / "001.parquet").write_bytes(b"PAR1")
    with local(1) as env:
        env.from_files(f"{tmp_path}/in/", discover="10ms", uid="files").collect()
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))
        with pytest.raises(tg.JobFailedError, match=r"001\.parquet cannot be read"):
            job.wait("4min")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"splits": 3}, "remove splits"),
        ({"discover": "10s", "splits": 0}, "splits= of 1 or more"),
        ({"discover": 0}, "splits= of 1 or more"),
        ({"bad_rows": "ignore"}, "one of 'fail', 'skip', 'side'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    """When the stream is made."""
    write(tmp_path / "in", 0)
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=named):
        env.from_files(f"{tmp_path}/in/*.parquet", **settings)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Growing(FilePattern):
    """A folder that has one file more whenever it is listed."""

    looks: list[int] = field(default_factory=list, compare=False)

    def files(self) -> list[FileInfo]:
        """The first of them."""
        self.looks.append(len(self.looks))
        return super().files()[: len(self.looks)]


@dataclass(frozen=True)
class EndingFolder(FolderSource):
    """A folder whose splits end when no more files come, so that a simulated job does."""

    files: int = 0

    def reader(self) -> EndingReader:
        """A reader that says when it is over."""
        return EndingReader(self)


class EndingReader:
    def __init__(self, source: EndingFolder) -> None:
        self._source = source
        self._reader = FolderSource.reader(source)

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """As the folder; the end where everything had come before, and nothing is left."""
        all_there = len(self._source.pattern.looks) > self._source.files
        result = self._reader.read(split, offset, rows_max)
        over = all_there and result.batch is None and result.payload is None
        return replace(result, at_end=over)

    def close(self) -> None:
        """Close what reads."""
        self._reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_fault_loses_or_repeats_a_file(tmp_path: Path, seed: int) -> None:
    """Tasks and coordinators crash while files come; the simulator compares with an undisturbed run."""
    for number in range(12):
        write(tmp_path / "in", number, rows=5)
    pattern = FilePattern.of(f"{tmp_path}/in/")

    def build(env: tg.StreamEnvironment) -> None:
        growing = Growing(pattern.folder, pattern.expression)
        ticks = iter(range(10**9))
        source = EndingFolder(growing, FileForm(SCHEMA), SCHEMA, 1, 10**9, 3, clock=lambda: next(ticks), files=12)
        env.from_source(source, parallelism=2).key_by("x").aggregate(n=tg.count(), emit="final").to_table("sim://out")

    report = simulate(build, seed=seed, faults=Faults(crash=0.05, coordinator_crash=0.01, storage=0.03, delay="0..1s"))
    assert report.ok, report
    assert report.crashes + report.coordinator_crashes > 0
