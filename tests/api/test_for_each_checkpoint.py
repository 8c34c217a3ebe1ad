"""A function gets the rows of each completed checkpoint: in order, once without failures, and what becomes of those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoint_calls import Calls, HeldCalls, calling, checkpoint_at, resumed, running
from local_jobs import NO_RESTART, GatedSource, await_events, config, finish, local, opening
from programs import running_of
from waiting import until

import tidegate as tg
from tidegate.actors.drivers import source_reads
from tidegate.api import checkpoint_calls
from tidegate.api.job_with_services import JobWithServices


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls with the same rows."""
    monkeypatch.setattr(checkpoint_calls, "PAUSE_S_FIRST", 0.001)


def test_each_row_comes_in_one_call(tmp_path: Path) -> None:
    """Ids increase; nothing is left when the job is over, neither to be called nor on the disk."""
    calls = Calls()
    with local(2) as env:
        calling(env, GatedSource(600, 400), calls)
        finish(env, tmp_path)

    assert calls.rows == sorted([*range(600), *range(400)])
    assert calls.ids == sorted(set(calls.ids))
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_call_has_the_rows_of_one_checkpoint(tmp_path: Path) -> None:
    """The first call comes while the job runs; a checkpoint without rows makes none."""
    calls, schemas = Calls(), []
    with opening(GatedSource(40, gates=[10, 30])) as source, local(1) as env:
        stream = env.from_source(source, uid="source")
        stream.for_each_checkpoint(calls, uid="out")
        stream.filter(lambda row: False).for_each_checkpoint(Calls(lambda number: 1 / 0), uid="no rows")
        stream.for_each_checkpoint(lambda df, checkpoint_id: schemas.append((type(df), df.schema)), uid="types")
        job = env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        job.trigger_checkpoint("4min")
        calls.await_calls(1)
        job.trigger_checkpoint("4min")
        source.open_gate(10)
        source.await_gate(30)
        job.savepoint(tmp_path / "savepoints", "4min")
        calls.await_calls(2)
        source.open_gate(30)
        assert job.wait("4min") == "finished"

    assert [rows for _, rows in calls.all] == [list(range(10)), list(range(10, 30)), list(range(30, 40))]
    assert schemas == [(pa.Table, GatedSource.schema)] * 3


def test_a_call_that_fails_is_made_again(tmp_path: Path) -> None:
    """With the same id and the same rows; those after it wait."""
    failed: list[int] = []

    def fail_twice(number: int) -> None:
        if failed.count(number) < 2:
            failed.append(number)
            raise ValueError("the database is away")

    calls = Calls(fail_twice)
    with local(1) as env:
        calling(env, GatedSource(100), calls, retries=2)
        finish(env, tmp_path)

    assert calls.rows == list(range(100))
    assert failed == [number for number in calls.ids for _ in range(2)]


@pytest.mark.parametrize(("error", "calls_made"), [(ValueError("no such table"), 3), (SystemExit(3), 1)])
def test_a_call_that_fails_for_good_fails_the_job(tmp_path: Path, error: BaseException, calls_made: int) -> None:
    """Which says where and why, and keeps its checkpoints: a restored job makes the same call. An exit is final."""
    made: list[int] = []

    def fail(number: int) -> None:
        made.append(number)
        raise error

    with running(tmp_path, Calls(fail), 10, 20, retries=2) as now:
        with pytest.raises(tg.JobFailedError) as caught:
            now.job.wait("4min")
        assert now.job.status() == "failed"

    assert made == [2] * calls_made
    times = "once" if calls_made == 1 else f"{calls_made} times"
    text = f"{type(error).__name__}: {error}"
    assert f"for_each_checkpoint (uid 'out'): checkpoint 2: fn was called {times}, and failed: {text}" in str(
        caught.value
    )
    again = Calls()
    resumed(tmp_path, again)
    assert again.all[0] == (2, list(range(10)))
    assert again.rows == list(range(40))


def test_what_a_failed_job_has_committed_is_handed_out(tmp_path: Path) -> None:
    """The job fails by itself; the function gets what completed checkpoints cover, and the reason is the job's."""
    calls = Calls()

    def fail_at_20(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 20 in batch["x"].to_pylist():
            raise ValueError("row 20")
        return batch

    with opening(GatedSource(40, gates=[10])) as source, local(1, 10) as env:
        stream = env.from_source(source, uid="source").map_batches(fail_at_20, schema=source.schema)
        stream.for_each_checkpoint(calls, uid="out")
        job = env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART)
        checkpoint_at(source, job, 10)
        with pytest.raises(tg.JobFailedError, match="ValueError: row 20"):
            job.wait("4min")

    assert calls.rows == list(range(10))


class WatchedReads(GatedSource):
    """Counts reads that begin while the job is held back."""

    def __init__(self, folder: Path, *lengths: int, gates: Sequence[int]) -> None:
        super().__init__(*lengths, gates=gates)
        self.while_held = 0
        self._folder = folder

    @property
    def held(self) -> bool:
        """Whether the driver has told the sources to wait."""
        return bool(list(self._folder.glob("*/taskowned/collect-out/_tidegate/hold-*")))

    def pass_gate(self, row: int) -> None:
        """Before each read."""
        self.while_held += self.held
        super().pass_gate(row)


def test_a_slow_function_holds_the_sources_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While too much waits they read nothing, though checkpoints go on; then they read on, to the end."""
    monkeypatch.setattr(source_reads, "LOOK_MS", 0)
    monkeypatch.setattr(source_reads, "HELD_S", 0.001)
    answers: list[bool] = []
    ask = source_reads.HeldSources.wait

    def watched(sources: source_reads.HeldSources) -> bool:
        answers.append(ask(sources))
        return answers[-1]

    monkeypatch.setattr(source_reads.HeldSources, "wait", watched)
    calls = HeldCalls()
    with opening(WatchedReads(tmp_path, 60, gates=[10, 20, 30, 40])) as source, local(1) as env:
        calling(env, source, calls, max_behind=2)
        job = env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART)
        for gate in (10, 20, 30):
            assert not source.held
            source.await_gate(gate)
            job.trigger_checkpoint("4min")
            if gate < 30:
                source.open_gate(gate)
        until("the hold", lambda: source.held)
        source.open_gate(30)
        until("held reads", lambda: sum(answers) >= 5, lambda: len(answers))
        job.trigger_checkpoint("4min")
        assert source.while_held == 0
        calls.go.set()
        source.await_gate(40)
        source.open_gate(40)
        assert job.wait("4min") == "finished"

    first, second, third, before_the_hold, after_it = (rows for _, rows in calls.all)
    assert (first, second, third) == (list(range(10)), list(range(10, 20)), list(range(20, 30)))
    # One read was under way when the hold began. It has fewer than ten rows where the turns before it were slow.
    begun = before_the_hold[-1] + 1
    assert before_the_hold == list(range(30, begun))
    assert begun <= 40
    assert after_it == list(range(begun, 60))
    assert not source.held


def test_wait_waits_for_the_function(tmp_path: Path) -> None:
    """The tasks are over, and the job runs until the function has had everything."""
    calls = HeldCalls()
    with local(1) as env:
        calling(env, GatedSource(10), calls)
        job = env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART)
        calls.await_call()
        with pytest.raises(tg.JobTimeoutError, match="still running"):
            job.wait(1)
        assert job.status() == "running"
        calls.go.set()
        assert job.wait("4min") == "finished"
        assert job.status() == "finished"
    assert calls.rows == list(range(10))


@pytest.mark.parametrize("hangs", [False, True])
def test_cancel_lets_the_last_call_come_back(tmp_path: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other follows. One that hangs is left behind; what it had was not handed on."""
    monkeypatch.setattr(checkpoint_calls, "LEAVE_WAIT_S", 0.05 if hangs else 60)
    calls = HeldCalls(ValueError("too late") if hangs else None)
    with running(tmp_path, calls, 10, 20, 30) as now:
        calls.await_call()
        now.job.cancel()
        if not hangs:
            calls.go.set()
        assert now.job.wait("4min") == "cancelled"
        assert calls.all == ([] if hangs else [(2, list(range(10)))])
    calls.go.set()


@pytest.mark.parametrize("fails", [False, True])
def test_another_handle_cancels_the_calls_too(tmp_path: Path, fails: bool) -> None:
    """It knows nothing of the function, which notices the end; a call that failed meanwhile was not handed on."""
    calls = HeldCalls(ValueError("the database is away") if fails else None)
    with running(tmp_path, calls, 10, 20, 30) as now:
        calls.await_call()
        now.env.attach("calls").cancel()
        job = running_of(now.job)
        assert isinstance(job, JobWithServices)
        (service,) = job.services
        until("the end to be noticed", lambda: service.stopping)
        calls.go.set()
        assert now.job.wait("4min") == "cancelled"
    assert calls.rows == ([] if fails else list(range(10)))
    again = Calls()
    resumed(tmp_path, again)
    assert again.rows == list(range(0 if fails else 10, 40))


@pytest.mark.parametrize("tasks_over", [False, True])
def test_a_closed_environment_makes_no_more_calls(
    tmp_path: Path, tasks_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end cancels the job, also where only calls were left to make, and waits for the call that runs."""
    calls, stop = HeldCalls(), checkpoint_calls.CheckpointCalls.stop

    def stop_and_go(self: checkpoint_calls.CheckpointCalls) -> None:
        stop(self)
        calls.go.set()

    monkeypatch.setattr(checkpoint_calls.CheckpointCalls, "stop", stop_and_go)
    with running(tmp_path, calls, *((10, 20) if tasks_over else (10, 20, 30))) as now:
        calls.await_call()
        if tasks_over:
            checkpoint_at(now.source, now.job, 20)
            await_events(now.job, "TaskFinished", 1)
        else:
            now.source.await_gate(30)
        now.env.close()
        assert calls.all == [(2, list(range(10)))]
        assert now.job.wait("4min") == now.job.status() == "cancelled"
    again = Calls()
    resumed(tmp_path, again)
    assert again.rows == list(range(10, 40))


def test_jobs_that_are_over_are_forgotten(tmp_path: Path) -> None:
    """By the environment that has executed them, as soon as it executes another one."""
    with local(1) as env:
        for run in range(3):
            calling(env, GatedSource(10), Calls())
            finish(env, tmp_path / str(run))
        assert len(env._jobs_with_services) == 1


def lone(df: pa.Table) -> None:
    """Takes no id."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fn": "write"}, r"'write' is not a function; give a function that can be called as fn\(df, checkpoint_id\)"),
        ({"fn": lone}, r"cannot be: it is fn\(df: .*\) -> .* \(too many positional arguments\)"),
        ({"retries": -1}, r"retries=-1: give a whole number from 0 to 1,000"),
        ({"retries": True}, r"retries=True: give a whole number"),
        ({"max_behind": 0}, r"max_behind=0: give a whole number from 1 to 100,000"),
        ({"max_behind": 2.5}, r"max_behind=2\.5"),
    ],
)
def test_what_cannot_be_called_is_refused(options: dict[str, object], text: str) -> None:
    """Where it is given."""
    given: dict[str, object] = {"fn": print, **options}
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=f"each: .*{text}"):
        env.from_source(GatedSource(10)).for_each_checkpoint(name="each", **given)  # type: ignore[arg-type]


def test_a_job_in_which_rows_would_be_lost_is_refused(tmp_path: Path) -> None:
    """It needs its driver, and its checkpoints; nothing has been written then."""
    for options, settings, text in (
        ({"detached": True}, {}, "fn is called in the driver"),
        ({}, {"retention": "delete_on_cancellation"}, 'set retention="retain_on_cancellation"'),
    ):
        with local(1) as env:
            calling(env, GatedSource(10), Calls())
            with pytest.raises(tg.ConfigurationError, match=rf"for_each_checkpoint \(uid 'out'\): .*{text}"):
                env.execute("calls", checkpoints=config(tmp_path, **settings), **options)
    assert not list(tmp_path.iterdir())
