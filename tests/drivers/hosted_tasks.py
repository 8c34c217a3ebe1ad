"""Tasks in their hosts, whose port collects what they do to the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from link import describe

from tidegate.actors.coordinator import events as co
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.drivers.ports import TryAgain
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import JobId, VertexId

_roots = count()
JOB = JobId("job-12345678")


class BrokenStore(FileSystemStore):
    """A store that can be read and does nothing else."""

    def write(self, path: str, chunks: object) -> int:
        raise StorageError("disk full")

    def delete(self, path: str) -> None:
        raise StorageError("read-only")


@dataclass
class Port:
    """Collects what a task does to the world."""

    virtual = True

    frames: list[do.SendFrame] = field(default_factory=list)
    credit: list[do.GrantCredit] = field(default_factory=list)
    reports: list[co.CoordinatorEvent] = field(default_factory=list)
    io: list[Callable[[], ev.TaskEvent | TryAgain | None]] = field(default_factory=list)
    timers: list[int] = field(default_factory=list)

    elapsed_ms: int = 0
    later: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def now_ms(self) -> int:
        return 7

    def monotonic_ms(self) -> int:
        return self.elapsed_ms

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self.later.append((delay_ms, action))

    def send_frame(self, frame: do.SendFrame) -> None:
        self.frames.append(frame)

    def grant_credit(self, grant: do.GrantCredit) -> None:
        self.credit.append(grant)

    def report(self, event: co.CoordinatorEvent) -> None:
        self.reports.append(event)

    def run_io(self, work: Callable[[], ev.TaskEvent | TryAgain | None]) -> None:
        self.io.append(work)

    def set_timer(self, instruction: do.SetTaskTimer, delay_ms: int) -> None:
        self.timers.append(instruction.due_at_ms)


def effects_of(
    graph: JobGraph, vertex: VertexId, inline_bytes_max: int = 0, broken: bool = False, handed_on: tuple[str, ...] = ()
) -> tuple[TaskEffects, FileSystemStore]:
    """The I/O of one task on a root of its own, and the store at that root."""
    root = f"memory://task-host-{next(_roots)}"
    options = DataPlaneOptions(inline_bytes_max=inline_bytes_max)
    context = JobContext(JOB, "job", root, graph, {}, options, handed_on=handed_on)
    opened = BrokenStore if broken else open_store
    return TaskEffects(context, describe(graph, vertex), opened, lambda: 7), open_store(root)


def host_of(graph: JobGraph, vertex: VertexId) -> tuple[TaskDriver, Port]:
    """A host with a machine that was not told anything."""
    port = Port()
    return TaskDriver(TaskMachine(describe(graph, vertex)), effects_of(graph, vertex)[0], port), port


def drain(host: TaskDriver, port: Port) -> None:
    """Do all I/O that was asked for, and give the machine turns, until nothing is left."""
    while port.io or host.machine.runnable:
        while host.turn():
            pass
        if port.io:
            event = port.io.pop(0)()
            if event is not None:
                host.handle(event)
