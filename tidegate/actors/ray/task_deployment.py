"""The deployment of subtasks to a worker's process, and the fence that decides which messages the process carries out.

Messages that a broken connection may have lost are sent again, and Ray may deliver a call late. So messages come twice,
and out of order. Rules of `DeployFence`:

- A subtask begins an attempt once. It does not begin an attempt after the process was ordered to stop that attempt or a
  later one, or after it got a later one. The numbers of attempts only grow, so the fence stores nothing but numbers.
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
"""A `ray.actor.ActorHandle`. Its methods have no types."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of another worker: its actor, and its address on its node."""

    handle: Handle
    process_id: str
    node_id: str
    address: bytes
    """Its address for socket connections, empty if it does not listen."""


@dataclass(frozen=True, slots=True)
class TaskDeployment:
    """The message that deploys subtasks to a worker: the subtasks of an attempt, their restore point, and the processes
    of their neighbours.

    `peers`: the process of each neighbour that is not among `tasks`. `generation`: the generation of the coordinator.
    """

    tasks: tuple[TaskId, ...]
    attempt: AttemptNumber
    restore: RestorePoint | None
    peers: dict[TaskId, Peer]
    generation: Generation = UNFENCED
    slot: str = ""
    """Name of the slot, for people."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The role of a process, and the newest attempt of each subtask that was deployed to it.

    `bundle` is the bundle of the reservation in which it runs. `follows` has the subtasks whose state it holds, each
    with its checkpoint.
    """

    job_id: JobId
    info: ProcessInfo
    tasks: Mapping[TaskId, AttemptNumber] = field(default_factory=dict)
    bundle: int | None = None
    follows: Mapping[TaskId, CheckpointId | None] = field(default_factory=dict)
    spare: bool = True
    """True if it was started as a spare process, which reserves nothing."""


NONE = AttemptNumber(-1)


class DeployFence:
    """Remembers which attempts one process was ordered to begin and to stop, and drops outdated messages.

    The newest generation of coordinators counts for the process and all its subtasks.
    """

    def __init__(self) -> None:
        self.newest = UNFENCED
        """Generation of the newest coordinator that has sent a message."""
        self.given: dict[TaskId, AttemptNumber] = {}
        """The newest attempt of each subtask that was deployed here, whether it still runs or not."""
        self._given_by: dict[TaskId, Generation] = {}
        self._stopped: dict[TaskId, AttemptNumber] = {}
        """The newest attempt of each subtask that the process was ordered to stop."""

    @property
    def holds(self) -> dict[TaskId, AttemptNumber]:
        """Returns the newest deployed attempt of each subtask that was not ordered to stop."""
        return {task: given for task, given in self.given.items() if given > self._stopped.get(task, NONE)}

    def is_replaced(self, generation: Generation) -> bool:
        """Returns whether a newer coordinator than this one has sent a message. Remembers the newest generation."""
        replaced = not may_obey(generation, self.newest)
        self.newest = max(generation, self.newest)
        return replaced

    def begins(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Returns the subtasks that begin this attempt here, and records that they have."""
        if self.is_replaced(generation):
            return ()
        begun = tuple(task for task in tasks if self._begins(task, attempt, generation))
        self.given |= dict.fromkeys(begun, attempt)
        self._given_by |= dict.fromkeys(begun, generation)
        return begun

    def _begins(self, task: TaskId, attempt: AttemptNumber, generation: Generation) -> bool:
        given = self.given.get(task, NONE), self._given_by.get(task, UNFENCED)
        return attempt > self._stopped.get(task, NONE) and (attempt, generation) > given

    def stops(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Returns the subtasks that must stop this attempt or an earlier one, and records it."""
        if self.is_replaced(generation):
            return ()
        left = tuple(tasks)
        for task in left:
            self._stopped[task] = max(self._stopped.get(task, NONE), attempt)
        return left
