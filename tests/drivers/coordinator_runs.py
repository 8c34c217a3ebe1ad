"""A job whose coordinator has a log in memory, and can be taken over."""

from __future__ import annotations

from itertools import count

from coordinator_ports import Port
from coordinators import SPEC, TASKS
from link import node

from tidegate.actors.coordinator import events as ev
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, replay
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.graph.stream_graph import translate
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber

_numbers = count()


class Run:
    """A job on a log in memory; `host` is its present coordinator."""

    def __init__(self) -> None:
        self.root = f"memory://coordinator-host-{next(_numbers)}"
        source = node("source")
        self.context = JobContext(SPEC.job_id, SPEC.job_name, self.root, translate([source]), {})
        self.log = EventLog(open_store(self.root), SPEC.job_id)
        self.take_over()

    def take_over(self) -> tuple[CoordinatorDriver, Port]:
        """A new coordinator, which has replayed the log and logged that it exists."""
        self.port = Port()
        machine, position = replay(self.log)
        effects = CoordinatorEffects(self.context, open_store, self.port.now_ms)
        self.host = CoordinatorDriver(machine, position, self.log, effects, self.port, f"incarnation {next(_numbers)}")
        self.host.start()
        return self.host, self.port

    def submit(self) -> None:
        """The job is submitted, and that is logged."""
        self.host.handle(ev.JobSubmitted(0, SPEC))
        self.port.settle()

    def events(self) -> list[list[str]]:
        """Names of the events of each entry."""
        return [[type(e).__name__ for e in entry.events] for entry in self.log.entries(self.log.oldest())]


def running() -> Run:
    """A job whose tasks are ready."""
    run = Run()
    run.submit()
    for task in TASKS:
        run.host.handle(ev.TaskReady(0, AttemptNumber(0), task))
    run.port.settle()
    return run
