"""What a coordinator sends a worker's process to run subtasks, and the fence that decides which of it is carried out.

What a broken connection may have lost is sent again, and Ray may deliver a call late. So messages come twice, and out
of order. Rules of `DeployFence`:

- A subtask begins an attempt once. It does not begin one after the process was told to stop that or a later one, nor
  after it got a later one. The numbers of attempts only grow, so the fence stores nothing but numbers.
- Messages from a replaced coordinator are ignored (`may_obey`). A new coordinator may deploy the running attempt again.
- Stopping an attempt does not stop a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.task.events import UNFENCED
from tidegate.actors.task.invariants import may_obey
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId

Handle: TypeAlias = Any
"""A `ray.actor.ActorHandle`, whose methods have no types."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of another worker: its actor, and where it is reached on its node."""

    handle: Handle
    process_id: str
    node_id: str
    address: bytes
    """Where it listens for connections; empty if it does not."""


@dataclass(frozen=True, slots=True)
class TaskDeployment:
    """Subtasks that a worker is to run in an attempt, what they start from, and the processes of their neighbours.

    `peers`: for each neighbour that is not among `tasks` its process. `generation`: that of the coordinator.
    """

    tasks: tuple[TaskId, ...]
    attempt: AttemptNumber
    restore: RestorePoint | None
    peers: dict[TaskId, Peer]
    generation: Generation = UNFENCED
    slot: str = ""
    """What people call the slot."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What a process is there for: its job, and of each subtask that it was given the newest attempt.

    `bundle`: that of the reservation in which it runs. `follows`: the subtasks whose state it holds, and of each one
    the checkpoint.
    """

    job_id: JobId
    info: ProcessInfo
    tasks: Mapping[TaskId, AttemptNumber] = field(default_factory=dict)
    bundle: int | None = None
    follows: Mapping[TaskId, CheckpointId | None] = field(default_factory=dict)
    spare: bool = True
    """Whether it was started as a spare process, which reserves nothing."""


NONE = AttemptNumber(-1)


class DeployFence:
    """What one process was told. The generation of coordinators is one fence for the process and all its subtasks."""

    def __init__(self) -> None:
        self.newest = UNFENCED
        """The newest coordinator that has given an order."""
        self.given: dict[TaskId, AttemptNumber] = {}
        """Of each subtask the newest attempt that the process was given, whatever has become of it."""
        self._given_by: dict[TaskId, Generation] = {}
        self._let_go: dict[TaskId, AttemptNumber] = {}
        """Of each subtask the newest attempt that the process was told to let go of."""

    @property
    def holds(self) -> dict[TaskId, AttemptNumber]:
        """Of each subtask the attempt that it was given and was not told to let go of."""
        return {task: given for task, given in self.given.items() if given > self._let_go.get(task, NONE)}

    def is_replaced(self, generation: Generation) -> bool:
        """Whether a newer coordinator than this one has given an order. Remembers a newer one."""
        replaced = not may_obey(generation, self.newest)
        self.newest = max(generation, self.newest)
        return replaced

    def begins(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Return which of these subtasks begin this attempt here. They are the process's own from then on."""
        if self.is_replaced(generation):
            return ()
        begun = tuple(task for task in tasks if self._begins(task, attempt, generation))
        self.given |= dict.fromkeys(begun, attempt)
        self._given_by |= dict.fromkeys(begun, generation)
        return begun

    def _begins(self, task: TaskId, attempt: AttemptNumber, generation: Generation) -> bool:
        given = self.given.get(task, NONE), self._given_by.get(task, UNFENCED)
        return attempt > self._let_go.get(task, NONE) and (attempt, generation) > given

    def lets_go(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Return which of these subtasks let go of what they run, if that is this attempt or an earlier one."""
        if self.is_replaced(generation):
            return ()
        left = tuple(tasks)
        for task in left:
            self._let_go[task] = max(self._let_go.get(task, NONE), attempt)
        return left
