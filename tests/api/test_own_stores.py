"""Storage that only the environment's own `open_store` reaches, and sources that do not answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, WAIT_S, GatedSource, config, opening
from waiting import until

import tidegate as tg
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.storage.files.file_system_store import FileSystemStore


class Elsewhere(FileSystemStore):
    """Stands for a store with credentials: what is called `nominal` in its url rests in `real`."""

    def __init__(self, url: str) -> None:
        super().__init__(url.replace("nominal", "real"))
        self._nominal_url = url

    @property
    def url(self) -> str:
        """As it was given."""
        return self._nominal_url


def test_everything_goes_through_the_environments_own_store(tmp_path: Path) -> None:
    """Running, restoring the latest, the job's checkpoints and its events: nobody looks at the plain url."""
    root = tmp_path / "nominal"

    def program(env: tg.StreamEnvironment, source: GatedSource) -> tg.OutputTable:
        return env.from_source(source, uid="source").to_table(str(root / "out"), uid="out")

    with opening(GatedSource(20, gates=[10])) as source:
        env = tg.StreamEnvironment(LocalRuntime(Elsewhere), 1, open_store=Elsewhere)
        with env:
            program(env, source)
            old = env.execute("job", checkpoints=config(root / "checkpoints"), restart=NO_RESTART)
            source.await_gate(10)
            path = old.trigger_checkpoint("4min")
            old.cancel()
            assert old.wait("4min") == "cancelled"
    assert [c.path for c in old.checkpoints()] == [path]
    assert path.startswith(str(root))

    with tg.StreamEnvironment(LocalRuntime(Elsewhere), 1, open_store=Elsewhere) as env:
        table = program(env, GatedSource(20))
        new = env.execute("job", checkpoints=config(root / "checkpoints"), restart=NO_RESTART, restore="latest")
        assert new.wait("4min") == "finished"

    submitted = next(event for event in new.events() if type(event).__name__ == "JobSubmitted")
    assert submitted.spec.restore.pointer == path
    assert len(new.checkpoints()) == 1
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(20))
    assert not root.exists()


class BlockedSource:
    """Reads that do not return before the test lets them."""

    schema = pa.schema([("x", pa.int64())])

    def __init__(self, splits: int) -> None:
        self.reading = threading.Semaphore(0)
        self.released = threading.Event()
        self.closed = threading.Semaphore(0)
        self._splits = splits

    def splits(self) -> list[tg.SourceSplit]:
        """As many as were asked for."""
        return [tg.SourceSplit(str(i), b"", 1) for i in range(self._splits)]

    def reader(self) -> BlockedSource:
        """There is nothing that readers have of their own."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Blocks."""
        self.reading.release()
        assert self.released.wait(WAIT_S)
        return tg.ReadResult(None, offset, True)

    def close(self) -> None:
        """Counted."""
        self.closed.release()


@pytest.mark.parametrize("splits", [1, 8])
def test_a_source_that_blocks_does_not_keep_a_job_from_being_cancelled(tmp_path: Path, splits: int) -> None:
    """However many reads hang: the job is over at once, and readers are closed when their reads return."""
    source = BlockedSource(splits)
    env = tg.StreamEnvironment.local(splits)
    threads = min(splits, 4)
    try:
        table = env.from_source(source).to_table(str(tmp_path / "out"))
        job = env.execute("blocked", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        for _ in range(threads):
            until("each read", lambda: source.reading.acquire(blocking=False))
        job.cancel()

        assert job.wait("4min") == "cancelled"
        env.close()
        assert not source.closed.acquire(blocking=False)
    finally:
        source.released.set()
    for _ in range(threads):
        until("each end", lambda: source.closed.acquire(blocking=False))
    assert table.to_arrow().num_rows == 0
