"""A savepoint of a job that was drained is an end: it has no watermark that new rows would be late for, and no work."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening, rows

import tidegate as tg
from tidegate import recovery

ROWS, GATE = 40, 20


def program(
    env: tg.StreamEnvironment, source: GatedSource, folder: Path, more: GatedSource | None = None
) -> list[tg.OutputTable]:
    """Everything that remembers how far event time has come: windows, a join, and rows that are told once."""
    stream = env.from_source(source, uid="source")
    if more is not None:
        stream = stream.union(env.from_source(more, uid="more"))
    timed = stream.assign_timestamps("x", uid="timed")
    once = timed.key_by("k").deduplicate(ttl=3, uid="once")
    pairs = once.interval_join(timed, on="k", between=(0, 0), uid="pairs")
    counts = once.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count(), uid="windows")
    named = {"pairs": pairs, "counts": counts}
    return [stream.to_table(str(folder / name), uid=f"{name} table") for name, stream in named.items()]


def execute(env: tg.StreamEnvironment, folder: Path, restore: str | None = None) -> tg.Job:
    """The job, without checkpoints that nobody asks for."""
    return env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)


@pytest.fixture
def drained(tmp_path: Path) -> str:
    """The savepoint of a job that was drained with half of its rows unread."""
    with opening(GatedSource(ROWS, gates=[GATE])) as source, local() as env:
        program(env, source, tmp_path)
        job = execute(env, tmp_path)
        source.await_gate(GATE)
        return job.stop(drain=True, savepoint=str(tmp_path / "savepoints"), timeout="4min")


def test_a_drained_savepoint_has_no_event_time(drained: str) -> None:
    """All operators have finished, and keep nothing; only sources say how far they are."""
    operators = recovery.inspect(drained).operators
    assert all(operator.finished for operator in operators)
    assert [operator.uid for operator in operators if operator.size_bytes] == ["source"]


def test_a_job_that_is_restored_from_a_drain_ends_at_once_and_says_why(
    drained: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows that were left are not read: none of them is taken for late, and none changes what has come out."""
    with local(3) as env:
        tables = program(env, GatedSource(ROWS), tmp_path)
        before = [rows(table.to_arrow()) for table in tables]
        assert all(before)
        with caplog.at_level(logging.WARNING, "tidegate"):
            job = execute(env, tmp_path, drained)
        assert job.wait("4min") == "finished"
        assert [rows(table.to_arrow()) for table in tables] == before
    assert "because the job was stopped with a drain there: the job reads no rows and ends at once" in caplog.text


def test_a_new_source_before_what_was_drained_is_refused(drained: str, tmp_path: Path) -> None:
    """Its rows would all come after the end of event time."""
    with local() as env:
        program(env, GatedSource(ROWS), tmp_path, GatedSource(ROWS))
        with pytest.raises(tg.ConfigurationError, match="restore from a checkpoint before the end"):
            execute(env, tmp_path, drained)


@pytest.mark.slow
def test_a_stop_without_drain_makes_no_row_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Event time is where it was: the second job writes what one job would have written, and warns of nothing."""
    with opening(GatedSource(ROWS, gates=[GATE])) as source, local() as env:
        program(env, source, tmp_path)
        job = execute(env, tmp_path)
        source.await_gate(GATE)
        path = job.stop(savepoint=str(tmp_path / "savepoints"), timeout="4min")
    with local(3) as env:
        pairs, counts = program(env, GatedSource(ROWS), tmp_path)
        with caplog.at_level(logging.WARNING, "tidegate"):
            assert execute(env, tmp_path, path).wait("4min") == "finished"
        assert pairs.to_arrow().num_rows == ROWS
        assert sum(counts.to_arrow()["n"].to_pylist()) == ROWS
    assert "had finished" not in caplog.text
