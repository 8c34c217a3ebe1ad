"""A job that restarts passes over a damaged checkpoint, and every row is in its tables once all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from local_jobs import GatedSource, await_events, config, fails_once, local, opening

import tidegate as tg

pytestmark = pytest.mark.slow

ROWS, STOP = 40, 10


def flip(path: Path) -> None:
    """One byte of a state file is another one."""
    victim = next(p for p in sorted(path.iterdir()) if p.name != "_metadata")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))


def lose(path: Path) -> None:
    """Nobody knows any more what belongs to it."""
    (path / "_metadata").unlink()


class Hook:
    """Remembers what it was given back."""

    identifier = "hook"

    def __init__(self) -> None:
        self.restored: list[bytes | None] = []

    def trigger(self, checkpoint_id: int, timestamp_ms: int) -> bytes | None:
        """The number of the checkpoint is what is kept."""
        return str(checkpoint_id).encode()

    def restore(self, checkpoint_id: int, state: bytes | None) -> None:
        """It comes back."""
        self.restored.append(state)


def fallen_back(
    folder: Path,
    damage: Callable[[Path], None],
    count: int,
    of: int = 3,
    hooks: tuple[Hook, ...] = (),
    **settings: object,
) -> tuple[tg.Job, list[int], list[Path]]:
    """A job that fails once after `of` checkpoints, of which the newest `count` are damaged, and then ends.

    The job, what its table shows, and the folders of its checkpoints.
    """
    gates, failed = [STOP + i for i in range(of)] + [STOP + of + 5], folder / "failed"

    with opening(GatedSource(ROWS, gates=gates)) as source, local(1, rows_max=1) as env:
        stream = env.from_source(source, uid="source").map(
            fails_once(gates[-1], failed, "once"), schema=source.schema, uid="map"
        )
        stream.key_by("k").aggregate(n=tg.count(), emit="final", uid="count").collect(uid="counts")
        table = stream.to_table(str(folder / "out"), uid="out")
        job = env.execute(
            "job",
            # Whoever goes back from memory reads no file, and finds no damage.
            checkpoints=config(
                folder / "checkpoints", inline_threshold=0, rewind_memory=0, **{"num_retained": of} | settings
            ),
            restart=tg.RestartStrategy.fixed_delay(1, "1ms"),
            hooks=hooks,
        )
        paths = []
        for number, gate in enumerate(gates[:-1], start=1):
            source.await_gate(gate)
            paths.append(Path(job.trigger_checkpoint("4min")))
            await_events(job, "SinksCommitted", number)
            source.open_gate(gate)
        source.await_gate(gates[-1])
        for path in paths[of - count :]:
            damage(path)
        source.open_gate(gates[-1])
        if count < of:
            assert job.wait("4min") == "finished"
        else:
            with pytest.raises(tg.JobFailedError):
                job.wait("4min")
    return job, sorted(table.to_arrow()["x"].to_pylist()), paths


@pytest.mark.parametrize("backend", [{}, {"incremental": True}, {"backend": "rocksdb"}, {"changelog": True}], ids=str)
@pytest.mark.parametrize("damage", [lose, flip])
@pytest.mark.parametrize("count", [1, 2])
def test_every_row_is_there_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    count: int,
    backend: dict[str, object],
) -> None:
    """Whatever is damaged, and however many; the log and the statistics say what was passed over."""
    hook = Hook()
    with caplog.at_level(logging.WARNING, "tidegate"):
        job, shown, _ = fallen_back(tmp_path, damage, count, hooks=(hook,), **backend)

    assert shown == list(range(ROWS))
    statistics = job.statistics()
    assert statistics.passed_over == count
    assert statistics.latest_passed_over is not None
    assert statistics.latest_passed_over.checkpoint_id == 4 - count
    assert "chk-" in statistics.latest_passed_over.reason
    assert f"checkpoint {4 - count} is damaged" in caplog.text
    assert job.progress().restarts == 1 + count
    assert hook.restored[-1] == str(3 - count).encode()


def test_with_none_left_the_job_fails_and_nothing_starts_afresh(tmp_path: Path) -> None:
    """Neither in the job nor in the next one; the damaged ones stay where they are."""
    job, shown, (path,) = fallen_back(tmp_path, lose, 1, of=1)

    assert shown == list(range(STOP))
    assert "no checkpoint is left to restart from: checkpoint 1 is damaged" in (job.progress().reason or "")
    assert any(path.iterdir())
    with local(1) as env:
        env.from_source(GatedSource(ROWS), uid="source").to_table(str(tmp_path / "out"), if_exists="append")
        with pytest.raises(tg.ConfigurationError, match="chk-1/_metadata is gone"):
            env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore="latest")


def test_the_job_that_follows_goes_on_from_what_is_whole(tmp_path: Path) -> None:
    """Two damaged ones of two: the first run fails; mended by hand, its state goes on."""
    _, shown, (first, second) = fallen_back(tmp_path, flip, 2, of=2)
    assert shown[:STOP] == list(range(STOP))
    flip(first)

    with local(1) as env:
        stream = env.from_source(GatedSource(ROWS), uid="source").map(
            lambda row: row, schema=GatedSource.schema, uid="map"
        )
        stream.key_by("k").aggregate(n=tg.count(), emit="final", uid="count").collect(uid="counts")
        table = stream.to_table(str(tmp_path / "out"), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore="latest")
        assert job.wait("4min") == "finished"
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(ROWS))
    assert (second / "_metadata").exists()
