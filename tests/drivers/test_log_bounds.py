"""What the event log holds after very many checkpoints, and of large ones: bounded, whatever goes through it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_ports import Port
from coordinators import SINK, SOURCE, SPEC, TASKS, files, part
from link import node

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, replay
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as task_ev
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.metadata import StateHandle, read_metadata
from tidegate.storage.errors import NotFoundError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId

pytestmark = pytest.mark.slow

FILES_MAX = 2_200
BYTES_MAX = 4 * 1024 * 1024


class DictStore:
    """A store in a dict, as quick as can be; what is not needed here is left to the store of the url."""

    def __init__(self) -> None:
        self.url = "memory://log-bounds"
        self.files: dict[str, bytes] = {}
        self.files_max = self.bytes_max = 0

    def create(self, path: str, data: Buffer) -> None:
        assert path not in self.files
        self.files[path] = bytes(data)

    def write(self, path: str, chunks: object) -> int:
        # Just before the log is cut it is at its longest.
        self.files_max = max(self.files_max, len(self.files))
        self.bytes_max = max(self.bytes_max, sum(map(len, self.files.values())))
        self.files[path] = b"".join(chunks)  # type: ignore[arg-type]
        return len(self.files[path])

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path not in self.files:
            raise NotFoundError(path)
        return self.files[path]

    def exists(self, path: str) -> bool:
        return path in self.files

    def list(self, prefix: str) -> list[str]:
        return sorted(path.rsplit("/", 1)[1] for path in self.files)

    def delete(self, path: str) -> None:
        self.files.pop(path, None)

    def delete_all(self, paths: object) -> None:
        for path in paths:  # type: ignore[attr-defined]
            self.delete(path)

    def delete_tree(self, prefix: str) -> None:
        raise AssertionError("the log is deleted entry by entry")


def started(store: Store) -> tuple[CoordinatorDriver, Port, EventLog]:
    """A job that runs, with its log on a store."""
    log, port = EventLog(store, SPEC.job_id), Port()
    machine, position = replay(log)
    root = "memory://log-bounds"
    context = JobContext(SPEC.job_id, SPEC.job_name, root, translate([node("source")]), {})
    host = CoordinatorDriver(machine, position, log, CoordinatorEffects(context, open_store, port.now_ms), port, "one")
    host.start()
    host.handle(ev.JobSubmitted(0, replace(SPEC, root=root)))
    port.settle()
    for task in TASKS:
        host.handle(ev.TaskReady(0, AttemptNumber(0), task))
    port.settle()
    return host, port, log


def checkpoint(host: CoordinatorDriver, port: Port, number: int) -> None:
    """One checkpoint, from its tick to the deletion of the one before; what storage does is only said."""
    n, at_ms = CheckpointId(number), number * 1_000
    host.handle(ev.TimerFired(at_ms, "periodic:0"))
    port.settle()
    for task in TASKS:
        state = part(number, task, *([files(number - 1, f"f{number}")] if task == SINK else []))
        host.handle(ev.CheckpointAcknowledged(at_ms, AttemptNumber(0), task, n, state))
    port.settle()
    host.handle(ev.MetadataWritten(at_ms, n))
    port.settle()
    host.handle(ev.SinksCommitted(at_ms, n))
    port.settle()
    if number > 1:
        host.handle(ev.CheckpointDiscarded(at_ms, CheckpointId(number - 1)))
    host.handle(ev.TimerFired(at_ms, f"timeout:{number}"))
    port.io.clear()
    port.told.clear()


def test_thousands_of_checkpoints_leave_a_short_log() -> None:
    """Files and bytes stay below a bound that does not grow, and the log gives the state that was reached."""
    store = DictStore()
    host, port, log = started(store)
    for number in range(1, 3_001):
        checkpoint(host, port, number)
        if number == 10:
            entries = len(log.indices())
        if number == 20:
            assert len(log.indices()) - entries == 40, "four entries a checkpoint"
    assert host.machine.state.completed_checkpoints == 3_000
    assert store.files_max < FILES_MAX
    assert store.bytes_max < BYTES_MAX

    host.handle(ev.CancelRequested(0))
    port.settle()
    machine, _ = replay(log)
    assert machine.state == host.machine.state


def test_state_that_is_inlined_stays_out_of_the_log() -> None:
    """Its bytes go into the metadata and nowhere else; those of a checkpoint that is over are forgotten."""
    store = DictStore()
    host, port, log = started(store)
    state_bytes = 4 * 1024 * 1024
    for number in range(1, 6):
        host.handle(ev.TimerFired(number * 1_000, "periodic:0"))
        port.settle()
        for task in TASKS:
            handle = StateHandle(None, bytes([number]) * state_bytes, state_bytes, f"sum {number}", ())
            state = replace(part(number, task), handle=handle)
            host.handle(ev.CheckpointAcknowledged(number, AttemptNumber(0), task, CheckpointId(number), state))
        port.settle()
        written = port.io.pop()()
        assert isinstance(written, ev.MetadataWritten)
        metadata = read_metadata(open_store("memory://log-bounds"), SPEC.job_id, CheckpointId(number))
        assert [s.handle is not None and s.handle.inline for s in metadata.subtasks] == [
            bytes([number]) * state_bytes
        ] * len(TASKS)
        host.handle(written)
        port.settle()
        assert not host.inlined.checkpoints
    assert sum(map(len, store.files.values())) < 64 * 1024
    machine, _ = replay(log)
    assert machine.state.completed_checkpoints == 5


def test_bytes_of_a_checkpoint_that_failed_are_forgotten() -> None:
    """And those that come when it is over."""
    host, port, _ = started(DictStore())
    host.handle(ev.TimerFired(1, "periodic:0"))
    port.settle()
    handle = StateHandle(None, b"state", 5, "sum", ())
    acknowledged = ev.CheckpointAcknowledged(
        1, AttemptNumber(0), SOURCE, CheckpointId(1), replace(part(1, SOURCE), handle=handle)
    )
    host.handle(acknowledged)
    assert list(host.inlined.checkpoints) == [1]
    host.handle(ev.TimerFired(20_000, "timeout:1"))
    port.settle()
    host.handle(acknowledged)
    host.handle(ev.CancelRequested(30_000))
    port.settle()
    assert not host.inlined.checkpoints
    assert not [event for _, event in port.told if isinstance(event, task_ev.CheckpointCompleted)]
    assert not [i for i in port.io if isinstance(i, do.WriteMetadata)]
