"""A savepoint that was relocated needs nothing of its old place: it is restored after that was deleted."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from command_line import CommandRunner
from dying_store import DiedError, LostAnswers, deaths
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate import recovery
from tidegate.cli.main import app
from tidegate.connectors.staged_parquet import FileLimits, ParquetSource, write_files, write_manifest
from tidegate.storage.checkpoints.metadata import decode_metadata, encode_metadata
from tidegate.storage.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import open_store

ROWS, GATE = 40, 20
STAGED = pa.table({"k": list(range(30)), "x": list(range(1000, 1030))}, GatedSource.schema)


@dataclass(frozen=True)
class StagedRows:
    """A source that is written down when its job is submitted, as a DataFrame is."""

    schema: pa.Schema = GatedSource.schema

    def stage(self, url: str) -> ParquetSource:
        """Write the rows, in two files."""
        store = open_store(url)
        parts = (STAGED.slice(0, 10), STAGED.slice(10))
        files = [
            file
            for number, part in enumerate(parts)
            for file in write_files(store, f"data/{number}", part.to_batches(), self.schema, FileLimits())
        ]
        write_manifest(store, self.schema, tuple(files))
        return ParquetSource.open(url)

    def reopen(self, url: str) -> ParquetSource:
        """What was written."""
        return ParquetSource.open(url)

    def splits(self) -> list[tg.SourceSplit]:
        """None before it is staged."""
        raise AssertionError("not staged")

    def reader(self) -> tg.SourceReader:
        """None before it is staged."""
        raise AssertionError("not staged")


def pipeline(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tuple[tg.CollectedRows, tg.OutputTable]:
    """All rows, collected and in a table of the user's."""
    staged = env.from_source(StagedRows(), uid="staged", parallelism=1)
    rows = staged.union(env.from_source(source, uid="source", parallelism=1))
    table = rows.to_table(str(folder / "table"), uid="table", if_exists="append")
    return rows.collect(uid="collected"), table


@pytest.fixture
def savepoint(tmp_path: Path) -> str:
    """Of a job that was stopped with it: a checkpoint was taken before, and some rows were collected with each."""
    with opening(GatedSource(ROWS, gates=[10, GATE])) as source, local(2) as env:
        pipeline(env, source, tmp_path)
        job = env.execute("moved", checkpoints=config(tmp_path / "ckpt", num_retained=2, inline_threshold=0))
        source.await_gate(10)
        job.trigger_checkpoint("4min")
        source.open_gate(10)
        source.await_gate(GATE)
        return job.stop(savepoint=tmp_path / "sp", timeout="4min")


def finish_from(folder: Path, path: str, checkpoints: Path) -> tuple[list[int], list[int]]:
    """The same program restored from a savepoint, to its end: what it has collected, and what is in the table."""
    with opening(GatedSource(ROWS)) as source, local(1) as env:
        collected, table = pipeline(env, source, folder)
        job = env.execute(
            "moved", checkpoints=config(checkpoints), restart=NO_RESTART, restore=path, allow_non_restored_state=True
        )
        assert job.wait("4min") == "finished"
        return sorted(collected.to_arrow()["x"].to_pylist()), sorted(table.to_arrow()["x"].to_pylist())


ALL = [*range(ROWS), *range(1000, 1030)]


def content(path: str) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(Path(path).rglob("*")) if f.is_file()}


def test_a_relocated_savepoint_is_restored_after_its_old_place_was_deleted(tmp_path: Path, savepoint: str) -> None:
    """Staged rows, collected rows and state are in it; who restores from it leaves it as it is, and may do so again."""
    before = content(savepoint)
    path = recovery.relocate(savepoint, str(tmp_path / "elsewhere"))
    assert content(savepoint) == before
    again = recovery.relocate(path, str(tmp_path / "further"))
    shutil.rmtree(tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "sp")
    shutil.copytree(tmp_path / "table", tmp_path / "second" / "table")
    moved = content(path)

    assert finish_from(tmp_path, path, tmp_path / "later") == (ALL, ALL)
    assert content(path) == moved == content(again)
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "table")
    shutil.move(tmp_path / "second" / "table", tmp_path / "table")
    assert finish_from(tmp_path, again, tmp_path / "later still") == (ALL, ALL)
    assert recovery.verify(again).ok


def test_rows_that_nobody_had_committed_are_shown_by_who_restores(tmp_path: Path, savepoint: str) -> None:
    """The job died before it committed: files of the savepoint, and of the checkpoint before it, come with it."""
    (collected,) = (tmp_path / "ckpt").glob("*/taskowned/collect-collected")
    for table in (collected, tmp_path / "table"):
        entries = sorted((table / "_tidegate" / "log").iterdir())
        assert len(entries) == 4, "created, claimed, and two commits"
        for entry in entries[2:]:
            entry.unlink()
    metadata = Path(savepoint, "_metadata")
    metadata.write_bytes(encode_metadata(replace(decode_metadata(metadata.read_bytes()), table_heads=())))
    path = recovery.relocate(savepoint, str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "ckpt")

    assert finish_from(tmp_path, path, tmp_path / "later") == (ALL, ALL)


def test_a_savepoint_says_what_it_needs_until_it_is_relocated(tmp_path: Path, savepoint: str) -> None:
    """The folders of its job that must stay; a copy of it names its tables alone, and what it has is verified."""
    (job,) = (tmp_path / "ckpt").iterdir()
    owned = [str(job / "taskowned" / name) for name in ("collect-collected", "source-staged")]
    table = str(tmp_path / "table")
    assert sorted(recovery.inspect(savepoint).needs) == [*owned, table]

    result = CommandRunner().invoke(app, ["checkpoints", "relocate", savepoint, str(tmp_path / "elsewhere"), "--json"])

    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["needs"] == list(recovery.inspect(found["path"]).needs) == [table]
    shutil.rmtree(tmp_path / "ckpt")
    (staged, *_) = sorted(Path(found["path"]).glob("*/taskowned/source-staged/data/*"))
    staged.write_bytes(staged.read_bytes()[:-1] + b"?")
    (problem,) = recovery.verify(found["path"]).problems
    assert staged.name in problem
    assert not Path(recovery.inspect(savepoint).needs[0]).exists(), "what cannot be looked into is named itself"


@pytest.mark.slow
def test_wherever_it_dies_the_copy_is_whole_or_none(tmp_path: Path, savepoint: str) -> None:
    """At any operation on storage, before it takes effect or after: the old savepoint stays as it is, at the new place
    nothing looks whole that is not, and the same call made again ends with the same copy.
    """
    target = str(tmp_path / "elsewhere")
    before = content(savepoint)
    expected = content(recovery.relocate(savepoint, str(tmp_path / "whole")))
    made = 0
    for death in deaths():
        with contextlib.suppress(DiedError):
            recovery.relocate(savepoint, target, open_store=death.open_store)
        if recovery.list_checkpoints(target):
            path = str(Path(target, Path(savepoint).name))
            with pytest.raises(AlreadyExistsError, match="is not overwritten"):
                recovery.relocate(savepoint, target)
            assert content(path) == expected
            shutil.rmtree(target)
            made += 1
    assert made == 2, "the last create took effect, and nobody died at all"
    assert death.at > 2 * len(expected), "it reads what it writes"
    assert content(savepoint) == before
    assert content(recovery.relocate(savepoint, target)) == expected


def test_a_lost_answer_to_the_last_create_is_no_failure(tmp_path: Path, savepoint: str) -> None:
    """Storage has made the savepoint, and the error that came says nothing else."""
    path = recovery.relocate(savepoint, str(tmp_path / "elsewhere"), open_store=LostAnswers)
    assert recovery.verify(path).ok


@pytest.mark.parametrize("damaged", ["sp/*/*-0", "ckpt/*/taskowned/source-*/data/*", "ckpt/*/taskowned/*/data/*/*/*"])
def test_damage_is_not_copied(tmp_path: Path, savepoint: str, damaged: str) -> None:
    """Whatever is damaged or gone: the error names the file, and there is no savepoint at the new place."""
    file = sorted(tmp_path.glob(damaged))[0]
    data = file.read_bytes()
    file.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with pytest.raises(CorruptionError, match=file.name):
        recovery.relocate(savepoint, str(tmp_path / "elsewhere"))
    file.unlink()
    with pytest.raises(NotFoundError, match=file.name):
        recovery.relocate(savepoint, str(tmp_path / "elsewhere"))
    assert recovery.list_checkpoints(str(tmp_path / "elsewhere")) == []


def test_what_cannot_be_relocated_is_refused(tmp_path: Path, savepoint: str) -> None:
    """A checkpoint is its job's; and a savepoint is not copied onto itself."""
    (checkpoint, *_) = (tmp_path / "ckpt").glob("*/chk-*")
    with pytest.raises(tg.ConfigurationError, match=r"belongs to its job: take a savepoint"):
        recovery.relocate(str(checkpoint), str(tmp_path / "elsewhere"))
    with pytest.raises(AlreadyExistsError, match="is a savepoint already"):
        recovery.relocate(savepoint, str(tmp_path / "sp"))


def test_a_repaired_copy_of_a_relocated_savepoint_finds_what_was_staged(tmp_path: Path, savepoint: str) -> None:
    """It says that it needs the relocated one, and is restored with it."""
    path = recovery.relocate(savepoint, str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "ckpt")
    with recovery.SavepointWriter(str(tmp_path / "repaired"), base=path) as repaired:
        rows = pa.table({"k": [1], "n": [1]})
        repaired.with_keyed_state(uid="new", keys=["k"], state=tg.ValueState("n", pa.int64()), rows=rows)

    assert any(need.startswith(path) for need in recovery.inspect(repaired.path).needs)
    moved = content(path)
    assert finish_from(tmp_path, repaired.path, tmp_path / "later") == (ALL, ALL)
    assert content(path) == moved
