"""What becomes of a job that fails, is cancelled or is watched, and what it leaves behind."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import (
    NO_RESTART,
    GatedSource,
    WatchedStore,
    config,
    fails_once,
    finish,
    local,
    nothing,
    numbers,
    opening,
    rows,
)
from programs import running_of
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.ray.memory_store import open_store_on_ray
from tidegate.api.submission.job import Job
from tidegate.storage.errors import CheckpointError, StorageError
from tidegate.storage.ids import JobId

# --- failures -----------------------------------------------------------------------------------------------------


def test_an_exception_fails_the_job_and_names_operator_and_row(tmp_path: Path) -> None:
    """Without restarts the error of the user's function reaches whoever waits, with what is needed to find it."""

    def divide(row: dict[str, int]) -> dict[str, float]:
        return {"q": 10 / row["x"]}

    with local(parallelism=1) as env:
        env.from_batches(pa.table({"x": [5, 0]})).map(
            divide, schema=pa.schema([("q", pa.float64())]), name="divide"
        ).collect()
        job = env.execute("division", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError) as caught:
            job.wait("4min")

    assert job.status() == "failed"
    message = str(caught.value)
    for part in ("'division' failed", "operator 'divide'", "ZeroDivisionError", "{'x': 0}", "in divide"):
        assert part in message
    assert 'restore="latest"' not in message, "no checkpoint was ever completed"


def test_a_failure_that_passes_is_restarted_and_leaves_no_trace(tmp_path: Path) -> None:
    """fixed_delay: the second attempt goes through, and every row is there once."""
    flag = tmp_path / "failed"

    data = pa.table({"x": list(range(300))})
    with local() as env:
        out = (
            env.from_batches(data)
            .map(fails_once(150, flag, "once"), schema=data.schema)
            .to_table(str(tmp_path / "out"))
        )
        job = env.execute(
            "retried",
            checkpoints=config(tmp_path / "checkpoints", interval="10ms"),
            restart=tg.RestartStrategy.fixed_delay(2, "10ms"),
        )
        assert job.wait("4min") == "finished"

    assert job.progress().restarts == 1
    assert "ValueError: once" in (job.progress().last_failure or "")
    assert sorted(out.to_arrow()["x"].to_pylist()) == list(range(300))


def test_restarts_are_used_up(tmp_path: Path) -> None:
    """A function that always fails is tried as often as allowed, and then the job fails with its error."""
    with local(parallelism=1) as env:
        env.from_batches(pa.table({"x": [1]})).filter(lambda row: row["nothing"]).collect()
        job = env.execute("hopeless", checkpoints=config(tmp_path), restart=tg.RestartStrategy.fixed_delay(2, "1ms"))
        with pytest.raises(tg.JobFailedError, match="KeyError"):
            job.wait("4min")

    assert job.progress().restarts == 2


def test_readers_are_closed_whatever_becomes_of_the_job(tmp_path: Path) -> None:
    """As many are closed as were opened, after the end of the data and after a failure."""
    finished, failed = GatedSource(20, 20), GatedSource(20, 20)
    with local() as env:
        env.from_source(finished).collect()
        finish(env, tmp_path)
        env.from_source(failed).filter(lambda row: row["nothing"]).collect()
        with pytest.raises(tg.JobFailedError):
            env.execute("failed", checkpoints=config(tmp_path), restart=NO_RESTART).wait("4min")

    # A read that is under way when its job ends closes the reader when it comes back, and the job does not wait for it.
    until("the readers are closed", lambda: (finished.open_readers, failed.open_readers) == (0, 0))


def test_rows_that_were_never_committed_are_deleted(tmp_path: Path) -> None:
    """A checkpoint whose metadata could not be written is given up; what its sinks had written goes with the job."""
    failed: list[str] = []

    def fail_first(path: str) -> None:
        if path.endswith("/chk-1/_metadata") and not failed:
            failed.append(path)
            raise StorageError("no answer")

    runtime = LocalRuntime(lambda url: WatchedStore(url, before=fail_first, after=nothing))
    with opening(GatedSource(20, gates=[10])) as source, tg.StreamEnvironment(runtime, 1) as env:
        table = env.from_source(source).to_table(str(tmp_path / "out"))
        checkpoints = config(tmp_path / "checkpoints", tolerable_failed_checkpoints=1)
        job = env.execute("given up", checkpoints=checkpoints, restart=NO_RESTART)
        source.await_gate(10)
        with pytest.raises(tg.CheckpointError, match="metadata was not written"):
            job.trigger_checkpoint("4min")
        assert len(list((tmp_path / "out" / "data").rglob("*.parquet"))) == 1
        job.cancel()
        job.wait("4min")

    assert (failed, table.to_arrow().num_rows) == ([f"{job.job_id}/chk-1/_metadata"], 0)
    assert list((tmp_path / "out").rglob("*.parquet")) == []


# --- the handle ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_request_can_be_verified(tmp_path: Path) -> None:
    """trigger_checkpoint returns the path of a complete checkpoint of this job."""
    with opening(GatedSource(20, gates=[10])) as source, local() as env:
        env.from_source(source, parallelism=1).key_by("k").aggregate(n=tg.count()).collect()
        job = env.execute("asked", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        path = job.trigger_checkpoint("4min")

        report = recovery.verify(path)
        assert (report.ok, report.problems) == (True, ())
        assert [c.path for c in job.checkpoints()] == [path]
        assert job.metrics()["last_checkpoint"] == 1


def test_the_events_tell_the_story(tmp_path: Path) -> None:
    """From submission to the end, in order, readable while the job runs and after it."""
    with opening(GatedSource(20, gates=[10])) as source, local(parallelism=1) as env:
        env.from_source(source).collect()
        job = env.execute("story", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        job.trigger_checkpoint("4min")
        names = [type(event).__name__ for event in job.events()]
        assert names[:3] == ["CoordinatorStarted", "JobSubmitted", "TaskReady"]
        assert "CheckpointRequested" in names
        source.open_all()
        job.wait("4min")

    names = [type(event).__name__ for event in job.events()]
    for earlier, later in [
        ("CheckpointAcknowledged", "MetadataWritten"),
        ("MetadataWritten", "TaskReachedEndOfData"),
        ("TaskReachedEndOfData", "TaskFinished"),
    ]:
        assert names.index(earlier) < names.index(later)
    assert names.count("MetadataWritten") == 2


def test_a_cancelled_job_stops_and_keeps_what_is_committed(tmp_path: Path) -> None:
    """Status and wait() say cancelled; rows and checkpoint stay; further requests are refused."""
    with opening(GatedSource(20, gates=[10])) as source, local() as env:
        table = env.from_source(source, parallelism=1).to_table(str(tmp_path / "out"))
        job = env.execute("cancelled", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        path = job.trigger_checkpoint("4min")
        with pytest.raises(TimeoutError, match="still running"):
            job.wait("1ms")
        job.cancel()

        assert job.wait("4min") == job.status() == "cancelled"
        committed = table.to_arrow()["x"].to_pylist()
        assert sorted(committed) == list(range(len(committed)))
        assert [c.path for c in job.checkpoints()] == [path]
        with pytest.raises(tg.CheckpointError):
            job.trigger_checkpoint("4min")


def test_asking_a_job_that_is_over_leaves_nothing_behind(tmp_path: Path) -> None:
    """However often a script asks: the job says that it is over, and keeps no request that nobody will answer."""
    with local() as env:
        env.from_batches(numbers(10)).collect()
        job = env.execute("over", checkpoints=config(tmp_path))
        assert job.wait("4min") == "finished"
        running: Any = running_of(job)
        for _ in range(3):
            with pytest.raises(CheckpointError, match="no checkpoint was taken: the job is finished"):
                job.trigger_checkpoint()
        assert running.requests == {}
        assert running._inbox.empty()


def test_closing_the_environment_cancels_what_runs(tmp_path: Path) -> None:
    """No job outlives its environment, and one that has failed does not get in the way."""
    with opening(GatedSource(20, gates=[10])) as source:
        with local(parallelism=1) as env:
            env.from_batches(pa.table({"x": [1]})).filter(lambda row: row["nothing"]).collect()
            failed = env.execute("failed", checkpoints=config(tmp_path), restart=NO_RESTART)
            with pytest.raises(tg.JobFailedError):
                failed.wait("4min")
            env.from_source(source).collect()
            running = env.execute("running", checkpoints=config(tmp_path), restart=NO_RESTART)
            source.await_gate(10)

        assert (failed.status(), running.status()) == ("failed", "cancelled")


def test_one_environment_runs_several_jobs(tmp_path: Path) -> None:
    """After execute the environment is empty: the next job has its own streams."""
    with local() as env:
        first = env.from_batches(pa.table({"x": [1]})).collect()
        finish(env, tmp_path)
        second = env.from_batches(pa.table({"x": [2]})).collect()
        finish(env, tmp_path)

    assert (rows(first.to_arrow()), rows(second.to_arrow())) == ([(1,)], [(2,)])


@pytest.mark.slow
def test_old_checkpoints_and_rubbish_are_deleted(tmp_path: Path) -> None:
    """After the job: the newest checkpoint and the event log, no other folder, and no file without a reference."""
    table = numbers(3_000)
    with local() as env:
        out = (
            env.from_batches(table)
            .key_by("k", "x")
            .aggregate(n=tg.count())
            .to_table(str(tmp_path / "out"), mode="upsert", keys=["k", "x"])
        )
        job = finish(env, tmp_path / "checkpoints", settings={"interval": "10ms", "inline_threshold": 0})

    (newest,) = job.checkpoints()
    folders = sorted(p.name for p in (tmp_path / "checkpoints" / job.job_id).iterdir())
    assert folders == sorted([newest.path.rsplit("/", 1)[1], "events", "lease"])
    referenced = {tmp_path / "out" / path for path in out.log.referenced_paths()}
    assert set((tmp_path / "out" / "data").rglob("*.parquet")) == referenced


def test_vertices_tell_what_came_through_while_the_job_runs_and_after_it(tmp_path: Path) -> None:
    """Rows and bytes of each vertex; afterwards nothing is going on any more, and the totals stay."""
    with opening(GatedSource(20, gates=[10])) as source, local() as env:
        env.from_source(source, parallelism=1).key_by("k").aggregate(n=tg.count()).collect()
        job = env.execute("watched", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        job.savepoint(tmp_path / "savepoint", "4min")
        reads, counts = job.vertices()
        assert (reads.parallelism, [each.subtask for each in counts.subtasks]) == (1, [0, 1])
        assert (reads.records_in, reads.records_out, counts.records_in) == (10, 10, 10)
        assert reads.subtasks[0].bytes_out == sum(each.bytes_in for each in counts.subtasks) > 0
        source.open_all()
        job.wait("4min")
        assert [vertex.records_in for vertex in job.vertices()] == [20, 20]
        assert all(each == each.at_rest for vertex in job.vertices() for each in vertex.subtasks)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("ray-memory://other", "the savepoint would be written to ray-memory://other, the memory of a Ray actor"),
        (
            "ftp://host/folder",
            "'ftp' is not one of '/folder', 'file://', 's3://', 'gs://', 'abfs://', 'hdfs://', 'memory://'",
        ),
        ("file:/folder", "write 'file://…'"),
    ],
)
def test_a_savepoint_goes_where_it_outlives_the_job(target: str, reason: str) -> None:
    """Savepoint and stop refuse another target before the job is asked, as on Ray."""
    job = Job(SimpleNamespace(), JobId("job-1"), "job", "ray-memory://job", open_store=open_store_on_ray)  # type: ignore[arg-type]
    for request in (lambda: job.savepoint(target), lambda: job.stop(savepoint=target)):
        with pytest.raises(tg.ConfigurationError, match=re.escape(reason)):
            request()
