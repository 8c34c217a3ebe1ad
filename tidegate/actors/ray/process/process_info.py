"""`ProcessInfo`: where a process of a job runs, and how to see what it does."""

from __future__ import annotations

import os
from dataclasses import dataclass

import ray

from tidegate.actors.ray.process.exit_reasons import stderr_path


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where an actor runs."""

    pid: int
    node_id: str
    stderr_path: str = ""
    stack_descriptor: int = -1
    """Where it writes its stacks to when it is asked to (see `stacks`)."""
    mailbox_thread: int = 0
    """The thread that runs its task."""
    actor_id: str = ""
    """How Ray calls it: no other process has this id, or will have it."""
    name: str = ""
    """How people call it: no other process that lives has this name."""
    address: bytes = b""
    """Where it listens for connections of processes of its job on its node; empty if it does not."""


def process_info(stack_descriptor: int = -1, mailbox_thread: int = 0, address: bytes = b"") -> ProcessInfo:
    """Where this process is."""
    context = ray.get_runtime_context()
    actor_id, name = context.get_actor_id() or "", context.get_actor_name() or ""
    place = os.getpid(), context.get_node_id(), stderr_path()
    return ProcessInfo(*place, stack_descriptor, mailbox_thread, actor_id, name, address)
