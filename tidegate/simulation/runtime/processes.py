"""The processes of a simulated job's tasks: which of them hang, who notices that, and who ends them.

A task has one process at a time, and leaves it to its next attempt unless it has died. Rules:

- A process that hangs takes nothing in and says nothing. The coordinator in charge notices that after `silence_ms`.
- A coordinator that was cut off hears nobody. After that time it takes the processes of all tasks for hung.
- What hangs or was given up gets no task any more: a new process takes its place, and has nothing in memory.
- A process may die before its task has begun: while it restores state, or waits for others that do.
- Who is told to leave by a coordinator that was replaced stays. A kill cannot be refused, so the oracle looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.hosts.coordinator.coordinator_host import CoordinatorHost
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.task.invariants import may_obey
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.task_status import TaskStatus
from tidegate.simulation.oracle.watch import Watch
from tidegate.simulation.world.virtual_time import World
from tidegate.storage.ids import AttemptNumber


class JobOfProcesses(Protocol):
    """What processes ask of their job; `SimulatedJob` has it."""

    world: World
    watch: Watch
    tasks: dict[TaskId, TaskHost]
    coordinator: CoordinatorHost | None
    crashes: int

    @property
    def over(self) -> bool: ...
    def hear(self, coordinator: CoordinatorHost, event: CoordinatorEvent) -> None: ...
    def lose(self, task: TaskId, host: TaskHost, reason: str) -> None: ...
    def forget_state(self, task: TaskId) -> None: ...


_NOT_BEGUN = (TaskStatus.CREATED, TaskStatus.READY)


class _Seen(NamedTuple):
    """A process, and what it was doing when it was last heard of."""

    task: TaskId
    process: str
    attempt: AttemptNumber


class SimulatedProcesses:
    """Those of one job. `silence_ms`: after how long somebody who does not answer counts as hung; 0 for never."""

    def __init__(self, job: JobOfProcesses, silence_ms: int) -> None:
        self._job = job
        self._silence_ms = silence_ms
        self._numbers: dict[TaskId, int] = {}
        self._hung: set[str] = set()
        self._obeyed: dict[TaskId, int] = {}
        """The newest coordinator that the process of a task has heard of."""

    def name(self, task: TaskId) -> str:
        """The process that a task is in, or was in last."""
        return f"{task}#{self._numbers.get(task, 0)}"

    def hangs(self, task: TaskId) -> bool:
        """Whether the process of a task hangs."""
        return bool(self._hung) and self.name(task) in self._hung

    def staff(self, task: TaskId, given_up: Collection[str], generation: int) -> None:
        """A coordinator gives a task to its process, or to a new one."""
        if self.hangs(task) or self.name(task) in given_up:
            self.ended(task)
            self._job.forget_state(task)
        self._obeyed[task] = max(generation, self._obeyed.get(task, ev.UNFENCED))

    def dies_early(self, task: TaskId, host: TaskHost) -> bool:
        """Let the process of a task that has not begun die, now and then. Returns whether it does."""
        job, faults = self._job, self._job.world.faults
        if host.machine.status not in _NOT_BEGUN or job.tasks.get(task) is not host or self.hangs(task):
            return False
        if job.crashes >= faults.crashes_max or not job.world.chance("restore_crash"):
            return False
        job.crashes += 1
        job.watch.coverage.saw("restore_interrupted")
        job.lose(task, host, "process died before its task had begun")
        return True

    def obeys(self, task: TaskId, generation: int) -> None:
        """The process of a task has heard of a coordinator."""
        self._obeyed[task] = max(generation, self._obeyed.get(task, ev.UNFENCED))

    @property
    def known(self) -> list[TaskId]:
        """Tasks that have had a process, in an order that does not depend on the run."""
        return sorted(self._obeyed)

    def ended(self, task: TaskId) -> None:
        """The process of a task is of no use any more."""
        self._hung.discard(self.name(task))
        self._numbers[task] = self._numbers.get(task, 0) + 1

    def hang(self, task: TaskId) -> None:
        """The process of a task takes nothing in from now on."""
        seen = _Seen(task, self.name(task), self._job.tasks[task].machine.attempt)
        self._job.world.note(task, "hangs, in", seen.process)
        self._hung.add(seen.process)
        self._job.world.after(self._silence_ms, lambda: self._notice(seen))

    def _notice(self, seen: _Seen) -> None:
        if self._job.over or seen.process not in self._hung:
            return
        if self._job.coordinator is None:
            self._job.world.after(self._silence_ms, lambda: self._notice(seen))
        else:
            self._find_hung(self._job.coordinator, seen)

    def silent(self, tasks: Iterable[TaskId], still: Callable[[TaskId], bool]) -> None:
        """Nobody reaches the processes of these tasks. They count as hung when that lasts."""
        seen = [_Seen(task, self.name(task), AttemptNumber(-1)) for task in tasks]
        if self._silence_ms:
            self._job.world.after(self._silence_ms, lambda: self._notice_silence(seen, still))

    def _notice_silence(self, seen: list[_Seen], still: Callable[[TaskId], bool]) -> None:
        silent = [one for one in seen if self.name(one.task) == one.process and still(one.task)]
        coordinator = self._job.coordinator
        if self._job.over or not silent:
            return
        if coordinator is None:
            self._job.world.after(self._silence_ms, lambda: self._notice_silence(silent, still))
            return
        for one in silent:
            if (host := self._job.tasks.get(one.task)) is not None:
                self._find_hung(coordinator, one._replace(attempt=host.machine.attempt))

    def cut_off(self, coordinator: CoordinatorHost) -> None:
        """A coordinator hears nobody any more."""
        if self._silence_ms:
            seen = [_Seen(task, self.name(task), host.machine.attempt) for task, host in self._job.tasks.items()]
            self._job.world.after(self._silence_ms, lambda: self._find_all_hung(coordinator, seen))

    def _find_all_hung(self, coordinator: CoordinatorHost, seen: list[_Seen]) -> None:
        if not self._job.over:
            self._job.watch.coverage.saw("all_taken_for_hung")
            for one in seen:
                self._find_hung(coordinator, one)

    def _find_hung(self, coordinator: CoordinatorHost, seen: _Seen) -> None:
        at_ms, reason = self._job.world.wall_ms, f"it hangs: the process {seen.process} has not answered"
        self._job.hear(coordinator, co.TaskFailed(at_ms, seen.attempt, seen.task, reason))
        self._job.hear(coordinator, co.ProcessGivenUp(at_ms, seen.process, reason))

    def kill(self, name: str, generation: int) -> None:
        """A kill that a coordinator has asked for comes through."""
        task = next((task for task in self._numbers.keys() | self._job.tasks.keys() if self.name(task) == name), None)
        if self._job.over or task is None:
            return
        if name not in self._hung:
            self._job.watch.takeovers.killed(name, generation, self._obeyed.get(task, ev.UNFENCED))
        self._job.watch.coverage.saw("process_killed")
        self.end(task, f"coordinator {generation} has ended its process {name}")

    def leave(self, generation: int) -> None:
        """A coordinator that cannot go on tells all processes to end."""
        for task in list(self._job.tasks):
            if not self._job.over and may_obey(generation, self._obeyed.get(task, ev.UNFENCED)):
                name = self.name(task)
                self._job.watch.takeovers.killed(name, generation, self._obeyed.get(task, ev.UNFENCED))
                self.end(task, f"coordinator {generation} has told its process to leave")

    def end(self, task: TaskId, reason: str) -> None:
        """The process of a task ends, with what it holds."""
        host = self._job.tasks.get(task)
        if host is None:
            self.ended(task)
            self._job.forget_state(task)
        else:
            self._job.lose(task, host, reason)
