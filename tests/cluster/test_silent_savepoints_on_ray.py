"""Savepoints on Ray into a storage that is silent, while the job's own storage is healthy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import waiting
from ray_jobs import keyed_job, until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.actors.runtimes.running_job import RunningJob, SnapshotRequest
from tidegate.spark_bridge import RayDPSession
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Buffer, Store

WAIT_S = 240.0


def silent_stores(folder: Path) -> Callable[[str], Store]:
    """Stores that answer to no write below a folder `silent`, until there is a file `answers`."""
    hangs, answers = folder / "hangs", folder / "answers"

    def opened(url: str) -> Store:
        store = open_store(url)
        if "/silent" not in url:
            return store
        write, create = store.write, store.create

        def wait() -> None:
            hangs.touch()
            waiting.until("an answer", answers.exists)

        def written(path: str, chunks: Iterable[Buffer]) -> int:
            wait()
            return write(path, chunks)

        def created(path: str, data: Buffer) -> None:
            wait()
            create(path, data)

        store.write = written  # type: ignore[method-assign]
        store.create = created  # type: ignore[method-assign]
        return store

    return opened


@pytest.fixture
def job(raydp_session: RayDPSession, tmp_path: Path) -> Iterator[RunningJob]:
    """A job with periodic checkpoints, whose savepoint hangs."""
    placement = SlotPlacement.of_session(raydp_session)
    runtime = RayRuntime(placement, standbys=0, open_store=silent_stores(tmp_path))
    keyed = keyed_job(tmp_path, tmp_path / "gate", name="silent", parallelism=1)
    try:
        running = runtime.submit(keyed.submission)
        until("a checkpoint", running.progress, lambda p: p.completed_checkpoints > 0)
        yield running
    finally:
        (tmp_path / "answers").touch()
        runtime.stop()


def test_a_job_on_ray_goes_on_and_ends_while_a_savepoint_hangs(job: RunningJob, tmp_path: Path) -> None:
    """Checkpoints complete, and the end does not wait: the copy is still hanging when the job is over."""
    with ThreadPoolExecutor(1) as pool:
        wanted = SnapshotRequest(SnapshotKind.SAVEPOINT, str(tmp_path / "silent"))
        answer = pool.submit(job.request, wanted, WAIT_S)
        waiting.until("a copy that hangs", lambda: (tmp_path / "hangs").exists() or answer.done(), job.progress)
        before = job.progress().completed_checkpoints
        until("checkpoints", job.progress, lambda p: p.completed_checkpoints > before + 3)

        job.cancel()

        end = job.wait(WAIT_S)
        assert end is not None
        assert end.status == "cancelled"
        with pytest.raises(tg.CheckpointError, match=r"the job is ending: .*still being copied"):
            answer.result(WAIT_S)
        assert not (tmp_path / "answers").exists()


def test_a_savepoint_that_hangs_is_copied_by_the_next_coordinator(job: RunningJob, tmp_path: Path) -> None:
    """Whoever asked waits for it, and hears of it when its storage answers."""
    with ThreadPoolExecutor(1) as pool:
        wanted = SnapshotRequest(SnapshotKind.SAVEPOINT, str(tmp_path / "silent"))
        answer = pool.submit(job.request, wanted, WAIT_S)
        waiting.until("a copy that hangs", lambda: (tmp_path / "hangs").exists() or answer.done(), job.progress)
        (tmp_path / "hangs").unlink()
        os.kill(job.coordinator().pid, signal.SIGKILL)  # type: ignore[attr-defined]
        waiting.until("another copy", lambda: (tmp_path / "hangs").exists() or answer.done(), job.progress)
        assert not answer.done()

        (tmp_path / "answers").touch()

        path = answer.result(WAIT_S).path
        assert path is not None
        assert recovery.verify(path).ok
