"""The nodes of a simulated job: on which of them its processes are, which node is lost, and which is cut off.

A process stays on its node for life; a new one starts on any that answers. Rules:

- With a node go its disk and all processes on it, those of tasks that were stopped included, with what they hold in
  memory, and sometimes the coordinator. Another node takes its place, with an empty disk.
- A node that is cut off goes on, and reaches neither storage nor anybody on another node. Here it stands still: what is
  meant for its processes, and what storage answers them, is held, and comes in the same order when the link is back.
- Whoever counts heartbeats takes the processes of such a node for hung once it has been silent for too long. A process
  that is to let go of its task, and does not hear it, is replaced.
- A cut may end with the loss of the node: nobody has heard of it for so long that it was given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tidegate.actors.hosts.coordinator.coordinator_host import CoordinatorHost
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.protocol.identity import TaskId
from tidegate.simulation.oracle.watch import Watch
from tidegate.simulation.runtime.processes import SimulatedProcesses
from tidegate.simulation.world.node_folder import SimulatedNodeFolder
from tidegate.simulation.world.virtual_time import World

NODES = 3
LOST_WITH_A_CUT = 0.25
"""Part of the cuts after which the node is not there any more."""


class JobOfNodes(Protocol):
    """What nodes ask of their job; `SimulatedJob` has it."""

    world: World
    watch: Watch
    tasks: dict[TaskId, TaskHost]
    coordinator: CoordinatorHost | None
    processes: SimulatedProcesses

    @property
    def over(self) -> bool: ...
    def lose_coordinator(self, *, cut_off: bool) -> None: ...


class SimulatedNodes:
    """Those of one job."""

    def __init__(self, job: JobOfNodes) -> None:
        self._job = job
        self._of: dict[str, int] = {}
        """The node of each process, by its name."""
        self._cut: dict[int, None] = {}
        self._held: dict[TaskId, deque[Callable[[], object]]] = {}
        """What comes to tasks on nodes that are cut off, once their links are back."""
        self._faults = 0
        self._folders: dict[int, SimulatedNodeFolder] = {}
        self._disks = 0

    def folder(self, node: int) -> SimulatedNodeFolder:
        """The local disk of a node."""
        if node not in self._folders:
            self._disks += 1
            seed = f"disk {self._disks} of {self._job.world.seed}"
            self._folders[node] = SimulatedNodeFolder(self._job.world, f"node {node}", seed)
        return self._folders[node]

    def of(self, task: TaskId) -> int:
        """The node on which the process of a task is, or starts now."""
        name = self._job.processes.name(task)
        if name not in self._of:
            there = [node for node in range(NODES) if node not in self._cut] or list(range(NODES))
            self._of[name] = self._job.world.random.choice(there)
        return self._of[name]

    def is_cut(self, task: TaskId) -> bool:
        """Whether nobody reaches the process of a task now."""
        return bool(self._cut) and self.of(task) in self._cut

    def hold(self, task: TaskId, action: Callable[[], object]) -> None:
        """Something comes for a task that nobody reaches."""
        self._held.setdefault(task, deque()).append(action)

    def maybe_fail(self, task: TaskId) -> None:
        """The node of a task may be lost now, or cut off."""
        world = self._job.world
        if self._faults >= world.faults.nodes_max or self.is_cut(task):
            return
        for kind, happens in (("node_loss", partial(self._lose, reason="its node is lost")), ("cut", self._cut_off)):
            if world.chance(kind):
                self._faults += 1
                happens(self.of(task))
                return

    def _tasks_on(self, node: int) -> list[TaskId]:
        return [task for task in self._job.processes.known if self.of(task) == node]

    def _lose(self, node: int, reason: str) -> None:
        job = self._job
        job.world.note(f"node {node} is lost, with", *map(job.processes.name, self._tasks_on(node)))
        job.watch.coverage.saw("node_lost")
        self._folders.pop(node, None)
        for task in self._tasks_on(node):
            self._held.pop(task, None)
            job.processes.end(task, reason)
        if job.coordinator is not None and job.world.random.randrange(NODES) == node:
            job.lose_coordinator(cut_off=False)

    def _cut_off(self, node: int) -> None:
        job, world = self._job, self._job.world
        cut_ms = world.between(*world.faults.cut_ms)
        world.note(f"node {node} is cut off for {cut_ms} ms, with", *map(job.processes.name, self._tasks_on(node)))
        job.watch.coverage.saw("node_cut_off")
        self._cut[node] = None
        job.processes.silent(self._tasks_on(node), self.is_cut)
        world.after(cut_ms, lambda: self._end_cut(node))

    def _end_cut(self, node: int) -> None:
        job = self._job
        gone = job.world.faulty and job.world.random.random() < LOST_WITH_A_CUT
        tasks = self._tasks_on(node)
        if gone and not job.over:
            self._lose(node, "its node was cut off, and is lost")
        del self._cut[node]
        if not gone:
            job.world.note(f"the link of node {node} is back")
        for task in tasks:
            held = self._held.pop(task, deque())
            while held and not job.over:
                held.popleft()()
