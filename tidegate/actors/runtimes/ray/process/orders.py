"""What passes between a coordinator's process and a task's: an order to begin, and what a process says it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.actors.task.messages.events import UNFENCED
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId

Handle: TypeAlias = Any
"""A `ray.actor.ActorHandle`, whose methods have no types."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to do: a task of an attempt, what it starts from, and its neighbours.

    `generation`: that of the coordinator which says so.
    """

    task: TaskId
    attempt: AttemptNumber
    restore: RestorePoint | None
    peers: dict[TaskId, Handle]
    generation: Generation = UNFENCED


@dataclass(frozen=True, slots=True)
class Held:
    """What a process is there for: its job, and the task of an attempt that it was given last. None: it is spare.

    `bundle`: that of the reservation in which it runs. `follows`: the task whose state it holds, and the checkpoint.
    """

    job_id: JobId
    info: ProcessInfo
    task: TaskId | None
    attempt: AttemptNumber
    bundle: int | None = None
    follows: tuple[TaskId, CheckpointId | None] | None = None
