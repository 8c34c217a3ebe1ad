"""What checkpoints ask of storage beside their state: requests, and the files and bytes of the event log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import pytest
from local_jobs import NO_RESTART, GatedSource, config, opening

import tidegate as tg
from tidegate.actors.drivers import event_log_writer
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer

CHECKPOINTS = 12
REQUESTS_A_CHECKPOINT_MAX = 10


class _Counting(FileSystemStore):
    """Counts what is asked, by operation and by what it is about."""

    asked: ClassVar[Counter[str]] = Counter()
    _lock = threading.Lock()

    def _count(self, operation: str, path: str) -> None:
        with self._lock:
            self.asked[f"{operation} {_about(path)}"] += 1

    def create(self, path: str, data: Buffer) -> None:
        self._count("create", path)
        super().create(path, data)

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        self._count("write", path)
        return super().write(path, chunks)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._count("read", path)
        return super().read(path, offset, length)

    def exists(self, path: str) -> bool:
        self._count("exists", path)
        return super().exists(path)

    def list(self, prefix: str) -> list[str]:
        self._count("list", prefix)
        return super().list(prefix)

    def delete(self, path: str) -> None:
        self._count("delete", path)
        super().delete(path)

    def delete_all(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        for path in paths[:1]:
            self._count("delete", path)
        super().delete_all(paths)

    def delete_tree(self, prefix: str) -> None:
        self._count("delete", prefix)
        super().delete_tree(prefix)


def _about(path: str) -> str:
    if "/events" in path:
        return "log"
    if path.endswith("_metadata"):
        return "metadata"
    if path.endswith("lease"):
        return "lease"
    if path.startswith(("_tidegate", "data")):
        return "table"
    name = path.rsplit("/", 1)[-1]
    return "checkpoint" if name.startswith("chk-") else f"state {name}"


@pytest.mark.slow
def test_a_checkpoint_asks_little_beside_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six tasks, with sinks that commit: entries of the log, metadata, and the deletion of the one before."""
    # As often as in a long run, but for the last digit: the cost of cutting the log is in the sum.
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 40)
    gates = list(range(10, 10 * (CHECKPOINTS + 3), 10))
    _Counting.asked = Counter()
    with opening(GatedSource(*[gates[-1] + 10] * 3, gates=gates)) as source:
        env = tg.StreamEnvironment(LocalRuntime(_Counting), 3, options=tg.DataPlaneOptions(source_rows_max=10))
        counts = env.from_source(source, uid="source").key_by("k").aggregate(n=tg.count(), uid="counts")
        counts.to_table(str(tmp_path / "out"), mode="upsert", keys=["k"], uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints", inline_threshold=0), restart=NO_RESTART)
        for number, gate in enumerate(gates):
            source.await_gate(gate)
            if number == 2:
                _Counting.asked.clear()
            job.trigger_checkpoint()
            if number == CHECKPOINTS + 1:
                asked = Counter(_Counting.asked)
            source.open_gate(gate)
        assert job.wait("4min") == "finished"

    beside = {what: n for what, n in asked.items() if what.split()[1] in ("log", "metadata", "checkpoint")}
    assert sum(beside.values()) <= REQUESTS_A_CHECKPOINT_MAX * CHECKPOINTS, asked
