"""A job says that it lives, for as long as it does: nobody takes its files away meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

from local_jobs import NO_RESTART, GatedSource, config, finish, local, numbers
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.storage.filesystem import open_store
from tidegate.storage.lease import read_lease


def age(folder: Path) -> None:
    """Everything in a folder was written long ago, but for what the job renews."""
    for path in folder.rglob("*"):
        if path.name != "lease":
            os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_running_job_is_not_swept_and_a_finished_one_is(tmp_path: Path) -> None:
    """Also one that writes nothing for hours, because it takes no periodic checkpoints."""
    source, root = GatedSource(20, gates=[10]), tmp_path / "checkpoints"
    with local(parallelism=1, rows_max=5) as env:
        env.from_source(source).collect()
        job = env.execute("idle", checkpoints=config(root), restart=NO_RESTART)
        source.await_gate(10)
        left = root / job.job_id / "chk-99" / "map-0"
        left.parent.mkdir()
        left.write_bytes(b"state")
        age(root)

        refused = CliRunner().invoke(app, ["checkpoints", "sweep", str(root), "--delete"])
        assert (refused.exit_code, left.exists()) == (1, True)
        assert f"Job {job.job_id} may be running, its lease was renewed by process {os.getpid()}" in refused.output

        source.open_all()
        assert job.wait("60s") == "finished"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"state")
    age(root)
    swept = CliRunner().invoke(app, ["checkpoints", "sweep", str(root), "--delete"])
    assert (swept.exit_code, left.exists()) == (0, False)


def test_a_job_that_is_over_says_so(tmp_path: Path) -> None:
    """And its lease keeps its name."""
    with local() as env:
        env.from_batches(numbers(10)).collect()
        job = finish(env, tmp_path)

    lease = read_lease(open_store(str(tmp_path)), job.job_id)
    assert lease is not None
    assert (lease.ended, lease.job_name) == (True, "test job")
