"""Jobs over streaming DataFrames: each row once, whatever is restarted; a query lives as long as its job."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from fake_queries import SETTINGS, FakeQuery, FakeStream, Streaming
from local_jobs import WAIT_S, config, local, thought_dead
from waiting import until

import tidegate as tg
from tidegate.api.job_with_services import JobWithServices
from tidegate.spark_bridge.streams.stream_feed import StreamFeed
from tidegate.storage.errors import ConfigurationError, JobFailedError
from tidegate.storage.files.file_system_store import open_store


def test_rows_are_in_the_table_once_and_go_from_the_log(streaming: Streaming) -> None:
    """Those that come later too; what checkpoints cover is deleted, up to the newest batch."""
    with local() as env:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        for value in range(10, 13):
            streaming.stream.put([value], [-value])
        streaming.until_all_are_there()
        log = streaming.log_of(job)
        until("all but the newest batch to go", lambda: log.batch_ids() == [4], log.batch_ids)
        until("their files to go", lambda: len(log.store.list("data")) == 1, lambda: log.store.list("data"))
        job.cancel()
        assert job.wait("4min") == "cancelled"


def test_a_job_that_fails_and_restarts_repeats_nothing(streaming: Streaming, tmp_path: Path) -> None:
    """Its query goes on meanwhile, and its tasks read from where their checkpoint was."""
    failed = tmp_path / "failed"

    def fail_once(row: dict[str, int]) -> dict[str, int]:
        if row["x"] == 13 and not failed.exists():
            failed.touch()
            raise ValueError("13 breaks the first time")
        return row

    streaming.row = fail_once
    with local() as env:
        job = streaming.execute(env, restart=tg.RestartStrategy.fixed_delay(attempts=3, delay="0s"))
        streaming.until_all_are_there()
        for value in range(10, 16):
            streaming.stream.put([value])
        streaming.until_all_are_there()
        assert job.progress().restarts == 1
        assert len(streaming.stream.active) == 1


def test_job_and_query_are_restarted_in_any_order(streaming: Streaming) -> None:
    """Cancelled and restored, with the last batch done again by Spark, and with rows that came in between."""
    for run in range(3):
        with local() as env:
            job = streaming.execute(env, restore="latest")
            streaming.until_all_are_there()
            job.cancel()
            assert job.wait("4min") == "cancelled"
        assert streaming.stream.active == []
        streaming.stream.put([100 + run], [200 + run])
        if run == 0:
            streaming.stream.forget_last()
    assert len(streaming.stream.checkpoints) == 1, "one query for all runs"


def test_a_driver_that_dies_is_followed_by_another(streaming: Streaming) -> None:
    """What its query still does is not written: the log has another owner, and every row is there once."""
    with local() as first, local() as second:
        job = streaming.execute(first)
        streaming.until_all_are_there()
        path = job.savepoint(str(streaming.savepoints))
        thought_dead(job)
        streaming.execute(second, restore=path)
        for value in range(10, 15):
            streaming.stream.put([value])
        streaming.until_all_are_there()
        until("the first one's end", lambda: job.status() == "failed", job.progress)


def test_a_job_goes_on_from_a_savepoint(streaming: Streaming) -> None:
    """Which ended it, and its query; batches that came since are read first of all."""
    with local() as env:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        path = job.stop(savepoint=str(streaming.savepoints))
        assert streaming.stream.active == []
        streaming.stream.put([7], [8])
        streaming.execute(env, restore=path)
        streaming.until_all_are_there()


def test_the_log_is_found_when_the_jobs_in_between_are_forgotten(streaming: Streaming) -> None:
    """A line of jobs, of which a user has deleted what the middle one had left."""
    jobs = []
    with local() as env:
        for run in range(4):
            job = streaming.execute(env, restore="latest")
            streaming.until_all_are_there()
            job.cancel()
            assert job.wait("4min") == "cancelled"
            jobs.append(job)
            streaming.stream.put([50 + run])
            if run == 2:
                for old in jobs[:2]:
                    for checkpoint in (streaming.root / old.job_id).glob("chk-*"):
                        shutil.rmtree(checkpoint)
    assert streaming.log_of(jobs[-1]).url == streaming.log_of(jobs[0]).url


def test_a_query_that_fails_ends_its_job_with_the_cause(streaming: Streaming) -> None:
    """Checkpoints stay as after any failure, also where those of cancelled jobs go, and a restored job goes on."""
    settings = {"retention": "delete_on_cancellation"}
    with local() as env:
        job = streaming.execute(env, settings=settings)
        streaming.until_all_are_there()
        attached = env.attach("job")
        streaming.stream.broken = OSError("no such topic")
        for handle in (job, attached):
            with pytest.raises(JobFailedError, match=r"of source 'stream' has failed: OSError: no such topic\. Mend"):
                handle.wait("4min")
            assert handle.status() == "failed"
        assert job.checkpoints()
        streaming.stream.broken = None
        streaming.stream.put([7])
        streaming.execute(env, restore="latest")
        streaming.until_all_are_there()


def test_a_query_that_somebody_stops_ends_its_job(streaming: Streaming) -> None:
    """Else the job would wait for rows for ever."""
    with local() as env:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        streaming.stream.active[0].stop()
        with pytest.raises(JobFailedError, match="was stopped from outside"):
            job.wait("4min")


def test_a_query_ends_with_its_environment(streaming: Streaming) -> None:
    """Not later than the call that closes it."""
    with local() as env:
        streaming.execute(env)
        streaming.until_all_are_there()
        assert len(streaming.stream.active) == 1
    assert streaming.stream.active == []


def test_a_query_ends_with_a_job_that_is_drained(streaming: Streaming) -> None:
    """What is in the log is read, and the job has finished."""
    with local() as env:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        job.stop(drain=True, savepoint=str(streaming.savepoints))
        assert job.status() == "finished"
        assert streaming.stream.active == []


def test_a_query_ends_with_a_job_that_fails(streaming: Streaming) -> None:
    """Whoever has waited for the job finds no query."""

    def fail(row: dict[str, int]) -> dict[str, int]:
        raise ValueError("no row is good enough")

    streaming.row = fail
    with local() as env:
        job = streaming.execute(env)
        with pytest.raises(JobFailedError, match="no row is good enough"):
            job.wait("4min")
        assert streaming.stream.active == []


def test_a_job_is_restored_while_it_is_being_cancelled(streaming: Streaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has waited for its end: the next job does, whose query begins when the first has ended."""
    reached, go = threading.Event(), threading.Event()
    wait = JobWithServices.wait

    def hold(row: dict[str, int]) -> dict[str, int]:
        if row["x"] == 13:
            reached.set()
            assert go.wait(WAIT_S)
        return row

    def go_and_wait(self: JobWithServices, timeout_s: float | None) -> object:
        go.set()
        return wait(self, timeout_s)

    streaming.row = hold
    with local() as env:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        streaming.stream.put([13])
        until("the row", reached.is_set)
        job.cancel()
        monkeypatch.setattr(JobWithServices, "wait", go_and_wait)
        streaming.execute(env, restore="latest")
        streaming.until_all_are_there()
    assert streaming.stream.most_active == 1


def test_a_query_has_ended_before_the_next_job_begins_one(
    streaming: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another handle has cancelled the job, which says that its tasks are over and knows of no query."""
    leave = threading.Event()
    stop, wait = FakeQuery.stop, StreamFeed.wait

    def stop_slowly(self: FakeQuery) -> None:
        assert leave.wait(WAIT_S)
        stop(self)

    def wait_and_leave(self: StreamFeed, timeout_s: float | None) -> bool:
        if timeout_s is None:
            leave.set()
        return wait(self, timeout_s)

    monkeypatch.setattr(FakeQuery, "stop", stop_slowly)
    monkeypatch.setattr(StreamFeed, "wait", wait_and_leave)
    with local() as env:
        streaming.execute(env)
        streaming.until_all_are_there()
        attached = env.attach("job")
        attached.cancel()
        assert attached.wait("4min") == "cancelled"
        assert len(streaming.stream.active) == 1
        streaming.execute(env, restore="latest")
        streaming.stream.put([7])
        streaming.until_all_are_there()
    assert streaming.stream.most_active == 1


def test_another_job_cannot_feed_the_log_of_one_that_lives(streaming: Streaming) -> None:
    """Restored from its checkpoint under another name, it is refused when it is submitted."""
    with local() as env, local() as other:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        path = job.savepoint(str(streaming.savepoints))
        table, streaming.out = streaming.table, streaming.out.with_name("other")
        with pytest.raises(ConfigurationError, match=r"job 'job' .* feeds the log .* stop or cancel that one first"):
            streaming.execute(other, "another", restore=path)
        streaming.table = table
        streaming.stream.put([7])
        streaming.until_all_are_there()
        assert job.status() == "running"


def test_savepoints_hold_their_rows(streaming: Streaming) -> None:
    """In the folder that is set for savepoints: rows since then stay in the log, and are read again."""
    with local() as env:
        job = streaming.execute(env, settings={"savepoints": str(streaming.savepoints)})
        streaming.until_all_are_there()
        path = job.savepoint()
        for value in range(10, 13):
            streaming.stream.put([value])
        streaming.until_all_are_there()
        job.trigger_checkpoint()
        log = streaming.log_of(job)
        until("batches before the savepoint to go", lambda: log.batch_ids()[0] == 2, log.batch_ids)
        job.cancel()
        assert job.wait("4min") == "cancelled"
        assert log.batch_ids() == [2, 3, 4]
        streaming.out = streaming.out.with_name("again")
        streaming.execute(env, restore=path)
        until("rows since the savepoint", lambda: streaming.values() == [10, 11, 12], streaming.values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"interval": None}}, "without periodic checkpoints .*Set an interval"),
        ({"detached": True}, "detached"),
        ({"settings": {"storage": "memory://streams"}}, "cannot go to memory:.*executors are other processes"),
    ],
)
def test_what_cannot_work_is_refused(streaming: Streaming, options: dict[str, object], message: str) -> None:
    """When it is submitted; no query has begun."""
    settings = {"storage": str(streaming.root), **SETTINGS, **options.pop("settings", {})}  # type: ignore[dict-item]
    with local() as env:
        env.from_dataframe(streaming.stream, uid="stream").to_table(str(streaming.out))  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=message):
            env.execute("job", checkpoints=tg.CheckpointConfig(**settings), **options)  # type: ignore[arg-type]
    assert streaming.stream.active == []


def test_other_columns_than_those_of_the_log_are_refused(streaming: Streaming) -> None:
    """A restored job gets the rows that are there."""
    with local() as env:
        job = streaming.execute(env)
        streaming.until_all_are_there()
        job.cancel()
        assert job.wait("4min") == "cancelled"
        streaming.stream = FakeStream("y")
        rows = env.from_dataframe(streaming.stream, uid="stream")  # type: ignore[arg-type]
        rows.map(streaming.row, schema=pa.schema([("x", pa.int64())]), uid="row").to_table(
            str(streaming.out), uid="table"
        )
        with pytest.raises(
            ConfigurationError, match=r"has columns \(y: int64\).*have \(x: int64\).*start without restore"
        ):
            env.execute("job", checkpoints=config(streaming.root, **SETTINGS), restore="latest")


def test_settings_of_streams_are_checked(streaming: Streaming) -> None:
    """Where the stream begins."""
    with local() as env:
        for wrong, message in (({"trigger": "soon"}, "trigger"), ({"log_limit": "much"}, "log_limit")):
            with pytest.raises(ConfigurationError, match=message):
                env.from_dataframe(streaming.stream, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting", [{"idleness": "1s"}, {"trigger": "1s"}, {"log_limit": "1mb"}, {"spark_checkpoint": "s3a://bucket"}]
)
def test_settings_of_streams_are_refused_for_bounded_ones(streaming: Streaming, setting: dict[str, str]) -> None:
    """Which have no query, no lanes and no log: the error names what is to go."""
    streaming.stream.isStreaming = False
    with (
        local() as env,
        pytest.raises(ConfigurationError, match=f"this one is bounded: remove {next(iter(setting))}"),
    ):
        env.from_dataframe(streaming.stream, **setting)  # type: ignore[arg-type]


def test_spark_keeps_its_checkpoint_where_it_is_told(streaming: Streaming) -> None:
    """In a folder of the log's own; without a word beside the log."""
    with local() as env:
        # A table of its own: its first checkpoint may complete before it is cancelled.
        env.from_dataframe(streaming.stream, uid="stream", spark_checkpoint="s3a://bucket/spark/").to_table(  # type: ignore[arg-type]
            f"{streaming.out}-of-the-first"
        )
        job = env.execute("job", checkpoints=config(streaming.root, **SETTINGS))
        until("the query", lambda: streaming.stream.active)
        (place,) = streaming.stream.checkpoints
        assert place == f"s3a://bucket/spark/{streaming.log_of(job).header().log_id}"
        job.cancel()
        assert job.wait("4min") == "cancelled"
        job = streaming.execute(env, "other")
        until("the other query", lambda: len(streaming.stream.checkpoints) == 2)
        assert f"file://{streaming.log_of(job).url}/spark" in streaming.stream.checkpoints
    assert open_store(str(streaming.root)).list("")
