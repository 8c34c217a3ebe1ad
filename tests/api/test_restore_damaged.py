"""Where every checkpoint is damaged or gone, a job starts afresh only when it is told to: its rows would come twice."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pyarrow as pa
import pytest
from local_jobs import (
    NO_RESTART,
    WAIT_S,
    GatedSource,
    WatchedStore,
    config,
    is_commit,
    local,
    nothing,
    opening,
)

import tidegate as tg
from tidegate import recovery
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import StorageError

NAME = "My Job"
ROWS, STOP = 20, 10


def begun(folder: Path, checkpoints: int = 1, **settings: object) -> list[Path]:
    """A job that is cancelled after some checkpoints; their folders."""
    gates = [STOP + i for i in range(checkpoints)]
    with opening(GatedSource(ROWS, gates=gates)) as source, local(1, rows_max=1) as env:
        env.from_source(source, uid="source").to_table(str(folder / "out"), uid="out")
        job = env.execute(NAME, checkpoints=config(folder / "checkpoints", **settings), restart=NO_RESTART)
        paths = []
        for gate in gates:
            source.await_gate(gate)
            paths.append(Path(job.trigger_checkpoint("4min")))
            source.open_gate(gate) if gate is not gates[-1] else None
        job.cancel()
        assert job.wait("4min") == "cancelled"
    return paths


def again(folder: Path, restore: str) -> list[int]:
    """The same program once more, to its end; what its table shows then."""
    with local(1) as env:
        stream = env.from_source(GatedSource(ROWS), uid="source")
        table = stream.to_table(str(folder / "out"), uid="out", if_exists="append")
        job = env.execute(NAME, checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)
        assert job.wait("4min") == "finished"
    return sorted(table.to_arrow()["x"].to_pylist())


def cut(path: Path) -> None:
    """The file loses its end."""
    path.write_bytes(path.read_bytes()[:-1])


def test_damaged_checkpoints_are_named_and_nothing_is_doubled(tmp_path: Path) -> None:
    """Each with its reason; afresh only with "latest_or_fresh", which is how the rows come twice."""
    first, second = begun(tmp_path, checkpoints=2, num_retained=2)
    cut(first / "_metadata")
    cut(second / "_metadata")

    with pytest.raises(tg.ConfigurationError) as refusal:
        again(tmp_path, "latest")

    for part in (f"{first}: ", f"{second}: ", "latest_or_fresh", "written again"):
        assert part in str(refusal.value)
    found = recovery.list_checkpoints(str(tmp_path / "checkpoints"), NAME)
    assert [(s.path, s.job_name, s.verified) for s in found] == [(str(p), NAME, False) for p in (first, second)]
    twice = sorted([*range(STOP + 1), *range(ROWS)])
    assert again(tmp_path, "latest_or_fresh") == twice


def test_damaged_state_is_damage(tmp_path: Path) -> None:
    """The metadata is whole, and a file that it refers to is not."""
    (path,) = begun(tmp_path, inline_threshold=0)
    victim = next(p for p in sorted(path.iterdir()) if p.name != "_metadata")
    cut(victim)

    with pytest.raises(tg.ConfigurationError, match=victim.name):
        again(tmp_path, "latest")


@pytest.mark.parametrize("what", ["metadata", "folder"])
def test_a_checkpoint_that_is_gone_is_not_forgotten(tmp_path: Path, what: str) -> None:
    """The event log knows of it."""
    (path,) = begun(tmp_path)
    (path / "_metadata").unlink() if what == "metadata" else rmtree(path)

    with pytest.raises(tg.ConfigurationError, match=f"{path.name}/_metadata is gone"):
        again(tmp_path, "latest")


def test_checkpoints_that_a_job_has_deleted_are_not_forgotten(tmp_path: Path) -> None:
    """Its rows are in the table all the same."""
    begun(tmp_path, retention="delete_on_cancellation")

    with pytest.raises(tg.ConfigurationError, match="has completed 1, which are deleted"):
        again(tmp_path, "latest")


def test_what_a_job_went_on_from_is_not_forgotten(tmp_path: Path) -> None:
    """Also where it has completed nothing itself: it was over when it began."""
    begun(tmp_path)
    again(tmp_path, "latest")
    newest = recovery.latest(str(tmp_path / "checkpoints"), NAME)
    assert newest is not None
    assert again(tmp_path, "latest") == list(range(ROWS))
    for folder in (tmp_path / "checkpoints").iterdir():
        if any(folder.glob("chk-*")):
            rmtree(folder)

    with pytest.raises(tg.ConfigurationError, match=f"was restored from {newest.path}, which is gone"):
        again(tmp_path, "latest")


def test_a_job_that_never_completed_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    """Nothing of it is in a table."""
    with local(1) as env:
        failing = env.from_batches(pa.table({"x": [1]})).map(
            lambda row: row["no"], schema=pa.schema([("x", pa.int64())])
        )
        failing.to_table(str(tmp_path / "failed"))
        with pytest.raises(tg.JobFailedError):
            env.execute(NAME, checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART).wait("4min")

    assert again(tmp_path, "latest") == list(range(ROWS))


def test_a_damaged_one_before_the_restored_one_does_not_matter_when_it_is_committed(tmp_path: Path) -> None:
    """Its rows are in the table, and its state is not needed."""
    first, second = begun(tmp_path, checkpoints=2, num_retained=2)
    cut(first / "_metadata")

    assert again(tmp_path, str(second)) == list(range(ROWS))


@pytest.mark.parametrize("lost", [False, True])
def test_a_damaged_one_before_the_restored_one_matters_when_its_rows_are_nowhere(tmp_path: Path, lost: bool) -> None:
    """The event log knows that they were never committed."""
    away = threading.Event()

    def hold(path: str) -> None:
        if is_commit(path):
            assert away.wait(WAIT_S)
            raise StorageError("the table's storage is away")

    with opening(GatedSource(ROWS, gates=[STOP, STOP + 1])) as source:
        runtime = LocalRuntime(lambda url: WatchedStore(url, before=hold, after=nothing))
        env = tg.StreamEnvironment(runtime, 1, options=tg.DataPlaneOptions(source_rows_max=1))
        env.from_source(source, uid="source").to_table(str(tmp_path / "out"), uid="out", if_exists="append")
        submission = env.plan(NAME, checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        running = runtime.submit(replace(submission, spec=replace(submission.spec, storage_outage_ms=1)))
        for gate in (STOP, STOP + 1):
            source.await_gate(gate)
            running.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S)
            source.open_gate(gate)
        away.set()
        progress = running.wait(WAIT_S)
        assert progress is not None
        assert progress.status == "failed"
    first = tmp_path / "checkpoints" / submission.spec.job_id / "chk-1"
    (first / "_metadata").unlink() if lost else cut(first / "_metadata")

    with pytest.raises(StorageError, match="rows that it covers may be missing in the output tables"):
        again(tmp_path, "latest")
