"""The task's host and its I/O: what a machine asks for is done, and what goes wrong is told or cleaned up."""

from __future__ import annotations

import logging
from functools import partial
from itertools import count

import pyarrow as pa
import pytest
from batches import batch
from hosted_tasks import JOB, Port, drain, effects_of, host_of
from link import SOURCE, WORK, FrozenSum, Summing, describe, work_graph

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.ports import TryAgain
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.stream_elements import Watermark
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import OperatorSnapshot
from tidegate.storage.state.state_file import read_state
from tidegate.storage.tables.table_files import read_data_file

_roots = count()


def test_a_task_is_restored_reads_and_reports() -> None:
    """From restore to the end of its data, everything that the coordinator and the next task must know is told."""
    host, port = host_of(work_graph(rows=range(5)), SOURCE)
    host.restore(None)
    drain(host, port)
    assert [type(r).__name__ for r in port.reports] == ["TaskReady"]

    host.handle(ev.TasksStarted(0))
    drain(host, port)

    assert [type(r).__name__ for r in port.reports] == ["TaskReady", "TaskReachedEndOfData"]
    assert host.rows_in == 5
    assert sum(e.num_rows for f in port.frames for e in f.elements if isinstance(e, pa.RecordBatch)) == 5
    assert not host.finished


def test_a_snapshot_is_written_where_the_acknowledgement_says() -> None:
    """The handle that the coordinator gets leads to the state that was frozen."""
    effects, store = effects_of(work_graph(), WORK)
    persisted = effects.persist(
        do.PersistSnapshot(CheckpointId(3), (OperatorSnapshot(OperatorUid("work"), (FrozenSum(42),)),), (), ()), 6
    )

    assert isinstance(persisted, ev.SnapshotPersisted)
    assert persisted.sync_ms == 6
    assert persisted.handle is not None
    assert persisted.handle.path == "job-12345678/chk-3/work-0"
    (table,) = read_state(store, persisted.handle, OperatorUid("work"))
    assert table.rows.column("total").to_pylist() == [42]


def test_rows_that_come_in_are_counted() -> None:
    """Rows of frames count when they arrive; control elements do not."""
    host, port = host_of(work_graph(), WORK)
    host.restore(None)
    drain(host, port)
    channel = host.machine.descriptor.inputs[0]
    host.handle(ev.FrameArrived(0, host.machine.attempt, channel, 0, (batch(40, 1), Watermark(1), batch(2))))

    assert host.rows_in == 3


def test_small_state_is_inlined_and_no_state_has_no_handle() -> None:
    """Below the limit no file is written; a stateless task stores nothing."""
    effects, store = effects_of(work_graph(), WORK, inline_bytes_max=100_000)
    small = effects.persist(
        do.PersistSnapshot(CheckpointId(1), (OperatorSnapshot(OperatorUid("work"), (FrozenSum(1),)),), (), ()), 0
    )
    nothing = effects.persist(do.PersistSnapshot(CheckpointId(1), (), (), ()), 6)

    assert isinstance(small, ev.SnapshotPersisted)
    assert small.handle is not None
    assert (small.handle.path, store.list("")) == (None, [])
    assert nothing == ev.SnapshotPersisted(7, CheckpointId(1), None, 6)


def test_a_write_that_fails_is_told_and_a_deletion_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Storage trouble with a snapshot declines one checkpoint; trouble with rubbish must not fail the task."""
    effects, _ = effects_of(work_graph(), WORK, broken=True)
    frozen = (OperatorSnapshot(OperatorUid("work"), (FrozenSum(1),)),)

    assert effects.persist(do.PersistSnapshot(CheckpointId(1), frozen, (), ()), 0) == ev.SnapshotFailed(
        7, CheckpointId(1), "disk full", away=True
    )
    with caplog.at_level(logging.WARNING):
        effects.discard(do.DiscardState(("job-12345678/chk-1/work-0",)))
    assert "job-12345678/chk-1/work-0" in caplog.text


def test_a_sink_file_gets_a_name_of_its_own() -> None:
    """Job, attempt, operator, subtask and number make the name, so that no two attempts write one file."""
    graph = work_graph(sink=True)
    effects, _ = effects_of(graph, WORK)
    event = effects.stage(do.StageFile(OperatorUid("sink"), 4, (batch(1, 2),)))
    assert event is not None

    assert (event.uid, event.index, event.file.rows) == ("sink", 4, 2)
    assert event.file.path == "data/job-12345678/000003/part-0-000004-sink.parquet"
    assert read_data_file(open_store("memory://table"), event.file).column("x").to_pylist() == [1, 2]


def test_what_a_closed_task_still_writes_is_deleted() -> None:
    """A write that ends after its task was stopped leaves no file: whoever sweeps may have been there before."""
    effects, store = effects_of(work_graph(sink=True), WORK)
    effects.close()
    frozen = (OperatorSnapshot(OperatorUid("work"), (FrozenSum(1),)),)

    assert effects.persist(do.PersistSnapshot(CheckpointId(1), frozen, (), ()), 0) is None
    assert effects.stage(do.StageFile(OperatorUid("sink"), 7, (batch(1),))) is None

    assert store.list("job-12345678/chk-1") == []
    assert "part-0-000007-sink.parquet" not in open_store("memory://table").list("data/job-12345678/000003")


def test_closing_a_host_closes_operators_and_reader_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """The task is over anyway: an operator that cannot be closed is logged."""

    class Unclosable(Summing):
        def close(self) -> None:
            raise ValueError("still busy")

    host, port = host_of(work_graph(Unclosable), WORK)
    host.restore(None)
    drain(host, port)

    with caplog.at_level(logging.WARNING):
        host.close()

    assert "an operator of work[0] could not be closed" in caplog.text


def test_an_operator_is_closed_when_its_task_is() -> None:
    """Also in the middle of its life, and once."""
    log: list[str] = []
    host, port = host_of(work_graph(partial(Summing, log)), WORK)
    host.restore(None)
    drain(host, port)

    host.close()
    host.close()

    assert log == ["open", "close"]


class Away(TaskEffects):
    """Storage that does not answer so often as it is told to."""

    times = 0
    error: StorageError = StorageError("no answer")

    def restore(self, restore: RestorePoint | None) -> ev.TaskRestored:
        self._fail()
        return super().restore(restore)

    def _fail(self) -> None:
        if self.times:
            self.times -= 1
            raise self.error


def restoring(times: int, error: StorageError) -> tuple[TaskDriver, Port]:
    """A task that is being restored while storage is away."""
    graph = work_graph()
    context = JobContext(JOB, "job", "memory://away", graph, {})
    descriptor = describe(graph, WORK)
    effects = Away(context, descriptor, open_store, lambda: 7)
    effects.times, effects.error = times, error
    port = Port()
    host = TaskDriver(TaskMachine(descriptor), effects, port)
    host.restore(None)
    return host, port


def test_a_restore_waits_for_storage_and_says_so() -> None:
    """It is tried again after growing pauses, and the coordinator, which would give up, hears of it."""
    host, port = restoring(3, StorageError("no answer"))
    pauses = []
    while (event := port.io.pop(0)()) is not None:
        host.handle(event)
        if not port.later:
            break
        delay_ms, again = port.later.pop(0)
        pauses.append(delay_ms)
        port.elapsed_ms += delay_ms
        again()
    assert pauses == [200, 400, 800]
    assert [type(report).__name__ for report in port.reports] == ["RestoreDelayed"] * 3 + ["TaskReady"]


def test_a_restore_waits_for_a_bounded_time_and_not_for_what_never_passes() -> None:
    """After the time that an outage may last, and at once for damage, the error is the task's."""
    host, port = restoring(2, StorageError("no answer"))
    first = port.io.pop(0)()
    assert isinstance(first, TryAgain)
    host.handle(first)
    port.elapsed_ms += 600_000
    port.later.pop(0)[1]()
    with pytest.raises(StorageError, match="no answer"):
        port.io.pop(0)()

    _, port = restoring(1, CorruptionError("torn"))
    with pytest.raises(CorruptionError, match="torn"):
        port.io.pop(0)()
