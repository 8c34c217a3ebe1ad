"""Sources that block in a read, on the local runtime: they hold up nobody but themselves."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate.actors.drivers.worker import IO_THREADS, IoPool, io_pool
from tidegate.actors.local import local_runtime as local_job


class BlockingSource(GatedSource):
    """Waits at a gate without a limit, as one reads a queue."""

    def pass_gate(self, row: int) -> None:
        """Wait until the gate is opened, at the end of the test if not before."""
        if row in self._gates:
            reached, opened = self._gates[row]
            reached.release()
            opened.wait()


def test_state_is_written_while_every_source_blocks(tmp_path: Path) -> None:
    """However many subtasks wait in a read, there is a thread left for a checkpoint."""
    with opening(GatedSource(*[20] * (IO_THREADS + 1), gates=[10])) as source, local(IO_THREADS + 1) as env:
        env.from_source(source).collect()
        job = env.execute("blocked", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        assert job.trigger_checkpoint("4min")


def test_reads_that_an_attempt_has_left_behind_hold_up_no_other_one(tmp_path: Path) -> None:
    """A read that blocks cannot be interrupted: the next attempt must not need its thread."""
    gates = [2, 4, 6]
    failures: list[int] = []

    def fail_behind_gates(batch: pa.RecordBatch) -> pa.RecordBatch:
        last = max(batch["x"].to_pylist())
        if len(failures) < len(gates) and last >= gates[len(failures)]:
            failures.append(last)
            raise ValueError("again")
        return batch

    with ExitStack() as stack:
        blocked = stack.enter_context(opening(BlockingSource(*[20] * IO_THREADS, gates=[10])))
        fails = stack.enter_context(opening(GatedSource(10, gates=gates)))
        env = stack.enter_context(local(IO_THREADS))
        env.from_source(blocked).collect()
        env.from_source(fails, parallelism=1).map_batches(fail_behind_gates, schema=fails.schema).collect()
        restart = tg.RestartStrategy.fixed_delay(len(gates), "1ms")
        job = env.execute("left behind", checkpoints=config(tmp_path, failover="full"), restart=restart)
        for gate in gates:
            blocked.await_gate(10)
            fails.await_gate(gate)
            fails.open_gate(gate)
        blocked.await_gate(10)
        assert job.trigger_checkpoint("4min")


def test_the_first_attempt_has_the_threads_that_started_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an attempt after it, which may have left reads behind, needs threads of its own."""
    made: list[IoPool] = []

    def make(*given: Any) -> IoPool:
        made.append(io_pool(*given))
        return made[-1]

    monkeypatch.setattr(local_job, "io_pool", make)
    failures: list[int] = []

    def fail_once(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not failures:
            failures.append(len(made))
            raise ValueError("again")
        return batch

    source = GatedSource(20)
    with local(1) as env:
        env.from_source(source).map_batches(fail_once, schema=source.schema).collect()
        job = env.execute("pools", checkpoints=config(tmp_path), restart=tg.RestartStrategy.fixed_delay(1, "1ms"))
        assert job.wait("4min") == "finished"
    assert (failures, len(made)) == ([1], 2)
    assert all(pool.closed for pool in made)
