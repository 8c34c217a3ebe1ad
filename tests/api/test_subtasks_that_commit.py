"""Sinks that commit in their tasks: each subtask commits after the checkpoint completed, and again after a restore."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from committing_sinks import FileWriter, SqliteCommitter, SqliteLedger
from local_jobs import NO_RESTART, GatedSource, config, fails_once, finish, local, opening
from waiting import files_below, until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.drivers import committing_sinks
from tidegate.storage.errors import CorruptionError
from tidegate.testing import check_committing_sink

ROWS = pa.table({"k": [x % 5 for x in range(300)], "x": list(range(300))})


def _xs(rows: Iterable[dict[str, object]]) -> list[object]:
    return sorted(row["x"] for row in rows)  # type: ignore[type-var]


def test_the_sink_of_the_tests_keeps_the_contract(tmp_path: Path) -> None:
    """Rows appear with a commit, once however often that is repeated, whatever subtask commits."""
    sink = SqliteLedger(tmp_path / "out")
    check_committing_sink(sink, ROWS.to_batches(max_chunksize=100), sink.rows)


class _Forgetful(SqliteLedger):
    """Breaks one rule of the contract."""

    def __init__(self, path: Path, rule: str) -> None:
        super().__init__(path)
        self.rule = rule

    def open_committer(self, context: tg.CommittingContext) -> tg.Committer:
        return _ForgetfulCommitter(self.path, context, self.rule)


class _ForgetfulCommitter(SqliteCommitter):
    def __init__(self, path: str, context: tg.CommittingContext, rule: str) -> None:
        super().__init__(path, context)
        self._rule = rule

    def commit(self, token: tg.CommitToken, committables: Sequence[tg.Committable]) -> None:
        if self._rule == "tokens are not stored":
            self._db.execute("DELETE FROM tokens")
        elif self._rule == "tokens of other jobs count":
            token = tg.CommitToken("any job", token.checkpoint_id)
        elif self._rule == "only the first bucket is committed":
            committables = committables[:1]
        elif self._rule == "older checkpoints are not covered":
            self._db.execute("DELETE FROM tokens WHERE checkpoint > ?", (token.checkpoint_id,))
        super().commit(token, committables)


@pytest.mark.parametrize(
    "rule",
    [
        "tokens are not stored",
        "tokens of other jobs count",
        "only the first bucket is committed",
        "older checkpoints are not covered",
    ],
)
def test_the_contract_notices_each_broken_rule(tmp_path: Path, rule: str) -> None:
    """The checks can fail: rows that are lost or written twice are seen."""
    sink = _Forgetful(tmp_path / "out", rule)
    with pytest.raises(AssertionError, match=r"the sink has (lost|written)"):
        check_committing_sink(sink, ROWS.to_batches(max_chunksize=100), sink.rows)


def test_a_job_has_committed_all_rows_when_it_is_finished(tmp_path: Path) -> None:
    """The rows of the final checkpoint are visible before the job reports its end, from every subtask."""
    sink = SqliteLedger(tmp_path / "out")
    with local() as env:
        env.from_batches(ROWS, splits=2).to_sink(sink, uid="sink")
        finish(env, tmp_path / "checkpoints")
    assert _xs(sink.rows()) == list(range(300))
    assert {subtask for (subtask,) in sink.query("SELECT DISTINCT subtask FROM calls")} == {0, 1}


def test_rows_are_visible_after_their_checkpoint_and_not_before(tmp_path: Path) -> None:
    """A checkpoint makes the rows before it visible, while the job continues."""
    source, sink = GatedSource(100, 80, gates=(50,)), SqliteLedger(tmp_path / "out")
    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"))
        source.await_gate(50)
        assert sink.rows() == []
        job.trigger_checkpoint()
        until("the first half is visible", lambda: _xs(sink.rows()) == sorted([*range(50)] * 2))
        source.open_all()
        assert job.wait("4min") == "finished"
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())


@pytest.mark.slow
def test_rows_are_written_once_through_a_failure(tmp_path: Path) -> None:
    """A task fails after a checkpoint. Its successor commits that checkpoint again, which changes nothing."""
    source, flag = GatedSource(200, 150, gates=(100,)), tmp_path / "failed"

    sink = SqliteLedger(tmp_path / "out")
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
    calls = sink.query("SELECT checkpoint, count(DISTINCT attempt) FROM calls WHERE checkpoint = 1")
    assert calls == [(1, 2)], "the restored attempt has committed the checkpoint again"


_N = tg.ValueState("n", pa.int64())


class _Numbered(tg.ProcessFunction):
    """Replaces x by the number of the row among the rows of its key."""

    def open(self, context: tg.ProcessContext) -> None:
        self.n = context.state(_N)

    def process(self, row: dict[str, int], context: tg.ProcessContext) -> list[dict[str, int]]:
        self.n.update((self.n.value() or 0) + 1)
        return [{**row, "x": self.n.value()}]


class _BarredCommitter(SqliteCommitter):
    """Cannot commit while a file is there, and notes its calls."""

    def __init__(self, path: str, context: tg.CommittingContext) -> None:
        super().__init__(path, context)
        self._path = path

    def commit(self, token: tg.CommitToken, committables: Sequence[tg.Committable]) -> None:
        with Path(f"{self._path}.calls").open("a") as calls:
            calls.write(f"{token.checkpoint_id} ")
        if Path(f"{self._path}.barred").exists():
            raise OSError("the database is away")
        super().commit(token, committables)


class _Barred(SqliteLedger):
    def open_committer(self, context: tg.CommittingContext) -> tg.Committer:
        return _BarredCommitter(self.path, context)


def test_a_commit_is_repeated_until_it_succeeds(tmp_path: Path) -> None:
    """A system that is away for less than `storage_outage` costs nothing but time: the job does not restart."""
    barred = tmp_path / "out.barred"
    barred.touch()
    sink = _Barred(tmp_path / "out")
    with local() as env:
        env.from_batches(ROWS, splits=2).to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        calls = tmp_path / "out.calls"
        until("the commit was tried twice", lambda: calls.exists() and len(calls.read_text().split()) > 2)
        assert job.status() == "running", "the job is not finished before its rows are committed"
        barred.unlink()
        assert job.wait("4min") == "finished"
    assert _xs(sink.rows()) == list(range(300))


def test_checkpoints_that_are_not_committed_are_a_metric(tmp_path: Path) -> None:
    """For each subtask, while the system is away. The metric is 0 when all is committed."""
    barred = tmp_path / "out.barred"
    source, sink = GatedSource(100, 80, gates=(25, 50)), _Barred(tmp_path / "out")

    def pending() -> list[tuple[str, float]]:
        return [(metric.operator, metric.value) for metric in job.user_metrics().get("pendingCommits", ())]

    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink", name="numbers")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        until("nothing is pending", lambda: pending() == [("numbers", 0)] * 2, pending)
        barred.touch()
        source.await_gate(25)
        job.trigger_checkpoint()
        until("one checkpoint is pending", lambda: pending() == [("numbers", 1)] * 2, pending)
        source.open_gate(25)
        source.await_gate(50)
        job.trigger_checkpoint()
        until("two checkpoints are pending", lambda: pending() == [("numbers", 2)] * 2, pending)
        barred.unlink()
        until("all is committed", lambda: pending() == [("numbers", 0)] * 2, pending)
        assert _xs(sink.rows()) == sorted([*range(50)] * 2)
        source.open_all()
        assert job.wait("4min") == "finished"


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_restored_job_commits_what_the_one_before_has_not(tmp_path: Path, parallelism: int) -> None:
    """A commit fails for too long, and so does the job. A job that is restored commits, at any parallelism.

    A program without that sink is refused, and so is a sink with fewer buckets.
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
        with pytest.raises(tg.JobFailedError, match=r"sink 'to_sink' \(uid 'sink'\) failed.*the database is away"):
            job.wait("4min")
    assert sink.rows() == []
    barred.unlink()
    path = job.checkpoints()[-1].path
    with local(parallelism) as env:
        env.from_source(source, uid="source", parallelism=2).to_sink(sink, uid="another")
        with pytest.raises(tg.ConfigurationError, match="has prepared rows of the sink with uid 'sink'"):
            env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restore=path)
    with local(parallelism) as env:
        few = SqliteLedger(tmp_path / "other", buckets=3)
        env.from_source(source, uid="source", parallelism=2).to_sink(few, uid="sink")
        with pytest.raises(tg.ConfigurationError, match="the sink has 3 buckets now"):
            env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restore=path)
    with local(parallelism) as env:
        env.from_source(source, uid="source", parallelism=2).to_sink(sink, uid="sink")
        finish(env, tmp_path / "checkpoints", restore=path)
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())
    jobs = sink.query("SELECT DISTINCT job FROM tokens")
    assert len(jobs) == 2, "rows of the first job are committed under its own tokens"


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_commits_before_the_job_ends(tmp_path: Path, drain: bool) -> None:
    """Rows that the savepoint covers are visible when the job has ended. A restored job adds the rest."""
    source, sink = GatedSource(100, 80, gates=(50,)), SqliteLedger(tmp_path / "out")
    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"))
        source.await_gate(50)
        path = job.stop(drain=drain, savepoint=tmp_path / "savepoints")
        job.wait("4min")
    assert _xs(sink.rows()) == sorted([*range(50)] * 2)
    if drain:
        return
    with local(3) as env:
        env.from_source(source, uid="source", parallelism=2).to_sink(sink, uid="sink")
        finish(env, tmp_path / "checkpoints", restore=path)
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())


def test_a_savepoint_brings_the_files_of_rows_that_are_not_committed(tmp_path: Path) -> None:
    """A stop whose commit fails for too long leaves a savepoint with all that a commit needs, wherever it is moved."""
    barred = tmp_path / "out.barred"
    barred.touch()
    source, sink = GatedSource(100, 80, gates=(50,)), _Barred(tmp_path / "out")
    checkpoints = config(tmp_path / "checkpoints", storage_outage="50ms")
    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=checkpoints, restart=NO_RESTART)
        source.await_gate(50)
        path = Path(job.stop(savepoint=tmp_path / "savepoints"))
        with pytest.raises(tg.JobFailedError, match="the database is away"):
            job.wait("4min")
    barred.unlink()
    moved = tmp_path / "elsewhere" / path.name
    moved.parent.mkdir()
    path.rename(moved)
    for left in (tmp_path / "checkpoints").rglob("*.rows"):
        left.unlink()
    with local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        finish(env, tmp_path / "other", restore=str(moved))
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())


def test_a_changed_savepoint_brings_the_files_of_rows_that_are_not_committed(tmp_path: Path) -> None:
    """State before the sink, in the same tasks, is written again. The rows that the sink has prepared stay."""
    barred = tmp_path / "out.barred"
    barred.touch()
    source, sink = GatedSource(100, 80, gates=(50,)), _Barred(tmp_path / "out")
    checkpoints = config(tmp_path / "checkpoints", storage_outage="50ms")

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_source(source, uid="source", parallelism=2).key_by("k")
        rows.process(_Numbered(), schema=source.schema, uid="numbered").to_sink(sink, uid="sink")

    with opening(source), local() as env:
        build(env)
        job = env.execute("sinks", checkpoints=checkpoints, restart=NO_RESTART)
        source.await_gate(50)
        taken = job.stop(savepoint=tmp_path / "savepoints")
        with pytest.raises(tg.JobFailedError, match="the database is away"):
            job.wait("4min")
    barred.unlink()
    counts = recovery.read_state(taken, uid="numbered", state="n")
    changed = counts.set_column(1, "n", pa.compute.add(counts["n"], 1_000))
    with recovery.SavepointWriter(str(tmp_path / "changed"), base=taken) as savepoint:
        savepoint.with_keyed_state(uid="numbered", keys=["k"], state=_N, rows=changed)
    shutil.rmtree(tmp_path / "savepoints")
    for left in (tmp_path / "checkpoints").rglob("*.rows"):
        left.unlink()
    assert sink.rows() == []
    with local(3) as env:
        build(env)
        finish(env, tmp_path / "other", restore=savepoint.path, settings={"storage_outage": "1s"})
    numbered = [*range(1, 21), *range(1_021, 1_037)]
    assert _xs(sink.rows()) == sorted(numbered * 5), "20 rows of each key by the first job, and 16 by the second"


def test_files_of_committed_rows_are_deleted(tmp_path: Path) -> None:
    """Files in checkpoint storage go with the last checkpoint that refers to them."""
    source, sink = GatedSource(100, 80, gates=(25, 50)), SqliteLedger(tmp_path / "out")

    def files() -> set[str]:
        return {path.name for path in files_below(tmp_path / "checkpoints", ".rows")}

    with opening(source), local() as env:
        env.from_source(source, uid="source").to_sink(sink, uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"))
        source.await_gate(25)
        job.trigger_checkpoint()
        until("the first rows are visible", lambda: len(sink.rows()) == 50)
        first = files()
        assert first
        source.open_gate(25)
        source.await_gate(50)
        job.trigger_checkpoint()
        until("the first files are gone", lambda: not first & files())
        source.open_all()
        assert job.wait("4min") == "finished"
    assert _xs(sink.rows()) == _xs(source.table().to_pylist())


class _HangingCommitter(SqliteCommitter):
    """Does not come back from its first commit before a file is there."""

    def commit(self, token: tg.CommitToken, committables: Sequence[tg.Committable]) -> None:
        first = Path(self._db.execute("PRAGMA database_list").fetchone()[2] + ".first")
        if not first.exists():
            first.touch()
            until("the test lets the zombie go on", Path(f"{first}.goes-on").exists)
        super().commit(token, committables)


class _Hanging(SqliteLedger):
    def open_committer(self, context: tg.CommittingContext) -> tg.Committer:
        return _HangingCommitter(self.path, context)


@pytest.mark.slow
def test_a_commit_that_hangs_fails_its_task_and_comes_back_as_a_zombie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor commits the same rows. The call that comes back later finds their token, and adds nothing."""
    monkeypatch.setattr(committing_sinks, "CALL_LIMIT_MIN_MS", 0)
    sink = _Hanging(tmp_path / "out")
    with local(1) as env:
        env.from_batches(ROWS).to_sink(sink, uid="sink")
        checkpoints = config(tmp_path / "checkpoints", storage_outage="300ms")
        restart = tg.RestartStrategy.fixed_delay(3, "10ms")
        job = env.execute("sinks", checkpoints=checkpoints, restart=restart)
        assert job.wait("4min") == "finished"
        assert _xs(sink.rows()) == list(range(300))
        calls = len(sink.query("SELECT * FROM calls"))
        (tmp_path / "out.first.goes-on").touch()
        until("the zombie has called", lambda: len(sink.query("SELECT * FROM calls")) == calls + 1)
    assert _xs(sink.rows()) == list(range(300))


class _DamagedCommitter(SqliteCommitter):
    """Reads rows that have changed since they were staged."""

    def commit(self, token: tg.CommitToken, committables: Sequence[tg.Committable]) -> None:
        raise CorruptionError("the staged rows in f have changed")


class _Damaged(SqliteLedger):
    def open_committer(self, context: tg.CommittingContext) -> tg.Committer:
        return _DamagedCommitter(self.path, context)


def test_damaged_rows_fail_the_commit_at_once(tmp_path: Path) -> None:
    """It is not repeated for ten minutes. The error names sink and checkpoint."""
    with local(1) as env:
        env.from_batches(ROWS).to_sink(_Damaged(tmp_path / "out"), uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        message = (
            r"\(uid 'sink'\) failed on subtask 1 of 1 to commit .* of checkpoint \d+ .*staged rows in f have changed"
        )
        with pytest.raises(tg.JobFailedError, match=message):
            job.wait("4min")


class _Wrong(SqliteLedger):
    def __init__(self, path: Path, prepared: object) -> None:
        super().__init__(path)
        self._prepared = prepared

    def open_writer(self, context: tg.CommittingContext) -> tg.CommittingWriter:
        prepared = self._prepared

        class Writer(FileWriter):
            def prepare(self, checkpoint_id: int) -> Sequence[tg.Committable]:
                return prepared  # type: ignore[return-value]

        return Writer(context)


@pytest.mark.parametrize(
    ("prepared", "message"),
    [
        ("rows", r"must return a list of tg\.Committable, not str"),
        ([b"rows"], r"must return a list of tg\.Committable\(bucket, data\)"),
        ([tg.Committable(16, b"")], "has buckets 0 to 15: use one of"),
        ([tg.Committable(0, bytes(2 << 20))], "at most 1048576 go into a checkpoint"),
    ],
)
def test_wrong_committables_are_refused_with_the_step(tmp_path: Path, prepared: object, message: str) -> None:
    """Rows that could not be committed fail the task before a checkpoint has them."""
    with local(1) as env:
        env.from_batches(ROWS).to_sink(_Wrong(tmp_path / "out", prepared), uid="sink")
        job = env.execute("sinks", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match=rf"operator 'to_sink' \(uid 'sink'\).*{message}.*in prepare"):
            job.wait("4min")


def test_more_subtasks_than_buckets_are_refused(tmp_path: Path) -> None:
    """Each subtask needs a bucket, and a sink a usable number of them."""
    with local(4) as env:
        with pytest.raises(tg.ConfigurationError, match="4 subtasks cannot share the 3 buckets of SqliteLedger"):
            env.from_batches(ROWS).to_sink(SqliteLedger(tmp_path / "out", buckets=3))
        with pytest.raises(tg.ConfigurationError, match="buckets of SqliteLedger must be a whole number from 1"):
            env.from_batches(ROWS).to_sink(SqliteLedger(tmp_path / "out", buckets=0))


def test_changes_are_refused_unless_the_sink_accepts_them(tmp_path: Path) -> None:
    """A sink that accepts changes gets the column row_kind, and needs the keys."""

    class Changes(SqliteLedger):
        accepts_changes = True

    with local() as env:
        changes = env.from_batches(ROWS, splits=2).key_by("k").aggregate(x=tg.count(), emit="changes")
        with pytest.raises(tg.ConfigurationError, match="SqliteLedger cannot retract rows"):
            changes.to_sink(SqliteLedger(tmp_path / "out"), keys=["k"])
        with pytest.raises(tg.ConfigurationError, match="cannot retract rows"):
            changes.to_sink(Changes(tmp_path / "out"))
        changes.to_sink(Changes(tmp_path / "out"), keys=["k"], uid="changes")
        finish(env, tmp_path / "checkpoints")
