"""The processes of a simulated job and their nodes, which hang, are lost or are cut off.

A slot has one process at a time. It also runs the next attempts of its subtasks, unless it has died. Rules:

- When a process ends, all its subtasks end. Keyed state that stopped subtasks have left in it is lost, and so are
  frames between its subtasks and unsent reports. Each subtask that had not finished has failed.
- A subtask that raises an error fails alone. Its process continues, with the state of its other subtasks.
- Frames between subtasks of a process use its queue. They are never lost, repeated or late.
- A process that hangs neither receives nor sends. The current coordinator notices that after `silence_ms`. A
  coordinator that was cut off considers all processes as hung after that time.
- A process that hangs or was evicted gets no more subtasks. A new process with empty memory replaces it.
- A process may die before one of its subtasks runs, while it restores state or waits for other subtasks that do so.
- A process ignores the order of a replaced coordinator to leave. It cannot refuse a kill, so the oracle checks kills.
- A process never moves to another node. A new one starts on any node that can be reached.
- When a node is lost, its disk and all processes on it are lost, and sometimes the coordinator. Another node with an
  empty disk replaces it.
- A node that is cut off reaches neither storage nor other nodes. Messages for its processes and answers of storage are
  queued, and delivered in the same order when the connection is restored. A process that should stop a task and does
  not receive the order is replaced.
- A node that was cut off may be lost at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.drivers.worker import Subtask, Wiring, Worker
from tidegate.actors.graph.job_graph import JobGraph, vertex_labels
from tidegate.actors.graph.slot_plan import WorkerId, slot_plan
from tidegate.actors.task import events as ev
from tidegate.actors.task.invariants import may_obey
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber
from tidegate.testing.oracle.job_observer import Watch
from tidegate.testing.world.disk import SimulatedNodeFolder
from tidegate.testing.world.virtual_time import World

DETECTION_MS_MAX = 500
"""Longest time in ms until the death of a process or the failure of a subtask is noticed."""
NODES = 3
LOST_WITH_A_CUT = 0.25
"""Probability that a node that was cut off is lost at the end."""
_NOT_BEGUN = (TaskStatus.CREATED, TaskStatus.READY)


class JobOfProcesses(Protocol):
    """The methods of `SimulatedJob` that processes and nodes call."""

    world: World
    watch: Watch
    coordinator: CoordinatorDriver | None
    processes: SimulatedProcesses
    crashes: int

    @property
    def over(self) -> bool: ...
    def hear(self, coordinator: CoordinatorDriver, event: CoordinatorEvent) -> None: ...
    def report(self, event: CoordinatorEvent) -> None: ...
    def hold_if_cut(self, process: SimulatedProcess, action: Callable[[], object]) -> bool: ...
    def lose_coordinator(self, *, cut_off: bool) -> None: ...


class SimulatedProcess(Worker):
    """A simulated process, which runs the worker of one slot until it ends."""

    def __init__(self, job: JobOfProcesses, graph: JobGraph, wiring: Wiring, slot: WorkerId, name: str) -> None:
        super().__init__(graph, wiring)
        self._job = job
        self.slot = slot
        self.name = name
        self.gone = False
        self.hangs = False
        self.obeyed: int = ev.UNFENCED
        """Generation of the newest coordinator that has sent something to the process."""
        self.finished: dict[TaskId, Subtask] = {}
        """Subtasks that have finished here. They answer a coordinator that takes over."""
        self.unreported: list[CoordinatorEvent] = []
        """Reports of its subtasks for the next message."""
        self._takes_in_soon = False

    def obeys(self, generation: int) -> None:
        """Records that a coordinator of this generation has sent a message to the process, which obeys no older
        coordinator from then on.
        """
        self.obeyed = max(generation, self.obeyed)

    def has(self, subtask: Subtask) -> bool:
        """Returns whether this subtask runs in the process."""
        return not self.gone and self.subtasks.get(subtask.task) is subtask

    def acts(self, action: Callable[[], object]) -> bool:
        """Returns whether the process can act now.

        If its node is cut off, `action` is queued and runs when the connection is restored.
        """
        if self.gone or self.hangs:
            return False
        return not self._job.hold_if_cut(self, action)

    def guarded(self, subtask: Subtask, action: Callable[[], object]) -> bool:
        """Runs an action of a subtask like `Worker`, if the process can act.

        Frames between its subtasks are delivered soon afterwards.
        """
        if not self.has(subtask) or not self.acts(lambda: self.guarded(subtask, action)):
            return False
        progressed = super().guarded(subtask, action)
        if self.queue and not self._takes_in_soon:
            self._takes_in_soon = True
            self._job.world.after(0, self._round)
        return progressed

    def _round(self) -> None:
        if self.acts(self._round):
            self.take_in()
            self._takes_in_soon = False

    def turn_of(self, subtask: Subtask) -> None:
        """Delivers the frames between subtasks, and then runs one turn of this subtask."""
        self.take_in()
        if self.has(subtask):
            running = {task: each.attempt for task, each in self.subtasks.items()}
            self._job.watch.oracle.local_queues.turn(self.name, running)
            self.guarded(subtask, subtask.host.turn)

    def let_go(self, task: TaskId) -> Subtask | None:
        """Stops a subtask, and keeps its keyed state for its next attempt.

        Returns the stopped subtask, even if it had finished, or None if it is not in this process.
        """
        over = self.finished.pop(task, None)
        return self.stop(task) or over

    @property
    def unfinished(self) -> dict[TaskId, AttemptNumber]:
        """Returns the subtasks that would fail if the process ended, with their attempts.

        Subtasks that have finished but not reported it yet are included.
        """
        silent = {event.task for event in self.unreported if isinstance(event, co.TaskFinished)}
        running = {task: subtask.attempt for task, subtask in self.subtasks.items()}
        return running | {task: subtask.attempt for task, subtask in self.finished.items() if task in silent}

    def end(self) -> dict[TaskId, AttemptNumber]:
        """Ends the process with all its subtasks. Returns the subtasks that have failed, with their attempts."""
        failed = self.unfinished
        self.gone = True
        self.subtasks.clear()
        self.finished.clear()
        self.unreported.clear()
        self.queue.clear()
        return failed


class _Seen(NamedTuple):
    """A process as a coordinator last saw it: with the attempts of its subtasks at its last answer."""

    process: SimulatedProcess
    attempts: dict[TaskId, AttemptNumber]


class SimulatedProcesses:
    """The processes of one job.

    `silence_ms` is the time in ms after which a process that does not answer counts as hung; 0 if it never does.
    """

    def __init__(self, job: JobOfProcesses, graph: JobGraph, wiring: Wiring, silence_ms: int) -> None:
        self._job = job
        self._graph = graph
        self._wiring = wiring
        self._silence_ms = silence_ms
        plan = slot_plan(graph, vertex_labels(graph))
        self._slots = plan.workers
        self._names = plan.names
        self._numbers: dict[WorkerId, int] = {}
        self._of: dict[WorkerId, SimulatedProcess] = {}

    def of(self, task: TaskId) -> SimulatedProcess:
        """Returns the process of a subtask, or the process in which it ran last."""
        slot = self._slots[task]
        return self._of[slot] if slot in self._of else self.start_process(slot)

    def start_process(self, slot: WorkerId) -> SimulatedProcess:
        """Starts the next process of a slot, and returns it."""
        number = self._numbers[slot] = self._numbers.get(slot, -1) + 1
        name = f"{self._names[slot]}#{number}"
        process = self._of[slot] = SimulatedProcess(self._job, self._graph, self._wiring, slot, name)
        return process

    def by_process(self, tasks: Iterable[TaskId]) -> dict[SimulatedProcess, tuple[TaskId, ...]]:
        """Returns the processes of these tasks, each with its tasks."""
        found: dict[SimulatedProcess, list[TaskId]] = {}
        for task in tasks:
            found.setdefault(self.of(task), []).append(task)
        return {process: tuple(of_process) for process, of_process in found.items()}

    @property
    def known(self) -> list[SimulatedProcess]:
        """Returns the newest process of each slot, in an order that is the same in every run."""
        return [self._of[slot] for slot in sorted(self._of)]

    def staff(self, process: SimulatedProcess, given_up: Collection[str], generation: int) -> SimulatedProcess:
        """Prepares a process for new subtasks. Returns it, or a new process if it hangs or was given up."""
        if process.hangs or process.name in given_up:
            self.end(process, "another process takes its place")
            process = self._of[process.slot]
        process.obeys(generation)
        return process

    def dies_early(self, subtask: Subtask) -> bool:
        """Ends, with the probability `restore_crash`, the process of a subtask that does not run yet.

        Returns whether it did.
        """
        job = self._job
        faults = self._job.world.faults
        process = subtask.worker
        assert isinstance(process, SimulatedProcess)
        if subtask.host.machine.status not in _NOT_BEGUN or not process.has(subtask) or process.hangs:
            return False
        if job.crashes >= faults.crashes_max or not job.world.chance("restore_crash"):
            return False
        job.crashes += 1
        job.watch.coverage.saw("restore_interrupted")
        self.end(process, "process died before one of its tasks had begun")
        return True

    def hang(self, process: SimulatedProcess) -> None:
        """Makes a process hang from now on."""
        self._job.world.note(process.name, "hangs, with", *process.subtasks)
        process.hangs = True
        self._job.world.after(self._silence_ms, lambda: self._notice(process))

    def _notice(self, process: SimulatedProcess) -> None:
        if self._job.over or process.gone:
            return
        if self._job.coordinator is None:
            self._job.world.after(self._silence_ms, lambda: self._notice(process))
        else:
            self._find_hung(self._job.coordinator, _Seen(process, process.unfinished))

    def silent(self, processes: Iterable[SimulatedProcess], still: Callable[[SimulatedProcess], bool]) -> None:
        """Makes the coordinator treat processes as hung if they stay unreachable for `silence_ms`."""
        seen = list(processes)
        if self._silence_ms:
            self._job.world.after(self._silence_ms, lambda: self._notice_silence(seen, still))

    def _notice_silence(self, seen: Iterable[SimulatedProcess], still: Callable[[SimulatedProcess], bool]) -> None:
        silent = [process for process in seen if not process.gone and still(process)]
        coordinator = self._job.coordinator
        if self._job.over or not silent:
            return
        if coordinator is None:
            self._job.world.after(self._silence_ms, lambda: self._notice_silence(silent, still))
            return
        for process in silent:
            if process.unfinished:
                self._find_hung(coordinator, _Seen(process, process.unfinished))

    def cut_off(self, coordinator: CoordinatorDriver) -> None:
        """Makes a coordinator that is cut off from the network treat all processes as hung after `silence_ms`."""
        if self._silence_ms:
            seen = [_Seen(process, process.unfinished) for process in self.known if process.unfinished]
            self._job.world.after(self._silence_ms, lambda: self._find_all_hung(coordinator, seen))

    def _find_all_hung(self, coordinator: CoordinatorDriver, seen: list[_Seen]) -> None:
        if not self._job.over:
            self._job.watch.coverage.saw("all_taken_for_hung")
            for one in seen:
                self._find_hung(coordinator, one)

    def _find_hung(self, coordinator: CoordinatorDriver, seen: _Seen) -> None:
        at_ms = self._job.world.wall_ms
        name = seen.process.name
        reason = f"it hangs: the process {name} has not answered"
        for task, attempt in seen.attempts.items():
            self._job.hear(coordinator, co.TaskFailed(at_ms, attempt, task, reason))
        self._job.hear(coordinator, co.ProcessGivenUp(at_ms, name, reason))

    def kill(self, name: str, generation: int) -> None:
        """Executes a kill that a coordinator has requested."""
        process = next((process for process in self.known if process.name == name), None)
        if self._job.over or process is None:
            return
        if not process.hangs:
            self._job.watch.takeovers.killed(name, generation, process.obeyed)
        self._job.watch.coverage.saw("process_killed")
        self.end(process, f"coordinator {generation} has ended it")

    def leave(self, generation: int) -> None:
        """Ends all processes that obey a coordinator which cannot continue."""
        for process in self.known:
            if not self._job.over and process.unfinished and may_obey(generation, process.obeyed):
                self._job.watch.takeovers.killed(process.name, generation, process.obeyed)
                self.end(process, f"coordinator {generation} has ordered it to leave")

    def end(self, process: SimulatedProcess, reason: str) -> None:
        """Ends a process with all its subtasks, and starts a new one for its slot."""
        job = self._job
        if len(process.subtasks) > 1:
            job.watch.coverage.saw("slot_lost")
        if job.watch.oracle.local_queues.ended(process.name):
            job.watch.coverage.saw("queue_lost")
        failed = process.end()
        self.start_process(process.slot)
        job.world.note(process.name, "is lost:", reason)
        if failed:
            job.world.after(job.world.between(0, DETECTION_MS_MAX), lambda: self._report(failed, reason))

    def _report(self, failed: dict[TaskId, AttemptNumber], reason: str) -> None:
        for task, attempt in failed.items():
            self._job.report(co.TaskFailed(self._job.world.wall_ms, attempt, task, reason))


class SimulatedNodes:
    """The nodes on which the processes of one simulated job run."""

    def __init__(self, job: JobOfProcesses) -> None:
        self._job = job
        self._of: dict[str, int] = {}
        """The node of each process, by the name of the process."""
        self._cut: dict[int, None] = {}
        self._held: dict[str, deque[Callable[[], object]]] = {}
        """Actions for processes on nodes that are cut off, by process name.

        They run when the connection is restored.
        """
        self._faults = 0
        self._folders: dict[int, SimulatedNodeFolder] = {}
        self._disks = 0

    def folder(self, node: int) -> SimulatedNodeFolder:
        """Returns the folder for local copies on the disk of a node."""
        if node not in self._folders:
            self._disks += 1
            seed = f"disk {self._disks} of {self._job.world.seed}"
            self._folders[node] = SimulatedNodeFolder(self._job.world, f"node {node}", seed)
        return self._folders[node]

    def of(self, process: SimulatedProcess) -> int:
        """Returns the node of a process. It is chosen at random when the process starts."""
        name = process.name
        if name not in self._of:
            there = [node for node in range(NODES) if node not in self._cut] or list(range(NODES))
            self._of[name] = self._job.world.random.choice(there)
        return self._of[name]

    def is_cut(self, process: SimulatedProcess) -> bool:
        """Returns whether the node of a process is cut off."""
        return bool(self._cut) and self.of(process) in self._cut

    def hold(self, process: SimulatedProcess, action: Callable[[], object]) -> None:
        """Queues an action until the connection to a process's node is restored."""
        self._held.setdefault(process.name, deque()).append(action)

    def maybe_fail(self, process: SimulatedProcess) -> None:
        """Loses the node of a process, or cuts it off, each with its probability."""
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
        """Returns the names of the processes on a node for which actions are queued.

        A process that has ended may still have I/O in progress.
        """
        return [name for name in self._held if self._of[name] == node]

    def _lose(self, node: int, reason: str) -> None:
        job = self._job
        processes = self._on(node)
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
        job = self._job
        world = self._job.world
        processes = self._on(node)
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
