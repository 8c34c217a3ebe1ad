"""Jobs whose savepoint goes to a storage that is silent, or refuses, while their own storage is healthy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, WAIT_S, GatedSource, config, opening
from waiting import files_below, until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.storage.checkpoints.layout import METADATA_NAME
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer

GATES = list(range(10, 100, 10))
ROWS = 100


class Storage:
    """Storage of jobs. A write below a folder named `silent` comes back when `answers` is set.

    Below a folder named `late` the create of `_metadata` does.
    """

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.hanging = 0
        self._lock = threading.Lock()

    def open(self, url: str) -> FileSystemStore:
        """A store of it."""
        return _Store(url, self)

    def has_hanging(self, count: int) -> bool:
        """Whether so many writes hang."""
        return self.hanging == count

    def wait(self, url: str, silent: str = "/silent") -> None:
        """A write begins, or a create."""
        if "/refuses" in url:
            raise StorageError("the endpoint refuses the connection")
        if silent in url:
            with self._lock:
                self.hanging += 1
            assert self.answers.wait(WAIT_S)


class _Store(FileSystemStore):
    def __init__(self, url: str, storage: Storage) -> None:
        super().__init__(url)
        self._storage = storage

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        self._storage.wait(self.url)
        return super().write(path, chunks)

    def create(self, path: str, data: Buffer) -> None:
        if path == METADATA_NAME:
            self._storage.wait(self.url, "/late/")
        super().create(path, data)


@contextmanager
def running(
    folder: Path, restore: str | None = None, **settings: object
) -> Iterator[tuple[tg.Job, tg.OutputTable, GatedSource, Storage]]:
    """A job that writes all its rows, with periodic checkpoints that retain the newest alone."""
    storage = Storage()
    with opening(GatedSource(ROWS, gates=GATES)) as source:
        env = tg.StreamEnvironment(LocalRuntime(storage.open), 1, options=tg.DataPlaneOptions(source_rows_max=10))
        rows = env.from_source(source, uid="source")
        table = rows.to_table(str(folder / "out"), uid="out")
        counts = rows.key_by("k").aggregate(n=tg.count(), emit="final", uid="counts")
        counts.to_table(str(folder / "counts"), uid="counts-out")
        checkpoints = config(folder / "checkpoints", **{"inline_threshold": 0, "interval": "10ms", **settings})
        job = env.execute("job", checkpoints=checkpoints, restart=NO_RESTART, restore=restore)
        if restore is None:
            source.await_gate(GATES[0])
        try:
            yield job, table, source, storage
        finally:
            storage.answers.set()
            job.cancel()
            job.wait(f"{WAIT_S}s")


def asked(call: Callable[[], str]) -> Future[str]:
    """A call on a thread of its own, because it comes back late."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever asks for the result gets it)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def pass_gates(source: GatedSource, table: tg.OutputTable, gates: Iterable[int]) -> None:
    """Let rows come, and wait after each gate until all of them are committed."""
    for gate in gates:
        source.open_gate(gate)
        until(f"{gate + 10} rows in the table", partial(has_rows, table, gate + 10))


def has_rows(table: tg.OutputTable, count: int) -> bool:
    """Whether so many rows are committed."""
    return table.to_arrow().num_rows >= count


@pytest.mark.slow
def test_a_job_goes_on_and_ends_while_a_savepoint_hangs(tmp_path: Path) -> None:
    """Checkpoints complete and commit. The end does not wait: the copy is still hanging when the job is over."""
    with running(tmp_path) as (job, table, source, storage):
        hanging = asked(lambda: job.savepoint(str(tmp_path / "silent"), timeout=f"{WAIT_S}s"))
        until("a copy that hangs", lambda: storage.hanging)
        before = job.progress().completed_checkpoints
        pass_gates(source, table, GATES[:4])
        assert job.progress().completed_checkpoints >= before + 4
        path = job.savepoint(str(tmp_path / "healthy"), timeout=f"{WAIT_S}s")
        assert recovery.verify(path).ok
        assert not hanging.done()

        job.cancel()

        with pytest.raises(tg.CheckpointError, match=r"the job is ending: .*still being copied to .*silent"):
            hanging.result(WAIT_S)
        assert job.wait(f"{WAIT_S}s") == "cancelled"
        assert not storage.answers.is_set()
    until("a folder that is left by its copy", lambda: not files_below(tmp_path / "silent"))


def test_a_job_is_stopped_with_a_savepoint_while_another_one_hangs(tmp_path: Path) -> None:
    """The savepoint of the stop is whole; a job that is restored from it has every row once."""
    with running(tmp_path) as (job, table, source, storage):
        hanging = asked(lambda: job.savepoint(str(tmp_path / "silent"), timeout=f"{WAIT_S}s"))
        until("a copy that hangs", lambda: storage.hanging)
        pass_gates(source, table, GATES[:2])

        path = job.stop(savepoint=str(tmp_path / "healthy"), timeout=f"{WAIT_S}s")

        assert job.status() == "suspended"
        assert not storage.answers.is_set()
        with pytest.raises(tg.CheckpointError, match="the job is ending"):
            hanging.result(WAIT_S)
    with running(tmp_path, restore=path) as (job, table, source, _):
        source.open_all()
        assert job.wait(f"{WAIT_S}s") == "finished"
        assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(ROWS))


def test_the_savepoint_of_a_stop_that_is_cancelled_does_not_become_whole_later(tmp_path: Path) -> None:
    """Its checkpoint never completed, and the files of the sinks that it covers are deleted with the job."""
    with running(tmp_path, interval=None) as (job, _, source, storage):
        source.open_gate(GATES[0])
        stopping = asked(lambda: job.stop(savepoint=str(tmp_path / "late"), timeout=f"{WAIT_S}s"))
        until("a copy that is whole but for its metadata", lambda: storage.hanging)
        job.cancel()
        assert job.wait(f"{WAIT_S}s") == "cancelled"
        with pytest.raises(tg.CheckpointError, match="the job is ending"):
            stopping.result(WAIT_S)
        storage.answers.set()
        until("a folder that is left by its copy", lambda: not files_below(tmp_path / "late"))


@pytest.mark.slow
def test_a_bounded_number_of_savepoints_hangs(tmp_path: Path) -> None:
    """One too many is refused, wherever it is to go. When storage answers all of them are whole, and there is room."""
    with running(tmp_path) as (job, table, source, storage):
        hanging = []
        for number in range(1, COPIES_MAX + 1):
            hanging.append(asked(lambda: job.savepoint(str(tmp_path / "silent"), timeout=f"{WAIT_S}s")))
            until(f"{number} copies that hang", partial(storage.has_hanging, number))
        with pytest.raises(tg.CheckpointError, match=f"{COPIES_MAX} savepoints are still being copied"):
            job.savepoint(str(tmp_path / "healthy"), timeout=f"{WAIT_S}s")
        pass_gates(source, table, GATES[:3])

        storage.answers.set()

        paths = {one.result(WAIT_S) for one in hanging}
        paths.add(job.savepoint(str(tmp_path / "healthy"), timeout=f"{WAIT_S}s"))
        assert len(paths) == COPIES_MAX + 1
        assert all(recovery.verify(path).ok for path in paths)
        assert job.progress().restarts == 0


def test_a_savepoint_that_is_refused_by_its_storage_holds_nothing_up(tmp_path: Path) -> None:
    """The copy is tried again beside the checkpoints; cancelling does not wait for it either."""
    with running(tmp_path) as (job, table, source, _):
        refused = asked(lambda: job.savepoint(str(tmp_path / "refuses"), timeout=f"{WAIT_S}s"))
        until("a copy that is under way", lambda: job.metrics()["checkpoint.in_progress_count"])
        pass_gates(source, table, GATES[:3])
        job.cancel()
        assert job.wait(f"{WAIT_S}s") == "cancelled"
        with pytest.raises(tg.CheckpointError, match=r"the job is ending|could not be written"):
            refused.result(WAIT_S)


def test_a_savepoint_holds_what_was_committed_before_its_barrier(tmp_path: Path) -> None:
    """What checkpoints commit while it is copied is not in its metadata, and a job restored from it is exact."""
    with running(tmp_path, num_retained=100) as (job, table, source, storage):
        pass_gates(source, table, GATES[:1])
        late = asked(lambda: job.savepoint(str(tmp_path / "silent"), timeout=f"{WAIT_S}s"))
        until("a copy that hangs", lambda: storage.hanging)
        pass_gates(source, table, GATES[1:4])
        newest = job.checkpoints()[-1]
        storage.answers.set()
        path = late.result(WAIT_S)
        savepoint = recovery.inspect(path).metadata
        later = recovery.inspect(newest.path).metadata
        head, later_head = (next(h for h in m.table_heads if h.url == table.url) for m in (savepoint, later))
        assert head.seq < later_head.seq
        assert head.commit is not None
        assert head.commit < savepoint.checkpoint_id <= (later_head.commit or 0)
    with running(tmp_path, restore=path) as (job, table, source, _):
        source.open_all()
        assert job.wait(f"{WAIT_S}s") == "finished"
        assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(ROWS))
