"""A job that goes on where another one stopped: every row counts once, whatever happened in between."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import (
    NO_RESTART,
    WAIT_S,
    GatedSource,
    WatchedStore,
    await_events,
    config,
    is_commit,
    local,
    nothing,
    opening,
    rows,
)

import tidegate as tg
from tidegate import recovery
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import StorageError

ROWS, STOP = 60, 25


def pipeline(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tuple[tg.OutputTable, ...]:
    """All rows as they are, running sums in an upsert table, and final sums."""
    stream = env.from_source(source, uid="source")
    keyed = stream.key_by("k")
    return (
        stream.to_table(str(folder / "all"), uid="all"),
        keyed.aggregate(n=tg.count(), total=tg.sum("x"), name="running", uid="running").to_table(
            str(folder / "running"), mode="upsert", keys=["k"], uid="running-out"
        ),
        keyed.aggregate(n=tg.count(), total=tg.sum("x"), emit="final", name="final", uid="final").to_table(
            str(folder / "final"), uid="final-out"
        ),
    )


def check(tables: tuple[tg.OutputTable, ...], source: GatedSource) -> None:
    """The tables hold what a batch computation over the whole input gives."""
    frame = pl.from_arrow(source.table())
    assert isinstance(frame, pl.DataFrame)
    sums = frame.group_by("k").agg(pl.len().cast(pl.Int64).alias("n"), pl.col("x").sum().alias("total"))
    everything, running, final = (rows(table.to_arrow()) for table in tables)
    assert everything == rows(frame)
    assert running == rows(sums)
    assert final == rows(sums)


def interrupted(
    folder: Path, parallelism: int = 2, checkpoints: int = 1, rows_max: int = 7, **settings: object
) -> tuple[tg.Job, list[str]]:
    """A job that is cancelled in the middle of its input, some rows after its newest checkpoint; their paths."""
    gates = [STOP + i for i in range(checkpoints)] + [STOP + checkpoints + 5]
    with opening(GatedSource(ROWS, ROWS, gates=gates)) as source, local(parallelism, rows_max) as env:
        pipeline(env, source, folder)
        job = env.execute("resumed", checkpoints=config(folder / "checkpoints", **settings), restart=NO_RESTART)
        paths = []
        for gate in gates[:-1]:
            source.await_gate(gate)
            paths.append(job.trigger_checkpoint("4min"))
            source.open_gate(gate)
        source.await_gate(gates[-1])
        job.cancel()
        assert job.wait("4min") == "cancelled"
    return job, paths


def resume(folder: Path, restore: str | None, parallelism: int = 2, name: str = "resumed") -> tg.Job:
    """The same program again, to its end; its tables are right then."""
    source = GatedSource(ROWS, ROWS)
    with local(parallelism) as env:
        tables = pipeline(env, source, folder)
        job = env.execute(name, checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)
        assert job.wait("4min") == "finished"
    check(tables, source)
    return job


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_cancelled_job_goes_on_from_its_newest_checkpoint(tmp_path: Path, parallelism: int) -> None:
    """restore="latest", also at another parallelism: invariant 9."""
    old, (path,) = interrupted(tmp_path)

    new = resume(tmp_path, "latest", parallelism)

    assert new.job_id != old.job_id
    assert new.checkpoints()[-1].path.startswith(f"{tmp_path}/checkpoints/{new.job_id}")
    submitted = next(e for e in new.events() if type(e).__name__ == "JobSubmitted")
    assert submitted.spec.restore.pointer == path


def test_a_job_goes_on_from_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    """By path, under another name, and from an older checkpoint: what came after it is hidden and made again."""
    _, (first, _) = interrupted(tmp_path, checkpoints=2, num_retained=2)

    resume(tmp_path, first, name="another name")


def test_a_restored_job_can_be_restored(tmp_path: Path) -> None:
    """Twice interrupted, then finished."""
    interrupted(tmp_path)
    source = GatedSource(ROWS, ROWS, gates=[STOP + 20])
    with opening(source), local(3) as env:
        pipeline(env, source, tmp_path)
        job = env.execute("resumed", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore="latest")
        source.await_gate(STOP + 20)
        job.trigger_checkpoint("4min")
        job.cancel()
        job.wait("4min")

    resume(tmp_path, "latest")


def test_a_finished_job_has_nothing_left_to_do(tmp_path: Path) -> None:
    """Restored from its final checkpoint a job is finished at once, and its tables stay as they are."""
    first = resume(tmp_path, None)
    second = resume(tmp_path, "latest")

    assert second.progress().attempt == 0
    assert [type(e).__name__ for e in second.events()] == ["CoordinatorStarted", "JobSubmitted"]
    assert first.checkpoints()


def test_latest_of_a_job_that_never_ran_starts_afresh(tmp_path: Path) -> None:
    """So that a script can always say restore="latest"."""
    resume(tmp_path, "latest")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With two retained the job goes on from the one before, says so, and its tables are right all the same."""
    _, (first, second) = interrupted(tmp_path, checkpoints=2, num_retained=2, inline_threshold=0)
    victim = next(p for p in sorted(Path(second).iterdir()) if p.name.startswith("final"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))

    job = resume(tmp_path, "latest")

    submitted = next(e for e in job.events() if type(e).__name__ == "JobSubmitted")
    assert submitted.spec.restore.pointer == first
    assert "is damaged and skipped" in caplog.text


def test_state_without_an_operator_is_refused(tmp_path: Path) -> None:
    """A renamed operator would silently start empty: the error says which uid is missing and which there are."""
    interrupted(tmp_path)
    with local() as env:
        stream = env.from_source(GatedSource(ROWS, ROWS), uid="source")
        stream.key_by("k").aggregate(n=tg.count(), uid="renamed").collect()
        with pytest.raises(tg.ConfigurationError, match=r"has state of operator 'final'.*renamed.*give the operator"):
            env.execute("resumed", checkpoints=config(tmp_path / "checkpoints"), restore="latest")


def test_state_may_be_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With consent, as in Flink: the operators that are left go on, what goes is said, and tables of it stay."""
    interrupted(tmp_path)
    source = GatedSource(ROWS, ROWS)
    with local(3) as env:
        stream = env.from_source(source, uid="source")
        sums = stream.key_by("k").aggregate(n=tg.count(), total=tg.sum("x"), name="running", uid="running")
        table = sums.to_table(str(tmp_path / "running"), mode="upsert", keys=["k"], uid="running-out")
        job = env.execute(
            "resumed",
            checkpoints=config(tmp_path / "checkpoints"),
            restart=NO_RESTART,
            restore="latest",
            allow_non_restored_state=True,
        )
        assert job.wait("4min") == "finished"

    frame = pl.from_arrow(source.table())
    assert isinstance(frame, pl.DataFrame)
    assert rows(table.to_arrow()) == rows(
        frame.group_by("k").agg(pl.len().cast(pl.Int64).alias("n"), pl.col("x").sum().alias("total"))
    )
    assert "The state of operator 'final'" in caplog.text
    assert "'running'" not in caplog.text


@pytest.mark.parametrize("set_again", [None, 7])
def test_a_job_keeps_the_number_of_key_groups_for_life(tmp_path: Path, set_again: int | None) -> None:
    """It is that of the checkpoint where the program does not say, and refused where it says another one."""
    data = pa.table({"k": list(range(100)), "x": [1] * 100})

    def execute(env: tg.StreamEnvironment, restore: str | None) -> tg.Job:
        stream = env.from_batches(data, uid="source").key_by("k")
        stream.aggregate(n=tg.count(), uid="sums").to_table(str(tmp_path / "out"), mode="upsert", keys=["k"], uid="out")
        return env.execute("groups", checkpoints=config(tmp_path / "checkpoints"), restore=restore)

    with tg.StreamEnvironment.local(2, max_parallelism=7) as env:
        job = execute(env, None)
        assert job.wait("4min") == "finished"
    assert {info.max_parallelism for info in recovery.inspect(job.checkpoints()[-1].path).operators} == {7}

    with tg.StreamEnvironment.local(3, max_parallelism=set_again) as env:
        assert execute(env, "latest").wait("4min") == "finished"
    with (
        tg.StreamEnvironment.local(2, max_parallelism=8) as env,
        pytest.raises(tg.ConfigurationError, match=r"max_parallelism is 7 in checkpoint .* and 8 in the job"),
    ):
        execute(env, "latest")
    with tg.StreamEnvironment.local(8) as env, pytest.raises(tg.ConfigurationError, match="parallelism 8 is more than"):
        execute(env, "latest")


@pytest.mark.parametrize("number", [0, -1])
def test_a_parallelism_that_cannot_be_is_refused(number: int) -> None:
    """Where it is given or set. What was set before stays."""
    text = f"^parallelism={number}: give a whole number of at least 1"
    with pytest.raises(tg.ConfigurationError, match=text):
        tg.StreamEnvironment.local(number)
    with tg.StreamEnvironment.local(2) as env:
        with pytest.raises(tg.ConfigurationError, match=text):
            env.parallelism = number
        assert env.parallelism == 2


@pytest.mark.parametrize("number", [0, -1, 32_769, True, 1.5, "2"])
def test_a_number_of_key_groups_that_cannot_be_is_refused(number: object) -> None:
    """Where it is given."""
    text = f"max_parallelism={number!r}: give a whole number from 1 to 32,768"
    with pytest.raises(tg.ConfigurationError, match=text):
        tg.StreamEnvironment.local(max_parallelism=number)  # type: ignore[arg-type]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_what_had_finished_before_the_checkpoint_does_not_run_again(tmp_path: Path, parallelism: int) -> None:
    """A source, and a subtask of another, are at their end when the checkpoint is taken: their rows do not return."""
    small = pa.table({"k": [100, 101], "x": [1, 2]}, GatedSource.schema)

    def program(env: tg.StreamEnvironment, source: GatedSource) -> tg.OutputTable:
        ended = env.from_batches(small, uid="ended").filter(lambda row: True, uid="pass")
        sums = ended.union(env.from_source(source, uid="source")).key_by("k")
        return sums.aggregate(n=tg.count(), emit="final", uid="sums").to_table(str(tmp_path / "out"), uid="out")

    with opening(GatedSource(ROWS, 10, gates=[STOP])) as source, local(2) as env:
        program(env, source)
        job = env.execute("ended", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(STOP)
        await_events(job, "TaskReachedEndOfData", 3)
        metadata = recovery.inspect(job.trigger_checkpoint("4min")).metadata
        job.cancel()
        job.wait("4min")
    finished = {(s.vertex, s.subtask): s.finished for s in metadata.subtasks}
    assert (finished["ended", 0], finished["ended", 1]) == (True, True)
    assert (finished["source", 0], finished["source", 1]) == (False, True)

    source = GatedSource(ROWS, 10)
    with local(parallelism) as env:
        table = program(env, source)
        checkpoints = config(tmp_path / "checkpoints")
        env.execute("ended", checkpoints=checkpoints, restart=NO_RESTART, restore="latest").wait("4min")
    counts = pl.Series([*source.table()["k"].to_pylist(), 100, 101]).value_counts()
    assert rows(table.to_arrow()) == sorted(counts.rows(), key=repr)


def test_collected_rows_of_before_are_kept(tmp_path: Path) -> None:
    """to_arrow gives the rows of the whole input, those collected by the interrupted job included."""
    with opening(GatedSource(ROWS, gates=[STOP])) as source, local(1) as env:
        env.from_source(source, uid="source").collect(uid="rows")
        job = env.execute("collected", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(STOP)
        job.trigger_checkpoint("4min")
        job.cancel()
        job.wait("4min")
    with local(2) as env:
        collected = env.from_source(GatedSource(ROWS), uid="source").collect(uid="rows")
        env.execute("collected", checkpoints=config(tmp_path), restart=NO_RESTART, restore="latest").wait("4min")

    assert sorted(collected.to_arrow()["x"].to_pylist()) == list(range(ROWS))


def test_a_program_may_grow(tmp_path: Path) -> None:
    """An operator that the checkpoint does not know starts empty; the others go on."""
    interrupted(tmp_path)
    source = GatedSource(ROWS, ROWS)
    with local() as env:
        tables = pipeline(env, source, tmp_path)
        late = env.from_batches(pa.table({"x": [1, 2, 3]}), uid="late").collect(uid="late-rows")
        job = env.execute("resumed", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore="latest")
        assert job.wait("4min") == "finished"

    check(tables, source)
    assert sorted(late.to_arrow()["x"].to_pylist()) == [1, 2, 3]


def test_every_checkpoint_that_was_not_shown_is_shown_by_the_restore(tmp_path: Path) -> None:
    """Checkpoints complete while the table's storage is away; the job fails, and the restored one shows them all."""
    away = threading.Event()
    held: list[str] = []

    def hold(path: str) -> None:
        if is_commit(path):
            held.append(path)
            assert away.wait(WAIT_S)
            raise StorageError("the table's storage is away")

    gates = [20, 30, 40]
    with opening(GatedSource(ROWS, gates=gates)) as source:
        runtime = LocalRuntime(lambda url: WatchedStore(url, before=hold, after=nothing))
        env = tg.StreamEnvironment(runtime, 1, options=tg.DataPlaneOptions(source_rows_max=10))
        env.from_source(source, uid="source").to_table(str(tmp_path / "out"), uid="out")
        submission = env.plan("unshown", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        running = runtime.submit(replace(submission, spec=replace(submission.spec, storage_outage_ms=0)))
        for gate in gates:
            source.await_gate(gate)
            running.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S)
            source.open_gate(gate)
        away.set()
        progress = running.wait(WAIT_S)
    assert progress is not None
    assert (progress.status, progress.completed_checkpoints >= 3, len(held)) == ("failed", True, 1)
    assert "a job restored from it commits them" in (progress.reason or "")

    with local(1) as again:
        table = again.from_source(GatedSource(ROWS), uid="source").to_table(str(tmp_path / "out"), uid="out")
        job = again.execute(
            "unshown", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore="latest"
        )
        assert job.wait("4min") == "finished"
    assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(ROWS))
