"""The deployment of subtasks to a worker's process, and `DeployFence`, which decides which deployments are outdated.

Messages that a broken connection may have lost are sent again, and Ray may deliver a call late. So messages arrive
twice, and out of order. Rules of `DeployFence`:

- A subtask begins an attempt once. It does not begin an attempt after the process was ordered to stop that attempt or a
  later one, or after it got a later one. The numbers of attempts only grow, so the fence stores only numbers.
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
"""A `ray.actor.ActorHandle`. The type checker does not check calls of its methods."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of another worker: its actor, its node, and its address for connections."""

    handle: Handle
    process_id: str
    node_id: str
    address: bytes
    """Address for socket connections on its node. Empty if the process does not listen."""


@dataclass(frozen=True, slots=True)
class TaskDeployment:
    """The message that deploys subtasks to a worker's process: the attempt, the checkpoint to restore, and the
    neighbours.

    `peers`: the process of each neighbour task that is not among `tasks`. `generation`: the generation of the
    coordinator. `restore` is None for a start without state.
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
    """A worker process's answer to a new coordinator: its role, and the newest attempt of each subtask deployed to it.

    `bundle` is the index of the bundle in which it runs, or None. `follows` has, for a standby, the subtasks whose
    state it copies, each with the copied checkpoint, or None before the first copy.
    """

    job_id: JobId
    info: ProcessInfo
    tasks: Mapping[TaskId, AttemptNumber] = field(default_factory=dict)
    bundle: int | None = None
    follows: Mapping[TaskId, CheckpointId | None] = field(default_factory=dict)
    spare: bool = True
    """True if the process was started as a standby, which reserves no resources."""


NONE = AttemptNumber(-1)


class DeployFence:
    """Stores which attempts one process was ordered to begin and to stop, and rejects outdated messages.

    The newest coordinator generation is recorded once for the process and all its subtasks.
    """

    def __init__(self) -> None:
        self.newest = UNFENCED
        """Generation of the newest coordinator that has sent a message to this process."""
        self.given: dict[TaskId, AttemptNumber] = {}
        """The newest attempt of each subtask that was deployed to this process, whether it still runs or not."""
        self._given_by: dict[TaskId, Generation] = {}
        self._stopped: dict[TaskId, AttemptNumber] = {}
        """The newest attempt of each subtask that the process was ordered to stop."""

    @property
    def holds(self) -> dict[TaskId, AttemptNumber]:
        """Returns the newest deployed attempt of each subtask. Subtasks that were ordered to stop are omitted."""
        return {task: given for task, given in self.given.items() if given > self._stopped.get(task, NONE)}

    def is_replaced(self, generation: Generation) -> bool:
        """Returns whether a newer coordinator than this generation has sent a message. Stores the newest
        generation.
        """
        replaced = not may_obey(generation, self.newest)
        self.newest = max(generation, self.newest)
        return replaced

    def begins(self, tasks: Iterable[TaskId], attempt: AttemptNumber, generation: Generation) -> tuple[TaskId, ...]:
        """Returns which of the subtasks may begin this attempt, and records that they have begun it."""
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
        """Records the order to stop this attempt and earlier ones. Returns the subtasks to stop, or none if the
        order is outdated.
        """
        if self.is_replaced(generation):
            return ()
        left = tuple(tasks)
        for task in left:
            self._stopped[task] = max(self._stopped.get(task, NONE), attempt)
        return left
