"""A table whose log has lost what storage had acknowledged fails its job, and is not restored as if it were whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_jobs import GatedSource, await_events, config, local, opening

import tidegate as tg


def lose(folder: Path, count: int) -> None:
    """The newest entries of a table's log vanish."""
    log = folder / "_tidegate" / "log"
    for entry in sorted(path for path in log.iterdir() if path.name.isdigit())[-count:]:
        entry.unlink()


@pytest.mark.slow
def test_a_job_fails_whose_table_has_lost_entries(tmp_path: Path) -> None:
    """Under a running job, with restarts: what is missing is named, and nothing is committed beside it."""
    out = tmp_path / "out"
    restart = tg.RestartStrategy.fixed_delay(3, "10ms")
    with opening(GatedSource(40, gates=[10, 20, 30])) as source, local(1) as env:
        env.from_source(source, uid="rows").to_table(str(out), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=restart)
        for commits, gate in enumerate((10, 20), start=1):
            source.await_gate(gate)
            job.trigger_checkpoint("4min")
            await_events(job, "SinksCommitted", commits)
            source.open_gate(gate)
        source.await_gate(30)
        lose(out, 1)
        source.open_gate(30)
        with pytest.raises(tg.JobFailedError, match=r"has lost entries: this job knows entry \d+ of it"):
            job.wait("4min")


@pytest.mark.slow
def test_a_job_is_not_restored_beside_lost_entries(tmp_path: Path) -> None:
    """A checkpoint that knows the entries is refused. One from before they were made is restored."""
    out = tmp_path / "out"

    def start(restore: str | None) -> tg.Job:
        env.from_rate(200, uid="rate").to_table(str(out), uid="out", if_exists="append" if restore else "error")
        return env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restore=restore)

    with local(1) as env:
        job = start(None)
        await_events(job, "SinksCommitted", 3)
        before = job.savepoint(str(tmp_path / "before"))
        # All entries that are lost below are of commits behind that savepoint's own.
        commits = sum(type(event).__name__ == "SinksCommitted" for event in job.events())
        await_events(job, "SinksCommitted", commits + 8)
        after = job.stop(savepoint=str(tmp_path / "after"))
        assert job.wait("4min") == "suspended"
    lose(out, 4)
    with local(1) as env, pytest.raises(tg.TableError, match="has lost entries"):
        start(after)
    with local(1) as env:
        job = start(before)
        await_events(job, "SinksCommitted", 2)
        job.stop(savepoint=str(tmp_path / "again"))
        assert job.wait("4min") == "suspended"
    rows = sorted(tg.open_table(str(out)).to_arrow()["value"].to_pylist())
    assert rows == list(range(len(rows)))
