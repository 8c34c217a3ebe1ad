"""Jobs on Ray whose sources end at different times, and jobs that are stopped with a savepoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import waiting
from ray_jobs import Gated, until

import tidegate as tg
from tidegate.actors.coordinator.events import TaskFinished
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.connectors.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession

SPLITS = 8
ROWS, SHORT_ROWS, KEYS = 20_000, 500, 11
TABLE = pa.table({"k": [n % KEYS for n in range(ROWS)], "n": list(range(ROWS))})
SHORT = TABLE.slice(0, SHORT_ROWS)
EXPECTED = {
    key: sum(n for n in range(ROWS) if n % KEYS == key) + sum(n for n in range(SHORT_ROWS) if n % KEYS == key)
    for key in range(KEYS)
}


@pytest.fixture
def env(raydp_session: RayDPSession) -> Iterator[tg.StreamEnvironment]:
    """An environment over the session of all tests, without spare processes."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    with tg.StreamEnvironment(runtime, parallelism=1, options=tg.DataPlaneOptions(source_rows_max=500)) as environment:
        yield environment


def start(env: tg.StreamEnvironment, folder: Path, restore: str | None = None) -> tuple[tg.Job, tg.OutputTable]:
    """A short source, in a process of its own, and a long one that ends when `folder/gate` is there, summed by key."""
    short = env.from_batches(SHORT, splits=1, name="short", uid="short", slot_sharing_group="short")
    long = env.from_source(Gated(MemorySource(TABLE, SPLITS), folder / "gate"), name="long", uid="long")
    totals = short.union(long).key_by("k").aggregate(emit="final", total=tg.sum("n"), uid="totals")
    table = totals.to_table(str(folder / "table"), uid="table")
    config = tg.CheckpointConfig(
        interval="100ms", storage=str(folder / "checkpoints"), savepoints=str(folder / "savepoints")
    )
    restart = tg.RestartStrategy.fixed_delay(attempts=3, delay=0)
    return env.execute("finishing", checkpoints=config, restart=restart, restore=restore), table


def await_finished(job: tg.Job, vertex: str) -> None:
    """Wait until the coordinator knows that the tasks of a vertex have finished in the present attempt."""
    completed = -1

    def finished() -> bool:
        nonlocal completed
        progress = job.progress()
        before, completed = completed, progress.completed_checkpoints
        # A task finishes after a checkpoint, and the whole history is read again each time: not more often than needed.
        return completed != before and any(
            isinstance(event, TaskFinished) and (event.task.vertex, event.attempt) == (vertex, progress.attempt)
            for event in job.events()
        )

    waiting.until(f"{vertex} to finish", finished, job.progress)


def totals_of(table: tg.OutputTable) -> dict[int, int]:
    """The table, by key."""
    found = table.to_arrow()
    return dict(zip(found["k"].to_pylist(), found["total"].to_pylist(), strict=True))


def kill_process_of(job: tg.Job, vertex: str) -> None:
    """`kill -9`."""
    os.kill(next(process.pid for process in job.processes() if process.task.vertex == vertex), signal.SIGKILL)


def test_what_has_finished_is_neither_needed_nor_run_again(env: tg.StreamEnvironment, tmp_path: Path) -> None:
    """The death of a finished task's process changes nothing; after that of another one it does not read again."""
    job, table = start(env, tmp_path)
    await_finished(job, "short")
    kill_process_of(job, "short")
    seen = job.progress()
    until("checkpoints", job.progress, lambda p: p.completed_checkpoints > seen.completed_checkpoints + 2)
    assert job.progress().restarts == 0
    kill_process_of(job, "long")
    until("the next attempt", job.progress, lambda p: p.restarts == 1 and p.rows_in.get("long", 0) > 0)
    (tmp_path / "gate").touch()
    assert job.wait("4min") == "finished"
    end = job.progress()
    assert (end.restarts, end.rows_in.get("short", 0)) == (1, 0)
    assert totals_of(table) == EXPECTED


def test_a_suspended_job_goes_on_from_its_savepoint(env: tg.StreamEnvironment, tmp_path: Path) -> None:
    """A stop that cannot write its savepoint changes nothing; one that can ends the job with nothing emitted."""
    job, table = start(env, tmp_path)
    await_finished(job, "short")
    (tmp_path / "file").touch()
    with pytest.raises(tg.CheckpointError, match="could not be written"):
        job.stop(savepoint=str(tmp_path / "file"), timeout="4min")
    until("the job to go on", job.progress, lambda p: p.status == "running" and p.rows_in.get("long", 0) > 0)
    # Tasks that had finished finish again, which may be just when the savepoint is triggered.
    path = job.stop(timeout="4min")
    assert (job.status(), table.to_arrow().num_rows) == ("suspended", 0)
    (tmp_path / "gate").touch()
    job, table = start(env, tmp_path, restore=path)
    assert job.wait("4min") == "finished"
    assert totals_of(table) == EXPECTED
