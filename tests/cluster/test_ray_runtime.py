"""Whole jobs on Ray, beside Spark executors: results, failures of every kind of process, and what people see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayActorError
from ray_jobs import ROWS, keyed_job, until

from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import MetadataWritten, TaskReady
from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.actors.ray.ray_runtime import RayJob, RayRuntime, SlotPlacement
from tidegate.actors.ray.task_deployment import ProcessStatus
from tidegate.actors.ray.worker_pool import worker_actor
from tidegate.actors.runtimes.running_job import JobProgress, SnapshotRequest, progress_of
from tidegate.protocol.identity import TaskId
from tidegate.protocol.task_reports import StateOrigin
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.spark_bridge import RayDPSession
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import CheckpointError, ConfigurationError
from tidegate.storage.files.file_system_store import open_store

WAIT_S = 240.0
EMPTY = progress_of(CoordinatorState(), {})
KILLS = 2
AT_ONCE = RestartStrategy.fixed_delay(attempts=3, delay=0)


@pytest.fixture(scope="module")
def placement(raydp_session: RayDPSession) -> SlotPlacement:
    """The slots of the session."""
    return SlotPlacement.of_session(raydp_session)


@pytest.fixture
def runtime(placement: SlotPlacement) -> Iterator[RayRuntime]:
    """A runtime without spare processes, emptied after each test."""
    runtime = RayRuntime(placement, standbys=0)
    yield runtime
    runtime.stop()


def running_with_a_checkpoint(progress: JobProgress) -> bool:
    """Whether the present attempt has processed rows, and there is something to restore."""
    return progress.status == "running" and progress.completed_checkpoints > 0 and "totals" in progress.rows_in


def end_of(job: RayJob) -> JobProgress:
    """How the job ended."""
    progress = job.wait(WAIT_S)
    assert progress is not None, f"the job is still at {job.progress()}"
    return progress


def test_a_keyed_job_gives_the_reference_and_shows_itself(runtime: RayRuntime, tmp_path: Path) -> None:
    """Actors have names for people, rows rise, a requested checkpoint is taken, and the table is exact."""
    gate = tmp_path / "gate"
    keyed = keyed_job(tmp_path, gate, name="flow", interval_ms=None)
    job = runtime.submit(keyed.submission)
    first = until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0)
    until("more rows", job.progress, lambda p: p.rows_in["totals"] > first.rows_in["totals"])
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    workers = {"flow/slot 1 of 2#0", "flow/slot 2 of 2#0"}
    assert workers | {"flow/coordinator"} <= names
    assert {process.actor for process in job.tasks()} == workers
    assert job.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S).checkpoint_id == 1
    gate.touch()
    end = end_of(job)
    assert (end.status, end.restarts, end.failed_checkpoints) == ("finished", 0, 0)
    assert end.rows_in == {"rows": ROWS, "totals": ROWS}
    assert keyed.table().equals(keyed.expected)
    assert job.tasks() == ()
    with pytest.raises(CheckpointError, match="the job is finished"):
        job.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S)


def test_a_task_that_is_killed_goes_on_where_its_state_is_held(placement: SlotPlacement, tmp_path: Path) -> None:
    """After `kill -9` the task goes on in the spare process that has followed it, which reads no keyed state; with it
    goes the other task of its slot, and no row is lost or doubled."""
    gate = tmp_path / "gate"
    keyed = keyed_job(tmp_path, gate, name="killed", restart=AT_ONCE, parallelism=1, interval_ms=None)
    context = keyed.submission.context
    options = replace(context.options, backend=StateBackendOptions(incremental=True))
    runtime = RayRuntime(placement, standbys="warm")
    try:
        job = runtime.submit(replace(keyed.submission, context=replace(context, options=options)))
        until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0)
        assert job.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S).checkpoint_id == 1
        before = {process.task: process for process in job.tasks()}
        victim = before[keyed.submission.spec.tasks[-1]]
        until("a standby that follows", job.progress, lambda _: followers("killed", victim.task) != [])
        (standby,) = followers("killed", victim.task)
        os.kill(victim.pid, signal.SIGKILL)
        until("a restart", job.progress, lambda p: p.restarts == 1 and running_with_a_checkpoint(p))
        after = {process.task: process for process in job.tasks()}
        assert {process.actor for process in after.values()} == {standby}
        log = EventLog(open_store(context.root), context.job_id)
        ready = [e for entry in log.entries(0) for e in entry.events if isinstance(e, TaskReady)]
        assert [(e.attempt, e.origin) for e in ready if e.task == victim.task][-1] == (1, StateOrigin.MEMORY)
        gate.touch()
        end = end_of(job)
        assert (end.status, end.restarts, end.standbys_ready) == ("finished", 1, 0)
        assert end.last_failure is not None
        assert f"the process {victim.actor}, pid {victim.pid}, has ended" in end.last_failure
        assert keyed.table().equals(keyed.expected)
    finally:
        runtime.stop()


def followers(job: str, task: TaskId) -> list[str]:
    """Spare processes of a job that hold the state of a task, at its first checkpoint."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    spare = [name for name in names if name.startswith(f"{job}/standby#")]
    held: list[ProcessStatus] = ray.get([ray.get_actor(name, NAMESPACE).held.remote() for name in spare])
    return [name for name, one in zip(spare, held, strict=True) if one.follows == {task: 1}]


def test_tasks_go_on_when_their_coordinator_is_killed(runtime: RayRuntime, tmp_path: Path) -> None:
    """After each `kill -9` a successor adopts them: same processes, same attempt, and the table is exact.

    No restart is allowed, so nothing may count as a failure. No checkpoint number is used twice. A process that starts
    late, because a predecessor had asked for it, hears that nobody knows it, and ends.
    """
    gate = tmp_path / "gate"
    keyed = keyed_job(tmp_path, gate, name="headless", restart=RestartStrategy.none(), parallelism=1)
    job = runtime.submit(keyed.submission)
    seen = until("a checkpoint", job.progress, running_with_a_checkpoint)
    tasks, coordinators = job.tasks(), set()
    for losses in range(1, KILLS + 1):
        coordinators.add(job.coordinator().pid)
        os.kill(job.coordinator().pid, signal.SIGKILL)

        def goes_on(p: JobProgress, newest: int = seen.completed_checkpoints, losses: int = losses) -> bool:
            return p.adoptions == losses and p.completed_checkpoints > newest

        seen = until("a checkpoint of the next generation", job.progress, goes_on)
    assert (len(coordinators), seen.coordinator_losses, seen.restarts, seen.attempt) == (KILLS, KILLS, 0, 0)
    assert seen.last_failure == f"the coordinator was lost; generation {KILLS + 1} has taken over"
    late = (
        worker_actor()
        .options(name="headless/standby#7", namespace=NAMESPACE, lifetime="detached", num_cpus=0)
        .remote(ray.put(keyed.submission.context), ray.get_actor("headless/coordinator", NAMESPACE), open_store)
    )
    with pytest.raises(RayActorError):
        ray.get(late.live.remote(), timeout=WAIT_S)
    assert job.tasks() == tasks
    gate.touch()
    end = end_of(job)
    assert (end.status, end.restarts) == ("finished", 0)
    assert keyed.table().equals(keyed.expected)
    spec = keyed.submission.spec
    triggered = [
        fact.checkpoint_id
        for entry in EventLog(open_store(spec.root), spec.job_id).entries(0)
        for fact in entry.events
        if isinstance(fact, MetadataWritten)
    ]
    assert triggered == sorted(set(triggered))


def test_a_task_that_dies_with_its_coordinator_is_replaced(runtime: RayRuntime, tmp_path: Path) -> None:
    """The successor finds that its process is gone: a failure like any other, and the strategy is asked."""
    gate = tmp_path / "gate"
    keyed = keyed_job(tmp_path, gate, name="both", restart=AT_ONCE, parallelism=1)
    job = runtime.submit(keyed.submission)
    until("a checkpoint", job.progress, running_with_a_checkpoint)
    for process in (job.coordinator(), job.tasks()[-1]):
        os.kill(process.pid, signal.SIGKILL)
    until("a restart", job.progress, lambda p: p.restarts > 0 and running_with_a_checkpoint(p))
    gate.touch()
    end = end_of(job)
    assert (end.status, end.coordinator_losses) == ("finished", 1)
    # The task before it may be the first to say so: what it sent did not arrive.
    told = str(end.last_failure)
    assert "its process was gone when a new coordinator took over" in told or "a message did not arrive" in told
    assert keyed.table().equals(keyed.expected)


def test_a_failed_function_is_tried_again_and_then_fails_the_job_by_name(runtime: RayRuntime, tmp_path: Path) -> None:
    """A failure of user code costs no process. When attempts are used up, the reason names operator and error."""
    gate, fuse, broken = tmp_path / "never", tmp_path / "fuse", tmp_path / "broken"

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        if fuse.exists() or broken.exists():
            fuse.unlink(missing_ok=True)
            raise ValueError("no such carrier")
        return batch

    once = RestartStrategy.fixed_delay(attempts=1, delay=0)
    job = runtime.submit(
        keyed_job(tmp_path, gate, function=fail, name="retried", restart=once, parallelism=1).submission
    )
    until("a checkpoint", job.progress, running_with_a_checkpoint)
    before = job.tasks()
    fuse.touch()
    until("a restart", job.progress, lambda p: p.restarts == 1 and running_with_a_checkpoint(p))
    assert job.tasks() == tuple(replace(process, attempt=1) for process in before), (
        "the same processes, all deployed anew"
    )
    # The checkpoint since then has given the job its attempt back: only what fails again and again uses it up.
    broken.touch()
    end = end_of(job)
    assert end.status == "failed"
    assert end.reason is not None
    assert "operator 'check'" in end.reason
    assert "ValueError: no such carrier" in end.reason


def test_a_cancelled_job_leaves_no_process_and_frees_its_slots(runtime: RayRuntime, tmp_path: Path) -> None:
    """While a job runs, its slots are not given away; once it is cancelled its actors go and another job may start."""
    first = keyed_job(tmp_path / "first", tmp_path / "never", name="cancelled", parallelism=1)
    second = keyed_job(tmp_path / "second", tmp_path / "never", name="second", parallelism=4)
    job = runtime.submit(first.submission)
    with pytest.raises(ConfigurationError, match=r"needs 4 neighbouring task slots.* taken by cancelled"):
        runtime.check(second.submission.context.graph, {})
    until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0)
    job.cancel()
    assert end_of(job).status == "cancelled"
    runtime.check(second.submission.context.graph, {})
    until("the actors to go", job.progress, lambda _: not _named("cancelled/"))


def test_a_coordinator_that_is_lost_for_good_fails_the_job(runtime: RayRuntime, tmp_path: Path) -> None:
    """Whoever asks about such a job is told so, and its tasks do not go on without it."""
    job = runtime.submit(keyed_job(tmp_path, tmp_path / "never", name="lost", parallelism=1).submission)
    until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0)
    ray.kill(ray.get_actor("lost/coordinator", namespace="tidegate"), no_restart=True)
    ended = job.wait(WAIT_S)
    assert ended is not None
    assert (ended.status, job.progress()) == ("failed", ended)
    assert "its coordinator is lost for good" in str(ended.reason)
    until("the actors to go", lambda: EMPTY, lambda _: not _named("lost/"))


def test_what_cannot_run_here_is_refused_at_once(runtime: RayRuntime, tmp_path: Path) -> None:
    """More subtasks than slots, and storage that other processes do not see, are errors that say so."""
    wide = keyed_job(tmp_path / "wide", tmp_path / "never", name="wide", parallelism=5).submission
    with pytest.raises(ConfigurationError, match="parallelism 5, and there are 4 task slots"):
        runtime.submit(wide)
    local = keyed_job(tmp_path / "local", tmp_path / "never", name="local").submission
    in_memory = replace(local, context=replace(local.context, root="memory://checkpoints"))
    with pytest.raises(ConfigurationError, match="memory of one process"):
        runtime.submit(in_memory)


def _named(prefix: str) -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["name"].startswith(prefix)]
