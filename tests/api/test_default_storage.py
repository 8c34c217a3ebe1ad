"""Local folders of machines: what a job leaves there is deleted, and what else lies there never is."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, opening

import tidegate as tg
from tidegate import recovery
from tidegate.api.submission.temporary_jobs import default_storage

ROWS, GATE = 400, 200


def counted(config: tg.CheckpointConfig, **options: Any) -> tg.Job:
    """A job with keyed state that has taken one checkpoint at least, to its end."""
    source = GatedSource(ROWS, gates=(GATE,))
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=100)) as env, opening(source):
        totals = env.from_source(source).key_by("k").aggregate(n=tg.count(), emit="final").collect()
        job = env.execute("folders", checkpoints=config, **({"restart": NO_RESTART} | options))
        source.await_gate(GATE)
        job.trigger_checkpoint()
        source.open_all()
        assert job.wait("4min") == "finished"
        assert totals.to_arrow().num_rows == 5
    return job


def test_old_folders_of_the_user_survive_beside_local_copies(tmp_path: Path) -> None:
    """A named folder may hold other things: only copies are deleted for their age."""
    photos = tmp_path / "photos" / "2001"
    photos.mkdir(parents=True)
    (photos / "a.jpg").write_bytes(b"mine")
    for path in (photos / "a.jpg", photos, photos.parent):
        os.utime(path, (1_000_000_000, 1_000_000_000))

    counted(
        tg.CheckpointConfig(storage=tmp_path / "ckpt", local_copies=True, local_directory=tmp_path, inline_threshold=0)
    )

    assert (photos / "a.jpg").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "local",
    [
        pytest.param({"local_copies": True, "local_directory": "."}, id="copies"),
        pytest.param({"backend": "rocksdb", "backend_directory": "."}, id="rocksdb"),
    ],
)
def test_checkpoints_survive_the_end_of_a_job_whose_local_folder_is_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: dict[str, Any]
) -> None:
    """One folder for both is no good idea, and no reason to delete checkpoints."""
    monkeypatch.chdir(tmp_path)
    named = {name: tmp_path if value == "." else value for name, value in local.items()}

    counted(tg.CheckpointConfig(storage=tmp_path, inline_threshold=0, **named))

    assert recovery.latest(str(tmp_path)) is not None


def test_what_killed_tasks_left_of_rocksdb_goes_with_the_next_attempt_and_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed deletes nothing; attempts would fill the disk one by one."""
    seen: list[list[str]] = []
    left = tmp_path / "tidegate-state"

    class Killed(tg.ProcessFunction):
        """Fails once, and then looks at what is there."""

        def open(self, context: tg.ProcessContext) -> None:
            self._count = context.state(tg.ValueState("count", int))
            seen.append(sorted({path.name for path in left.rglob("attempt-*")}))

        def process(self, row: Any, context: tg.ProcessContext) -> list[dict[str, Any]]:
            self._count.update(1)
            if len(seen) == 1:
                raise RuntimeError("as told")
            return [{"k": row["k"]}]

    def none_is_deleted(*arguments: Any, **options: Any) -> None:
        """What a process does that is killed."""

    monkeypatch.setattr("tidegate.state.rocksdb.database_session.weakref.finalize", none_is_deleted)
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_batches(pa.table({"k": [1, 2, 3]})).key_by("k")
        rows.process(Killed(), schema=pa.schema({"k": pa.int64()})).collect()
        job = env.execute(
            "killed",
            checkpoints=tg.CheckpointConfig(storage=tmp_path / "c", backend="rocksdb", backend_directory=tmp_path),
            restart=tg.RestartStrategy.fixed_delay(1, "1ms"),
        )
        assert job.wait("4min") == "finished"

    assert seen == [["attempt-0"], ["attempt-1"]]
    assert list(left.rglob("attempt-*")) == []


@pytest.mark.parametrize("planted", ["link", "group-writable"])
def test_rocksdb_does_not_work_where_others_may_have_planted_files(tmp_path: Path, planted: str) -> None:
    """Files that lie where a task begins are taken for its state, so the job says why it does not start."""
    folder, elsewhere = tmp_path / "tidegate-state", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if planted == "link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o770)
    config = tg.CheckpointConfig(storage=tmp_path / "c", backend="rocksdb", backend_directory=tmp_path)
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(pa.table({"k": [1]})).key_by("k").aggregate(n=tg.count()).collect()
        job = env.execute("planted", checkpoints=config, restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match=r"tidegate-state (is a link|can be written to by other users)"):
            job.wait("4min")
    assert os.listdir(folder) == []


def test_checkpoints_are_not_kept_where_others_may_have_planted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that is taken when none is named lies where everybody may put something: one is refused."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    default_storage()
    (own,) = tmp_path.glob("tidegate-*")
    shutil.rmtree(own)
    own.symlink_to(tmp_path / "elsewhere")

    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(pa.table({"k": [1]})).collect()
        with pytest.raises(tg.ConfigurationError, match=f"{own} is a link"):
            env.execute("planted")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_two_runs_of_the_tests_do_not_meet(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A job for which no storage is named keeps its name from others under one root: here, from this run alone."""
    assert Path(default_storage()).is_relative_to(tmp_path_factory.getbasetemp())
