"""`SignsOfLife`: what a worker's process answers while it is busy, and what it sees of the processes beside it.

These calls have a thread to themselves: a process that lives answers them, however long a function of the user takes.
Until its subtasks are ready a process is in no call that counts: the deployment has a time limit of its own, and no
barrier waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import ray

from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.actors.ray.process.process_info import ProcessInfo, process_info
from tidegate.actors.ray.process.stacks import kill_process, offer_stack, own_stack, own_threads, stack_of
from tidegate.protocol.identity import TaskId

IO_THREAD_NAMES = "tidegate-io"
"""What the names of the threads begin with that do a task's I/O."""


class Pulse(NamedTuple):
    """A sign of life. Both numbers are unique in the process."""

    call: int | None = None
    """The call that the mailbox is in. None if it has nothing to do, or may take long."""
    oldest_call: int | None = None
    """The call of a function of `map_async` that has been under way for longest, or None."""
    task: TaskId | None = None
    """The subtask that acts, or acted last."""


class SignsOfLife:
    """A part of the class of an actor, which notes its subtasks that are starting."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.starting: set[TaskId] = set()
        """Subtasks that begin here, and are not ready. Read from any thread."""
        self.address = b""
        """Where this process listens for connections; empty if it does not."""
        self.__mailbox = mailbox
        self.__descriptor = offer_stack()

    def info(self) -> ProcessInfo:
        """Where this is, for the process itself."""
        return process_info(self.__descriptor, self.__mailbox.thread, self.address)

    @ray.method(concurrency_group="control")
    def identify(self) -> ProcessInfo:
        """Where this is."""
        return self.info()

    @ray.method(concurrency_group="pulse", enable_task_events=False)
    def pulse(self) -> Pulse:
        """Return a sign of life, with the calls that this process is in."""
        if self.starting:
            return Pulse(task=self.acting())
        return Pulse(self.__mailbox.call, self.oldest_call(), self.acting())

    def acting(self) -> TaskId | None:
        """Return the subtask that acts now, or acted last. From any thread."""
        return None

    def oldest_call(self) -> int | None:
        """Return the number of the oldest call of `map_async` under way, or None. From any thread."""
        return None

    @ray.method(concurrency_group="pulse")
    def stack(self) -> str:
        """What the mailbox is doing."""
        return f"{self.__task()}it is in {own_stack(self.__mailbox.thread)}"

    @ray.method(concurrency_group="pulse")
    def doing(self) -> str:
        """What the mailbox is doing, and the threads that read and write for it."""
        waits = self.__mailbox.call is None
        return f"{'' if waits else self.__task()}{own_threads(self.__mailbox.thread, waits, IO_THREAD_NAMES)}"

    def __task(self) -> str:
        return "" if (task := self.acting()) is None else f"{task}: "

    @ray.method(concurrency_group="pulse")
    def look_beside(self, info: ProcessInfo) -> str:
        """What another process of this node is doing."""
        return stack_of(info.pid, info.stack_descriptor, info.mailbox_thread)

    @ray.method(concurrency_group="pulse")
    def kill_beside(self, info: ProcessInfo) -> None:
        """End another process of this node."""
        kill_process(info.pid, info.stack_descriptor)
