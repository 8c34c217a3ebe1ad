"""A deployment of a job on Ray whose processes are there, and answer when a test says so; without Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from ray.exceptions import ActorUnavailableError
from ray_fakes import SINK, SOURCE, LaterMailbox, Method, source_to_sink

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.ray.actor_calls import Ended, Outcome
from tidegate.actors.ray.attempt_supervisor import AttemptSupervisor
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import NOWHERE, JobSlots, Nodes, PoolOptions, SlotPlacement
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId

FIRST, SECOND = AttemptNumber(0), AttemptNumber(1)
AWAY = ActorUnavailableError("Connection reset by peer", None)


@dataclass
class Handle:
    """A task's process."""

    deploy: Method = field(default_factory=lambda: Method(answers=True))
    deliver: Method = field(default_factory=Method)
    drop: Method = field(default_factory=Method)
    pulse: Method = field(default_factory=Method)


class Staff:
    """A fleet whose processes are all there, and of which some are spare.

    With `slot_sharing` one process runs both tasks.
    """

    def __init__(
        self,
        placement: SlotPlacement | None = None,
        slot_sharing: bool = False,
        join: Callable[[WorkerHandle], object] = lambda _: None,
    ) -> None:
        self.options = PoolOptions("job", "namespace", placement, 0, 1, open_store)
        self.spare = 0
        self.closed = False
        self.avoided: Container[str] = ()
        self.nodes = NOWHERE
        self.node_id = "the coordinator's"
        _, self.graph = source_to_sink(slot_sharing=slot_sharing)
        self.slots = JobSlots(self.graph, self.options)
        workers, names = self.slots.plan.workers, self.slots.plan.names
        members = {
            worker: WorkerHandle(names[worker], Handle(), None, Future(), ProcessInfo(1, "node")) for worker in names
        }
        self._members = {task: members[workers[task]] for task in (SOURCE, SINK)}
        self.handles: dict[TaskId, Handle] = {task: member.handle for task, member in self._members.items()}
        self.died: Callable[[WorkerHandle, BaseException | None], object] = lambda *_: None
        self.identified: Callable[[WorkerHandle], object] = lambda _: None

    def shown_as(self, task: TaskId) -> str:
        """What people call its worker."""
        return self.slots.plan.names[self.slots.plan.workers[task]]

    def staff(
        self, tasks: Collection[TaskId] = (SOURCE, SINK), avoided: Container[str] = (), nodes: Nodes = NOWHERE
    ) -> dict[TaskId, WorkerHandle]:
        self.avoided, self.nodes = avoided, nodes
        return {task: member for task, member in self._members.items() if task in tasks}

    def lacks(self, tasks: Collection[TaskId], avoided: Container[str], nodes: Nodes = NOWHERE) -> bool:
        free = sum(node not in avoided for node in nodes.values())
        return sum(self._members[task].is_on(avoided) for task in tasks) > self.spare + free

    def starts_in_bundles(self, tasks: Collection[TaskId], avoided: Container[str]) -> bool:
        """Whether some are to be replaced."""
        return self.options.placement is not None and any(self._members[task].dead for task in tasks)

    def is_kept(self, member: WorkerHandle) -> bool:
        """All are."""
        return True

    def kill(self, member: WorkerHandle) -> None:
        """Nobody is."""

    def close(self) -> list[Future[None]]:
        """None is there."""
        self.closed = True
        return []

    def refill(self) -> None:
        """Nobody is missing."""


class Deployed:
    """The first attempt of a job."""

    def __init__(
        self,
        placement: SlotPlacement | None = None,
        slot_sharing: bool = False,
        join: Callable[[WorkerHandle], object] = lambda _: None,
    ) -> None:
        self.staff, self.mailbox = Staff(placement, slot_sharing), LaterMailbox()
        self.told: list[co.CoordinatorEvent] = []
        self.watched_again: list[TaskId] = []
        """Tasks whose process has answered after its connection broke: the fleet watches its life again."""
        self.deployment = AttemptSupervisor(
            cast(WorkerPool, self.staff), self.told.append, cast(Mailbox, self.mailbox), join=join
        )
        self.deployment.deploy(do.DeployAttempt(FIRST, None))

    def lose(self, task: TaskId, error: BaseException) -> None:
        """The process of a task has ended, or may have: Ray reports this."""
        (member,) = self.staff.staff((task,)).values()
        broke = self.staff.broke(
            member, error, lambda last: self._ended(member, last), partial(self.watched_again.append, task)
        )
        if not broke:
            self._ended(member, error)

    def _ended(self, member: WorkerHandle, error: BaseException) -> None:
        member.dead = True
        self.staff.died(member, error)

    def finish(self, task: TaskId, attempt: AttemptNumber = FIRST) -> None:
        """A task reports that it has finished."""
        self.deployment.ended(Ended(attempt, task, Outcome("finished")))

    def lose_a_message(self, task: TaskId, attempt: AttemptNumber) -> None:
        """Send something that does not arrive."""
        self.deployment.send(task, ev.CheckpointCompleted(0, attempt, CheckpointId(1)))
        self.deployment.flush()
        self.staff.handles[task].deliver.calls.get_nowait()[0].set_exception(ConnectionError("gone"))
        self.pass_time()

    def pass_time(self) -> None:
        """Do what was due later."""
        self.mailbox.pass_time()


def started(deployed: Deployed) -> list[WorkerHandle]:
    """All processes of it have started."""
    members = [deployed.staff.staff()[task] for task in (SOURCE, SINK)]
    for member in members:
        member.info = ProcessInfo(1, "node")
    return members


def failed_tasks(deployed: Deployed) -> list[TaskId]:
    """Tasks of which the coordinator has heard that they failed."""
    return [event.task for event in deployed.told if isinstance(event, co.TaskFailed)]
