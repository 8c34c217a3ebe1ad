"""Code of users that does what nobody expects, in the processes of a job on Ray: the job says so, and goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import rude
from ray import cloudpickle
from ray_jobs import ROWS, keyed_job

from tidegate.actors.coordinator.events import TaskFailed
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.files.file_system_store import open_store

WAIT_S = 240.0
EXIT_OF_CHILD = 5

cloudpickle.register_pickle_by_value(rude)


@pytest.fixture
def plain_runtime(plain_ray: None) -> Iterator[RayRuntime]:
    """A runtime without spare processes."""
    runtime = RayRuntime(standbys=0)
    yield runtime
    runtime.stop()


def test_a_job_outlives_whatever_its_functions_do(plain_runtime: RayRuntime, tmp_path: Path) -> None:
    """Each failure is told by its name and restarts the job, in the same processes, and the table is exact."""
    done = tmp_path / "done"
    done.mkdir()

    def is_first(act: str) -> bool:
        """Whether nobody has done this yet, in whatever attempt."""
        try:
            (done / act).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def behave(batch: pa.RecordBatch) -> pa.RecordBatch:
        if is_first(f"process {os.getpid()}"):
            return batch  # What is compiled for it may be compiled here for the first time: numba needs a folder.
        if is_first("leave"):
            gone = done / "gone"
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
        if is_first("fork"):
            child = os.fork()
            if child == 0:
                os._exit(EXIT_OF_CHILD)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_OF_CHILD
        if is_first("close"):
            sys.stdout.close()
            sys.stderr.close()
        for name, error in rude.RAISED.items():
            if is_first(name):
                raise error()
        return batch

    gate = tmp_path / "gate"
    gate.touch()
    restart = RestartStrategy.fixed_delay(attempts=len(rude.RAISED), delay=0)
    keyed = keyed_job(tmp_path, gate, name="rude", function=behave, parallelism=1, interval_ms=None, restart=restart)
    end = plain_runtime.submit(keyed.submission).wait(WAIT_S)
    assert end is not None
    assert (end.status, end.restarts) == ("finished", len(rude.RAISED)), end
    assert end.rows_in["totals"] == ROWS
    assert keyed.table().equals(keyed.expected)
    assert len(list(done.glob("process *"))) == 1, "no failure has cost a process"

    log = EventLog(open_store(keyed.submission.spec.root), keyed.submission.spec.job_id)
    failures = [event for entry in log.history() for event in entry.events if isinstance(event, TaskFailed)]
    assert len(failures) == len(rude.RAISED)
    for name, failure in zip(rude.RAISED, failures, strict=True):
        assert name in failure.reason
        assert "operator 'check'" in failure.reason
