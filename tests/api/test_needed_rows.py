"""Positions of a source in checkpoints and savepoints at rest: what a deletion of its rows must respect."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate.actors.restore.positions_at_rest import PositionsAtRest
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId, OperatorUid

UID = OperatorUid("rows")


def positions(job: tg.Job, savepoints: Path | None = None, uid: OperatorUid = UID) -> PositionsAtRest:
    """Of the source of a job."""
    return PositionsAtRest(open_store, job.root, job.job_id, uid, None if savepoints is None else str(savepoints))


def execute(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tg.Job:
    """A job that takes a checkpoint when it is told to."""
    env.from_source(source, uid=UID).to_table(str(folder / "out"), uid="table")
    return env.execute("job", checkpoints=config(folder / "checkpoints", num_retained=2), restart=NO_RESTART)


def test_positions_of_checkpoints_and_savepoints_are_found(tmp_path: Path) -> None:
    """Those of all subtasks, oldest checkpoint first; savepoints of both folders; other sources have none."""
    source = GatedSource(200, 60, gates=(100,))
    other = tmp_path / "savepoints"
    with opening(source), local() as env:
        job = execute(env, source, tmp_path)
        looking = positions(job, other)
        assert looking.look().checkpoints == ()
        source.await_gate(100)
        job.trigger_checkpoint()
        job.savepoint(job.root)
        job.savepoint(str(other))
        found = looking.look()
        assert found.checkpoints[-1]["split 0"] == 100
        assert found.whole
        assert len(found.savepoints) == 2
        assert all(each["split 0"] == 100 for each in found.savepoints)
        assert len(positions(job).look().savepoints) == 1
        assert positions(job, other, OperatorUid("unknown")).look().savepoints == ()
        of_another = PositionsAtRest(open_store, job.root, JobId("another-1"), UID)
        assert (of_another.look().checkpoints, len(of_another.look().savepoints)) == ((), 1)
        source.open_gate(100)
        job.wait("4min")
        later = looking.look()
        assert later.checkpoints[-1].get("split 0") in (200, None)


@pytest.mark.parametrize("where", ["checkpoint", "savepoint"])
def test_what_cannot_be_read_may_need_everything(tmp_path: Path, where: str) -> None:
    """Until it is readable again, or gone; what was read once is not read again."""
    source = GatedSource(200, gates=(100,))
    with opening(source), local() as env:
        job = execute(env, source, tmp_path)
        source.await_gate(100)
        path = job.trigger_checkpoint() if where == "checkpoint" else job.savepoint(job.root)
        metadata = Path(path) / "_metadata"
        known, whole = positions(job), metadata.read_bytes()
        assert known.look().whole
        metadata.write_bytes(b"damaged")
        looking = positions(job)
        assert not looking.look().whole
        assert not looking.look().whole
        assert known.look().whole
        metadata.write_bytes(whole)
        assert looking.look().whole
        metadata.unlink()
        assert looking.look().whole
        metadata.write_bytes(whole)
        job.cancel()
        job.wait("4min")
