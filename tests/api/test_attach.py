"""Jobs that a driver attaches to, and jobs that are to outlive it, where there is one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg


def test_a_job_is_found_by_name_and_id_from_another_environment(tmp_path: Path) -> None:
    """It is the same job, and goes on when that environment is closed."""
    with opening(GatedSource(20, gates=[10])) as source, local(1) as env:
        env.from_source(source).to_table(str(tmp_path / "table"))
        own = env.execute("found", checkpoints=config(tmp_path, savepoints=str(tmp_path / "s")), restart=NO_RESTART)
        source.await_gate(10)
        for name in ("found", own.job_id):
            with local() as other:
                job = other.attach(name)
                assert (job.job_id, job.name, job.root, job.status()) == (own.job_id, "found", own.root, "running")
                assert Path(job.savepoint()).parent == tmp_path / "s"
        source.open_all()
        assert own.wait("4min") == "finished"
        with pytest.raises(tg.ConfigurationError, match="no job named 'found' runs in this process"):
            env.attach("found")


def test_who_looks_for_a_job_that_is_not_there_is_told_which_are(tmp_path: Path) -> None:
    """The name may have been misspelt."""
    with opening(GatedSource(20, gates=[10])) as source, local(1) as env:
        env.from_source(source).to_table(str(tmp_path / "table"))
        env.execute("carrier-delays", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.ConfigurationError, match=r"no job named 'carrier'.*running: .*carrier-delays"):
            env.attach("carrier")


def test_of_two_jobs_of_a_name_one_is_found_by_its_id(tmp_path: Path) -> None:
    """Jobs of one name may have storages of their own."""
    with opening(GatedSource(20, gates=[10])) as source, local(1) as env:
        jobs = []
        for number in range(2):
            env.from_source(source).to_table(str(tmp_path / f"table {number}"))
            jobs.append(env.execute("twin", checkpoints=config(tmp_path / str(number)), restart=NO_RESTART))
        with pytest.raises(tg.ConfigurationError, match=r"2 jobs named 'twin'.*name one by its id"):
            env.attach("twin")
        assert env.attach(jobs[1].job_id).root == jobs[1].root


def test_a_local_job_cannot_outlive_its_script(tmp_path: Path) -> None:
    """It is refused before a table is claimed; the streams are there to be executed otherwise."""
    with local(1) as env:
        table = env.from_batches(GatedSource(3).table()).to_table(str(tmp_path / "table"))
        with pytest.raises(tg.ConfigurationError, match=r"detached=True.*runs in the process of its script"):
            env.execute("local", checkpoints=config(tmp_path / "checkpoints"), detached=True)
        assert not (tmp_path / "table").exists()
        job = env.execute("local", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
        assert table.to_arrow().num_rows == 3
