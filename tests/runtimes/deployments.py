"""A deployment of a job on Ray whose processes are there, and answer when a test says so; without Ray."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from ray.exceptions import ActorUnavailableError
from ray_fakes import SINK, SOURCE, LaterMailbox, Method, source_to_sink

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.ray.coordinator.attempt_supervisor import AttemptSupervisor
from tidegate.actors.runtimes.ray.fleet.fleet import Fleet
from tidegate.actors.runtimes.ray.fleet.member import Member
from tidegate.actors.runtimes.ray.fleet_options import FleetOptions, SlotPlacement
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.actors.runtimes.ray.slots.job_slots import JobSlots
from tidegate.actors.runtimes.ray.slots.slots_elsewhere import NOWHERE, Nodes
from tidegate.actors.task.messages import events as ev
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId

FIRST, SECOND = AttemptNumber(0), AttemptNumber(1)
AWAY = ActorUnavailableError("Connection reset by peer", None)


@dataclass
class Handle:
    """A task's process."""

    deploy: Method = field(default_factory=lambda: Method(answers=True))
    run: Method = field(default_factory=Method)
    tell: Method = field(default_factory=Method)
    drop: Method = field(default_factory=Method)
    pulse: Method = field(default_factory=Method)


class Staff:
    """A fleet whose processes are all there, and of which some are spare."""

    def __init__(self, placement: SlotPlacement | None = None) -> None:
        self.options = FleetOptions("job", "namespace", placement, 0, 1, open_store)
        self.spare = 0
        self.closed = False
        self.avoided: Container[str] = ()
        self.nodes = NOWHERE
        self.node_id = "the coordinator's"
        _, self.graph = source_to_sink()
        self.slots = JobSlots(self.graph, self.options)
        self.handles = {task: Handle() for task in (SOURCE, SINK)}
        self._members = {task: Member(str(task), h, None, Future()) for task, h in self.handles.items()}

    def staff(
        self, tasks: Iterable[TaskId] = (), avoided: Container[str] = (), nodes: Nodes = NOWHERE
    ) -> dict[TaskId, Member]:
        self.avoided, self.nodes = avoided, nodes
        return self._members

    def lacks(self, tasks: Collection[TaskId], avoided: Container[str], nodes: Nodes = NOWHERE) -> bool:
        free = sum(node not in avoided for node in nodes.values())
        return sum(self._members[task].is_on(avoided) for task in tasks) > self.spare + free

    def starts_in_bundles(self, tasks: Collection[TaskId], avoided: Container[str]) -> bool:
        """Whether some are to be replaced."""
        return self.options.placement is not None and any(self._members[task].dead for task in tasks)

    def is_kept(self, member: Member) -> bool:
        """All are."""
        return True

    def kill(self, member: Member) -> None:
        """Nobody is."""

    def close(self) -> list[Future[None]]:
        """None is there."""
        self.closed = True
        return []

    def refill(self) -> None:
        """Nobody is missing."""


class Deployed:
    """The first attempt of a job."""

    def __init__(self, placement: SlotPlacement | None = None) -> None:
        self.staff, self.mailbox = Staff(placement), LaterMailbox()
        self.told: list[co.CoordinatorEvent] = []
        self.deployment = AttemptSupervisor(cast(Fleet, self.staff), self.told.append, cast(Mailbox, self.mailbox))
        self.deployment.deploy(do.DeployAttempt(FIRST, None))

    def run_of(self, task: TaskId) -> Future[Any]:
        """The pending call that stands for the newest attempt of a task."""
        return self.staff.handles[task].run.calls.get_nowait()[0]

    def lose_a_message(self, task: TaskId, attempt: AttemptNumber) -> None:
        """Say something that does not arrive."""
        self.deployment.tell(task, ev.CheckpointCompleted(0, attempt, CheckpointId(1)))
        self.staff.handles[task].tell.calls.get_nowait()[0].set_exception(ConnectionError("gone"))
        self.pass_time()

    def pass_time(self) -> None:
        """Do what was due later."""
        self.mailbox.pass_time()


def started(deployed: Deployed) -> list[Member]:
    """All processes of it have started."""
    members = [deployed.staff.staff()[task] for task in (SOURCE, SINK)]
    for member in members:
        member.info = ProcessInfo(1, "node")
    return members


def failed_tasks(deployed: Deployed) -> list[TaskId]:
    """Tasks of which the coordinator has heard that they failed."""
    return [event.task for event in deployed.told if isinstance(event, co.TaskFailed)]
