"""A stop with savepoint whose coordinator dies: whoever asked hears what really became of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import waiting
from ray_jobs import keyed_job, until

from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.spark_bridge import RayDPSession
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Buffer, Store

WAIT_S = 240.0


def slow_answers(slow: Path, created: Path) -> Callable[[str], Store]:
    """Stores that keep the answer to a creation of `_metadata` to themselves while the file `slow` is there."""

    def opened(url: str) -> Store:
        store = open_store(url)
        create = store.create

        def slowly(path: str, data: Buffer) -> None:
            create(path, data)
            if "/chk-" in path and path.endswith("/_metadata") and slow.exists():
                created.touch()
                waiting.until("the answer", lambda: not slow.exists())

        store.create = slowly  # type: ignore[method-assign]
        return store

    return opened


@pytest.fixture
def placement(raydp_session: RayDPSession) -> SlotPlacement:
    """The slots of the session."""
    return SlotPlacement.of_session(raydp_session)


def test_a_stop_that_worked_is_answered_though_its_coordinator_died(placement: SlotPlacement, tmp_path: Path) -> None:
    """The metadata is there, and the coordinator dies before it hears so: its successor finds out, and answers."""
    slow, created = tmp_path / "slow", tmp_path / "created"
    runtime = RayRuntime(placement, standbys=0, open_store=slow_answers(slow, created))
    try:
        keyed = keyed_job(tmp_path, tmp_path / "gate", name="stopped", interval_ms=None, parallelism=1)
        job = runtime.submit(keyed.submission)
        until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0)
        coordinator = job.coordinator().pid
        slow.touch()
        with ThreadPoolExecutor(1) as pool:
            what = SnapshotRequest(SnapshotKind.SUSPEND, str(tmp_path / "savepoints"))
            answer = pool.submit(job.request, what, WAIT_S)
            waiting.until("the metadata", lambda: created.exists() or answer.done(), job.progress)
            assert not answer.done()
            os.kill(coordinator, signal.SIGKILL)
            slow.unlink()
            found = answer.result(WAIT_S)
        end = job.wait(WAIT_S)
        assert end is not None
        assert (end.status, found.checkpoint_id, found.error) == ("suspended", 1, None)
        assert found.path is not None
        assert (Path(found.path.removeprefix("file://")) / "_metadata").exists()
    finally:
        runtime.stop()
