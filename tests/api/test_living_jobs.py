"""A job says that it lives, for as long as it does: nobody takes its files away meanwhile."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandRunner
from local_jobs import NO_RESTART, GatedSource, config, finish, local, numbers

import tidegate as tg
from tidegate.api.submission import job_names
from tidegate.api.submission.job_names import await_end, name_taken
from tidegate.cli.main import app
from tidegate.storage.checkpoints.lease import CLOCKS_DIFFER_MS_MAX, Lease, delete_lease, read_lease, write_lease
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import ProcessId, this_process


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

        refused = CommandRunner().invoke(app, ["checkpoints", "sweep", str(root), "--delete"])
        assert (refused.exit_code, left.exists()) == (1, True)
        assert f"Job {job.job_id} may be running, because process {os.getpid()} on " in refused.output
        assert f"its lease was renewed by process {os.getpid()}" in refused.output

        source.open_all()
        assert job.wait("4min") == "finished"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"state")
    age(root)
    swept = CommandRunner().invoke(app, ["checkpoints", "sweep", str(root), "--delete"])
    assert (swept.exit_code, left.exists()) == (0, False)


def test_a_checkpoint_of_a_running_job_is_not_deleted_but_its_savepoint_is(tmp_path: Path) -> None:
    """And when the job is over the checkpoint goes as well."""
    source, root = GatedSource(20, gates=[10]), tmp_path / "checkpoints"
    with local(parallelism=1, rows_max=5) as env:
        env.from_source(source).collect()
        job = env.execute("busy", checkpoints=config(root), restart=NO_RESTART)
        source.await_gate(10)
        savepoint = job.savepoint(str(tmp_path / "savepoints"))
        (kept,) = tg.recovery.list_checkpoints(str(root))

        with pytest.raises(tg.ConfigurationError, match=f"job {job.job_id} may be running.*process {os.getpid()} "):
            tg.recovery.delete(kept.path)
        assert tg.recovery.verify(kept.path).ok
        assert tg.recovery.delete(savepoint) > 0

        source.open_all()
        assert job.wait("4min") == "finished"
    (last,) = tg.recovery.list_checkpoints(str(root))
    assert tg.recovery.delete(last.path) > 0


def test_a_job_that_is_over_says_so(tmp_path: Path) -> None:
    """And its lease keeps its name."""
    with local() as env:
        env.from_batches(numbers(10)).collect()
        job = finish(env, tmp_path)

    lease = read_lease(open_store(str(tmp_path)), job.job_id)
    assert lease is not None
    assert (lease.ended, lease.job_name) == (True, "test job")


def test_a_second_job_of_a_name_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """And the first goes on; under another name, another root, or after its end the second one may start."""
    source = GatedSource(20, gates=[10])
    with local(parallelism=1, rows_max=5) as env:
        env.from_source(source).collect()
        first = env.execute("My Job", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        for restore in (None, "latest", "latest_or_fresh"):
            with local() as other:
                other.from_batches(numbers(10)).collect()
                with pytest.raises(tg.ConfigurationError) as refusal:
                    other.execute("My Job", checkpoints=config(tmp_path), restart=NO_RESTART, restore=restore)
        assert f"is running already: {first.job_id}, of process {os.getpid()}" in str(refusal.value)
        assert "restore" not in str(refusal.value), "restored, it would evict the one that lives"
        assert [path.name for path in tmp_path.iterdir() if any(path.iterdir())] == [first.job_id]

        for name, root in (("my job", tmp_path), ("My Job", tmp_path / "other")):
            with local() as other:
                other.from_batches(numbers(10)).collect()
                assert other.execute(name, checkpoints=config(root)).wait("4min") == "finished"
        source.open_all()
        assert first.wait("4min") == "finished"
    with local() as env:
        env.from_batches(numbers(10)).collect()
        assert env.execute("My Job", checkpoints=config(tmp_path)).wait("4min") == "finished"


def test_a_submission_that_fails_leaves_the_name_free(tmp_path: Path) -> None:
    """Also where it fails after the name was taken."""
    with local() as env:
        env.from_batches(numbers(10)).collect()
        with pytest.raises(tg.ConfigurationError, match="names no checkpoint"):
            env.execute("job", checkpoints=config(tmp_path), restore="nonsense")
        env.execute("job", checkpoints=config(tmp_path)).wait("4min")


class Waiting:
    """Clocks that go on when somebody waits, and what happens then."""

    def __init__(self, store: FileSystemStore, *then: Lease) -> None:
        self.now_ms = 1_000_000
        self.slept = 0
        self._store = store
        self._then = list(then)

    def sleep(self, seconds: float) -> None:
        """Some time passes."""
        self.slept += 1
        self.now_ms += round(seconds * 1000)
        if self._then and self.slept > 3:
            write_lease(self._store, self._then.pop(0))

    def await_end(self, name: str = "job", clock_ms: int | None = None, asker: JobId | None = None) -> bool:
        """Look at the one job that there is."""
        return await_end(
            self._store,
            JOB,
            name,
            asker=asker,
            clock=lambda: self.now_ms if clock_ms is None else clock_ms,
            monotonic=lambda: self.now_ms / 1000,
            sleep=self.sleep,
        )


WAIT_S = 240.0
JOB = JobId("job-12345678")
ELSEWHERE = Lease(JOB, "job", ProcessId("another host", "another place", 1, "5"), "token", 1_000_000, 1_000)


def test_a_job_of_another_machine_is_waited_for(tmp_path: Path) -> None:
    """Until its lease expires, by whatever clock, or it says that it is over."""
    store = open_store(str(tmp_path))
    write_lease(store, ELSEWHERE)
    expired, ended = Waiting(store), Waiting(store, ELSEWHERE.ended_at(1_000_000))

    expired.await_end()
    assert expired.now_ms > 1_000_000 + 1_000 + CLOCKS_DIFFER_MS_MAX
    by_no_clock = Waiting(store)
    by_no_clock.await_end(clock_ms=500_000)
    assert by_no_clock.slept > 3, "by its clock the lease would never expire"
    ended.await_end()
    assert ended.slept == 4

    nothing = Waiting(store)
    write_lease(store, ELSEWHERE)
    nothing.await_end("another name")
    assert nothing.slept == 0


def test_a_job_of_another_machine_that_gives_a_sign_of_life_is_left_alone(tmp_path: Path) -> None:
    """One renewal is enough; but not one by what Ray is about to end."""
    store = open_store(str(tmp_path))
    write_lease(store, ELSEWHERE)
    with pytest.raises(tg.ConfigurationError, match="of process 1 on another host"):
        Waiting(store, ELSEWHERE.renewed(1_000_700)).await_end()

    orphan = replace(ELSEWHERE, driver=replace(this_process(), began="1"))
    write_lease(store, orphan)
    Waiting(store, orphan.renewed(1_000_700)).await_end()
    write_lease(store, orphan)
    with pytest.raises(tg.ConfigurationError, match="is running already"):
        Waiting(
            store, *[replace(orphan, renewals=n, renewed_at_ms=1_000_000 + 200 * n) for n in range(1, 1_000)]
        ).await_end()


@pytest.mark.parametrize("drivers", [2, 4])
def test_of_drivers_that_start_a_name_at_the_same_moment_one_wins(
    drivers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has written its lease before any of them looks; the others are refused, and leave nothing."""
    monkeypatch.setattr(job_names, "LOOK_AGAIN_S", 0.0)
    all_ask, all_know = threading.Barrier(drivers), threading.Barrier(drivers)
    ids = [JobId(f"job-{number}") for number in range(drivers)]

    def start(job_id: JobId) -> str:
        store = open_store(str(tmp_path))
        first_look = store.list

        def look(prefix: str) -> list[str]:
            store.list = first_look  # type: ignore[method-assign]
            all_ask.wait(WAIT_S)
            return first_look(prefix)

        store.list = look  # type: ignore[method-assign]
        try:
            with name_taken(store, "job", job_id, "job-", 30_000) as keeper:
                all_know.wait(WAIT_S)
                keeper.abandon()
                return "won"
        except tg.ConfigurationError as error:
            all_know.wait(WAIT_S)
            return str(error)

    with ThreadPoolExecutor(drivers) as pool:
        ends = list(pool.map(start, ids))
    assert ends[0] == "won"
    for end in ends[1:]:
        assert "a job named 'job' is being started at this moment: job-" in end
    assert [path.parent.name for path in tmp_path.rglob("lease")] == ["job-0"]


def test_a_name_that_was_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    """Of two that ask, the one with the higher id had looked before the other one asked: that one is refused."""
    store = open_store(str(tmp_path))
    asking = replace(ELSEWHERE, asking=True)
    write_lease(store, asking)
    taken = Waiting(store, replace(asking.renewed(1_000_700), asking=False))
    with pytest.raises(tg.ConfigurationError, match="a job named 'job' is running already"):
        taken.await_end(asker=JobId("job-0"))
    assert taken.slept > 3

    write_lease(store, asking)
    silent = Waiting(store)
    assert silent.await_end(asker=JobId("job-0")), "its process was lost, and its lease expires"
    delete_lease(store, JOB)
    assert not Waiting(store).await_end(asker=JobId("job-0"))


def test_a_job_that_cannot_start_a_thread_leaves_nothing_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its threads it is: one error says so, and the name is free for the next job, which has its rows.

    Else the name would be taken, and its lease renewed, for as long as the process lives.
    """
    start, root = threading.Thread.start, tmp_path / "checkpoints"
    started, refused, left = 0, 0, 0

    def short_of_threads(thread: threading.Thread) -> None:
        nonlocal started
        mine = threading.current_thread() is threading.main_thread()  # The job itself starts others meanwhile.
        started += mine
        if mine and started == left:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short_of_threads)
    with local(parallelism=1) as env:
        while started >= left:  # until there was a thread left when the job had started
            left, started = left + 1, 0
            rows = env.from_batches(numbers(3)).collect()
            before = set(threading.enumerate())
            try:
                job = env.execute("crowded", checkpoints=config(root), restart=NO_RESTART)
            except tg.ConfigurationError as error:
                refused += "may not start another thread" in str(error)
                for thread in set(threading.enumerate()) - before:
                    thread.join(240)
                    assert not thread.is_alive(), thread
            else:
                assert job.wait("4min") == "finished"
                assert rows.to_arrow().num_rows == 3
    assert refused > 5
