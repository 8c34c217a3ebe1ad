"""Sinks of the user's write exactly once: what a completed checkpoint covers becomes visible, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, fails_once, finish, local, opening
from sink_contract import FolderSink, SqliteSink
from waiting import until

import tidegate as tg
from tidegate.actors.drivers import user_sinks
from tidegate.storage.errors import CorruptionError
from tidegate.testing import check_sink

ROWS = pa.table({"k": [x % 5 for x in range(300)], "x": list(range(300))})


def _xs(rows: Iterable[dict[str, object]]) -> list[object]:
    return sorted(row["x"] for row in rows)  # type: ignore[type-var]


@pytest.mark.parametrize("kind", [FolderSink, SqliteSink])
def test_sinks_of_the_tests_keep_the_contract(tmp_path: Path, kind: type[FolderSink | SqliteSink]) -> None:
    """Rows appear with a commit, once however often that is repeated; an end of a job drops what is its own."""
    sink = kind(tmp_path / "out")
    batches = ROWS.to_batches(max_chunksize=100)
    check_sink(sink, batches, sink.rows)


def test_the_contract_notices_a_commit_that_is_not_idempotent(tmp_path: Path) -> None:
    """The checks can fail: rows that a second commit writes again are seen."""

    class Twice(SqliteSink):
        def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
            super().commit(committables, context)
            if context.checkpoint_id == 3:
                super().commit([committable.replace(b"/2", b"/0") for committable in committables], context)

        def abort(self, job_id: str) -> None:
            """Forgets other jobs, too."""
            super().abort(job_id[:3])

    sink = Twice(tmp_path / "out")
    with pytest.raises(AssertionError):
        check_sink(sink, ROWS.to_batches(max_chunksize=100), sink.rows)


@pytest.mark.slow
def test_rows_are_written_once_through_a_failure(tmp_path: Path) -> None:
    """A task fails after a checkpoint: rows that it had covered are not written again, the others are not lost."""
    source, flag = GatedSource(200, 150, gates=(100,)), tmp_path / "failed"

    sink = SqliteSink(tmp_path / "out")
    with opening(source), local() as env:
        rows = env.from_source(source).map(fails_once(140, flag), schema=source.schema, traced=False)
        rows.to_sink(sink, uid="sink", flush_bytes=200)
        restart = tg.RestartStrategy.fixed_delay(3, "10ms")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restart=restart)
        source.await_gate(100)
        job.trigger_checkpoint()
        until("the first half is visible", lambda: _xs(sink.rows()) == sorted([*range(100)] * 2))
        source.open_all()
        assert job.wait("4min") == "finished"
    assert flag.exists()
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())
    assert sink.rows("staged") == [], "rows of the attempt that failed are dropped at the end of the job"


class _Barred(SqliteSink):
    """Cannot commit while a file is there."""

    def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
        if Path(f"{self.path}.barred").exists():
            raise OSError("the database is away")
        super().commit(committables, context)


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_restored_job_commits_what_the_one_before_has_not(tmp_path: Path, parallelism: int) -> None:
    """A checkpoint is complete, its commit fails for too long, and so the job: who restores it commits, and goes on.

    A program without that sink is refused.
    """
    barred = tmp_path / "out.barred"
    barred.touch()
    source, sink = GatedSource(100, 80, gates=(50,)), _Barred(tmp_path / "out")
    checkpoints = config(tmp_path / "checkpoints", retention="retain_on_cancellation", storage_outage="50ms")
    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=checkpoints, restart=NO_RESTART)
        source.await_gate(50)
        job.trigger_checkpoint()
        with pytest.raises(tg.JobFailedError, match=r"sink 'to_sink'.*failed to commit.*the database is away"):
            job.wait("4min")
    assert sink.rows() == []
    barred.unlink()
    with local(parallelism) as env:
        env.from_source(source, uid="source", parallelism=2).to_sink(sink, uid="sink")
        finish(env, tmp_path / "checkpoints", restore=job.checkpoints()[-1].path)
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())
    with local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="another")
        with pytest.raises(tg.ConfigurationError, match="uid 'sink' may not have committed"):
            env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restore=job.checkpoints()[-1].path)


class _Hangs(SqliteSink):
    """Does not come back from a commit before a file is there."""

    def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
        with Path(f"{self.path}.calls").open("a") as calls:
            calls.write(f"{context.checkpoint_id} ")
        gone_on = Path(f"{self.path}.goes-on")
        until("the test lets the commit go on", gone_on.exists)
        super().commit(committables, context)


def test_a_commit_has_time_where_storage_must_not_be_away(tmp_path: Path) -> None:
    """`storage_outage=0` is about failures, and not about how long a commit that works may take."""
    sink = SqliteSink(tmp_path / "out")
    with local() as env:
        env.from_batches(ROWS).to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints", storage_outage=0), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    assert len(sink.rows()) == ROWS.num_rows


@pytest.mark.slow
def test_a_commit_that_does_not_come_back_fails_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call may take as long as storage may be away. Then the job ends, with a text that says who was waited for.

    So does a submission that commits what the job before has left. Once the sink answers again, a restored job commits.
    """
    monkeypatch.setattr(user_sinks, "CALL_LIMIT_MIN_MS", 0)
    source, sink = GatedSource(100, 80, gates=(50,)), _Hangs(tmp_path / "out")
    checkpoints = config(tmp_path / "checkpoints", retention="retain_on_cancellation", storage_outage="200ms")
    hangs = r"sink 'to_sink' \(uid 'sink'\) did not commit \d committables.*the call has not returned within 0.2 s"
    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=checkpoints, restart=NO_RESTART)
        source.await_gate(50)
        job.trigger_checkpoint()
        with pytest.raises(tg.JobFailedError, match=hangs):
            job.wait("4min")
    assert (tmp_path / "out.calls").read_text().split() == ["1"], "calls must not overlap"
    with local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        with pytest.raises(tg.TidegateError, match=hangs):
            env.execute("sinks", checkpoints=checkpoints, restore=job.checkpoints()[-1].path)
    (tmp_path / "out.goes-on").touch()
    with local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        finish(env, tmp_path / "checkpoints", restore=job.checkpoints()[-1].path)
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())


@pytest.mark.slow
def test_updates_go_to_a_sink_that_replaces_rows_by_key(tmp_path: Path) -> None:
    """A running aggregate needs its keys; all rows of a key come from one subtask, the newest one last."""

    class Upserting(SqliteSink):
        def newest(self) -> dict[object, object]:
            found: dict[object, object] = {}
            for row in self.rows():
                found[row["k"]] = row["x"]
            return found

    sink = Upserting(tmp_path / "out")
    with local() as env:
        counted = env.from_batches(ROWS, splits=2).key_by("k").aggregate(x=tg.count())
        with pytest.raises(tg.ConfigurationError, match="would keep old versions"):
            counted.to_sink(sink)
        counted.to_sink(sink, keys=["k"])
        finish(env, tmp_path / "checkpoints")
    assert sink.newest() == dict.fromkeys(range(5), 60)


def test_mistakes_are_told(tmp_path: Path) -> None:
    """A class, something else, a size, an unknown key at submission; wrong committables with operator and method."""

    class Wrong(SqliteSink):
        def prepare(self) -> Iterable[bytes]:
            return ["a"]  # type: ignore[list-item]

    with local() as env:
        rows = env.from_batches(ROWS)
        with pytest.raises(tg.ConfigurationError, match="SqliteSink is a class"):
            rows.to_sink(SqliteSink)  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match=r"derived from tg\.Sink"):
            rows.to_sink(print)  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match="flush_bytes must be greater than 0"):
            rows.to_sink(SqliteSink(tmp_path / "out"), flush_bytes=0)
        with pytest.raises(tg.ConfigurationError, match="no column 'z'"):
            rows.to_sink(SqliteSink(tmp_path / "out"), keys=["z"])
        rows.to_sink(Wrong(tmp_path / "out"), name="mine")
        job = env.execute("wrong", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        with pytest.raises(
            tg.JobFailedError, match=r"'mine'.*committable of type str, and it must be bytes.*in prepare of Wrong"
        ):
            job.wait("4min")


class RefusedSink(tg.Sink):
    """A sink with a system that refuses the rows of the first checkpoint."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, batch: pa.RecordBatch) -> None:
        pass

    def prepare(self) -> list[bytes]:
        return [b"rows"]

    def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
        raise self._error


@pytest.mark.parametrize("kind", [tg.TableError, CorruptionError])
def test_a_commit_that_is_refused_fails_the_job_at_once(tmp_path: Path, kind: type[Exception]) -> None:
    """It is not repeated for ten minutes, as a commit that fails for a while is."""
    with local(1) as env:
        env.from_batches(pa.table({"x": [1]}), uid="rows").to_sink(RefusedSink(kind("x has changed")), uid="sink")
        job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"))
        with pytest.raises(
            tg.JobFailedError, match=r"\(uid 'sink'\) failed to commit .* of checkpoint \d+: .*x has changed"
        ):
            job.wait("4min")
