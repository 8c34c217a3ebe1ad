"""What passes between a coordinator and a worker's process: an order to begin, and what the process holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.ray.process.process_info import ProcessInfo
from tidegate.actors.task.messages.events import UNFENCED
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
class Order:
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
class Held:
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
