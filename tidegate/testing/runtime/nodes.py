"""The nodes of a simulated job: on which of them its processes are, which node is lost, and which is cut off.

A process stays on its node for life; a new one starts on any that answers. Rules:

- With a node go its disk and all processes on it, those whose tasks were stopped included, with what they hold in
  memory, and sometimes the coordinator. Another node takes its place, with an empty disk.
- A node that is cut off goes on, and reaches neither storage nor anybody on another node. Here it stands still: what is
  meant for its processes, and what storage answers them, is held, and comes in the same order when the link is back.
- Whoever counts heartbeats takes the processes of such a node for hung once it has been silent for too long. A process
  that is to let go of one of its tasks, and does not hear it, is replaced.
- A cut may end with the loss of the node: nobody has heard of it for so long that it was given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tidegate.actors.drivers.coordinator_host import CoordinatorHost
from tidegate.testing.oracle.watch import Watch
from tidegate.testing.runtime.processes import SimulatedProcess, SimulatedProcesses
from tidegate.testing.world.node_folder import SimulatedNodeFolder
from tidegate.testing.world.virtual_time import World

NODES = 3
LOST_WITH_A_CUT = 0.25
"""Part of the cuts after which the node is not there any more."""


class JobOfNodes(Protocol):
    """What nodes ask of their job; `SimulatedJob` has it."""

    world: World
    watch: Watch
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
        self._held: dict[str, deque[Callable[[], object]]] = {}
        """What comes to processes on nodes that are cut off, by their names, once the links are back."""
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

    def of(self, process: SimulatedProcess) -> int:
        """The node on which a process is, or starts now."""
        name = process.name
        if name not in self._of:
            there = [node for node in range(NODES) if node not in self._cut] or list(range(NODES))
            self._of[name] = self._job.world.random.choice(there)
        return self._of[name]

    def is_cut(self, process: SimulatedProcess) -> bool:
        """Whether nobody reaches a process now."""
        return bool(self._cut) and self.of(process) in self._cut

    def hold(self, process: SimulatedProcess, action: Callable[[], object]) -> None:
        """Something comes for a process that nobody reaches."""
        self._held.setdefault(process.name, deque()).append(action)

    def maybe_fail(self, process: SimulatedProcess) -> None:
        """The node of a process may be lost now, or cut off."""
        world = self._job.world
        if self._faults >= world.faults.nodes_max or self.is_cut(process):
            return
        for kind, happens in (("node_loss", partial(self._lose, reason="its node is lost")), ("cut", self._cut_off)):
            if world.chance(kind):
                self._faults += 1
                happens(self.of(process))
                return

    def _on(self, node: int) -> list[SimulatedProcess]:
        return [process for process in self._job.processes.known if self.of(process) == node]

    def _held_on(self, node: int) -> list[str]:
        """Processes on a node for which something is held; those that have ended may have I/O on its way."""
        return [name for name in self._held if self._of[name] == node]

    def _lose(self, node: int, reason: str) -> None:
        job, processes = self._job, self._on(node)
        job.world.note(f"node {node} is lost, with", *(process.name for process in processes))
        job.watch.coverage.saw("node_lost")
        self._folders.pop(node, None)
        for name in self._held_on(node):
            del self._held[name]
        for process in processes:
            job.processes.end(process, reason)
        if job.coordinator is not None and job.world.random.randrange(NODES) == node:
            job.lose_coordinator(cut_off=False)

    def _cut_off(self, node: int) -> None:
        job, world, processes = self._job, self._job.world, self._on(node)
        cut_ms = world.between(*world.faults.cut_ms)
        names = (process.name for process in processes)
        world.note(f"node {node} is cut off for {cut_ms} ms, with", *names)
        job.watch.coverage.saw("node_cut_off")
        self._cut[node] = None
        job.processes.silent(processes, self.is_cut)
        world.after(cut_ms, lambda: self._end_cut(node))

    def _end_cut(self, node: int) -> None:
        job = self._job
        gone = job.world.faulty and job.world.random.random() < LOST_WITH_A_CUT
        if gone and not job.over:
            self._lose(node, "its node was cut off, and is lost")
        del self._cut[node]
        if not gone:
            job.world.note(f"the link of node {node} is back")
        for name in self._held_on(node):
            held = self._held.pop(name)
            while held and not job.over:
                held.popleft()()
