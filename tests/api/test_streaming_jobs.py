"""Jobs over streaming DataFrames: each row once, whatever is restarted; a query lives as long as its job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from fake_queries import FakeStream, without_spark
from local_jobs import NO_RESTART, config, local, thought_dead
from waiting import until

import tidegate as tg
from tidegate.spark_bridge.streams.batch_log import BatchLog
from tidegate.spark_bridge.streams.log_place import log_at
from tidegate.storage.errors import ConfigurationError, JobFailedError
from tidegate.storage.files.file_system_store import open_store

SETTINGS = {"interval": "20ms"}


@pytest.fixture(autouse=True)
def _queries() -> Iterator[None]:
    """Of streams that need no Spark."""
    with without_spark():
        yield


class Streaming:
    """A program over a stream, and where it keeps its things."""

    def __init__(self, folder: Path) -> None:
        self.stream = FakeStream()
        self.root, self.out, self.savepoints = folder / "checkpoints", folder / "out", folder / "savepoints"
        self.table: tg.OutputTable | None = None

    def execute(self, env: tg.StreamEnvironment, name: str = "job", **options: object) -> tg.Job:
        """Run it, with a checkpoint every 20 ms."""
        rows = env.from_dataframe(self.stream, uid="stream")  # type: ignore[arg-type]
        self.table = rows.map(self.row, schema=rows.schema, uid="row").to_table(str(self.out), uid="table")
        settings = {**SETTINGS, **options.pop("settings", {})}  # type: ignore[dict-item]
        options = {"restart": NO_RESTART, **options}
        return env.execute(name, checkpoints=config(self.root, **settings), **options)  # type: ignore[arg-type]

    def row(self, row: dict[str, int]) -> dict[str, int]:
        """What becomes of a row."""
        return row

    def values(self) -> list[int]:
        """What the table shows."""
        assert self.table is not None
        return sorted(self.table.to_arrow().column("x").to_pylist())

    def until_all_are_there(self) -> None:
        """Every row of the stream, once."""
        until("all rows", lambda: len(self.values()) >= len(self.stream.values), self.values)
        assert self.values() == self.stream.values

    def log_of(self, job: tg.Job) -> BatchLog:
        """The log that a job reads."""
        return BatchLog(log_at(f"{self.root}/{job.job_id}/taskowned/source-stream"))


@pytest.fixture
def streaming(tmp_path: Path) -> Streaming:
    """A stream with two batches."""
    program = Streaming(tmp_path)
    program.stream.put([1, 2, 3], [4, 5])
    program.stream.put([6])
    return program


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

    streaming.row = fail_once  # type: ignore[method-assign]
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
        until("the end of the query", lambda: streaming.stream.active == [])
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
        streaming.stream.broken = OSError("no such topic")
        with pytest.raises(JobFailedError, match=r"query of source 'stream' has failed: OSError: no such topic\. Mend"):
            job.wait("4min")
        assert job.status() == "failed"
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
        with pytest.raises(JobFailedError, match="somebody has stopped it"):
            job.wait("4min")


def test_a_query_ends_with_its_environment(streaming: Streaming) -> None:
    """Not later than the call that closes it."""
    with local() as env:
        streaming.execute(env)
        streaming.until_all_are_there()
        assert len(streaming.stream.active) == 1
    assert streaming.stream.active == []


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
        ({"settings": {"interval": None}}, "takes no periodic checkpoints: .*Set an interval"),
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
        pytest.raises(ConfigurationError, match=f"this one is bounded: leave {next(iter(setting))} out"),
    ):
        env.from_dataframe(streaming.stream, **setting)  # type: ignore[arg-type]


def test_spark_keeps_its_checkpoint_where_it_is_told(streaming: Streaming) -> None:
    """In a folder of the log's own; without a word beside the log."""
    with local() as env:
        env.from_dataframe(streaming.stream, uid="stream", spark_checkpoint="s3a://bucket/spark/").to_table(  # type: ignore[arg-type]
            str(streaming.out)
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
