"""Checkpoints in the coordinator's memory: what is kept does not grow with how many there were."""

from __future__ import annotations

import pytest
from local_jobs import NO_RESTART, WAIT_S, GatedSource, local, opening
from programs import running_of
from waiting import until

import tidegate as tg
from tidegate.actors.local.local_runtime import LocalJob
from tidegate.storage.codec import encode
from tidegate.storage.files.file_system_store import FileSystemStore

pytestmark = pytest.mark.slow

KEYS = 150_000
CHECKPOINTS = 120
LOG_BYTES_MAX = 1024 * 1024
FOLD_BYTES_MAX = 64 * 1024


def kept(store: FileSystemStore, job: tg.Job) -> list[str]:
    """The checkpoints that are there."""
    return [name for name in store.list(job.job_id) if name.startswith("chk-")]


def test_a_hundred_checkpoints_in_memory_keep_the_bytes_of_one() -> None:
    """The store holds the state of the newest and a short log; the coordinator's fold has none of the state in it."""
    with opening(GatedSource(KEYS, gates=[KEYS - 1])) as source, local(1, rows_max=KEYS) as env:
        rows = env.from_source(source, uid="source").key_by("x").aggregate(n=tg.count(), uid="counts", emit="final")
        counted = rows.collect()
        job = env.execute(
            "in memory", checkpoints=tg.CheckpointConfig(checkpoint_storage="jobmanager"), restart=NO_RESTART
        )
        running = running_of(job)
        assert isinstance(running, LocalJob)
        host, store = running.coordinator, FileSystemStore(job.root)
        source.await_gate(KEYS - 1)
        for number in range(1, CHECKPOINTS + 1):
            job.trigger_checkpoint()
            if number % 20 == 0:
                until("the one before to be deleted", lambda: len(kept(store, job)) == 1)
                sizes = {file.path: file.size_bytes for file in store.walk(job.job_id)}
                log_bytes = sum(n for path, n in sizes.items() if path.startswith("events/"))
                state_bytes = job.progress().last_checkpoint_bytes
                assert state_bytes is not None
                assert state_bytes > 16 * KEYS, "keys and counts"
                assert log_bytes < LOG_BYTES_MAX
                assert sum(sizes.values()) - log_bytes < 1.1 * state_bytes
                assert len(encode(host.machine.state)) < FOLD_BYTES_MAX
                until("inlined state to be released", lambda: not host.inlined.checkpoints)

        source.open_all()
        assert job.wait(f"{WAIT_S}s") == "finished"
        assert counted.to_arrow()["n"].to_pylist() == [1] * KEYS
