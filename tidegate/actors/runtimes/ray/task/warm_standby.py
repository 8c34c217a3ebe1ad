"""`WarmStandby`: follows the checkpoints of a task that runs elsewhere, in a spare process, on a thread of its own.

Rules:

- What is new in a checkpoint is read by `StateFollower` (`actors/restore/state_follower.py`).
- One checkpoint is taken in at a time; of those that complete meanwhile only the newest counts.
- When the process is given that task, the task gets what is held. Given another one, it holds nothing any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.hosts.threads import WorkerPool
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.restore.state_follower import StateFollower
from tidegate.actors.runtimes.metrics.task_values import task_tags
from tidegate.actors.runtimes.ray.metrics import StandbyMetrics
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.storage.clock import now_ms
from tidegate.storage.copies.node_folder import PrivateFolder
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId

log = logging.getLogger(__name__)


class WarmStandby:
    """That of one process. Every method runs on its mailbox, except `holds`."""

    def __init__(
        self,
        context: JobContext,
        open_store: OpenStore,
        mailbox: Mailbox,
        threads: int,
        died: Callable[[BaseException], object],
    ) -> None:
        self._context = context
        self._open_store = open_store
        self._mailbox = mailbox
        self._threads = threads
        self._died = died
        self._follower: StateFollower | None = None
        self._pool: WorkerPool | None = None
        self._metrics: StandbyMetrics | None = None
        self._reads = False
        self._next: RestorePoint | None = None

    @property
    def holds(self) -> tuple[TaskId, CheckpointId | None] | None:
        """The task that is followed, and the checkpoint whose state is held. From any thread."""
        follower = self._follower
        return None if follower is None else (follower.task, follower.checkpoint_id)

    def follow(self, task: TaskId, restore: RestorePoint) -> None:
        """A checkpoint of this task is complete."""
        if self._follower is None or self._follower.task != task:
            self.end()
            context = self._context
            self._pool = self._pool or WorkerPool(1, "tidegate-standby", self._died)
            self._metrics = StandbyMetrics(task_tags(context, task))
            copies = context.options.local_copies
            self._follower = StateFollower(
                task,
                context.graph,
                replace(context.options.backend, restore_threads=self._threads),
                self._open_store,
                now_ms,
                None if copies is None else PrivateFolder(copies),
                self._threads,
            )
        self._next = restore
        self._go_on()

    def end(self, task: TaskId | None = None) -> StateFollower | None:
        """The process is given a task: what holds its state, if that is this one."""
        follower, self._follower, self._next = self._follower, None, None
        if self._metrics is not None:
            self._metrics.holds(None)
        if follower is None or follower.task == task:
            return follower
        follower.close()
        return None

    def _go_on(self) -> None:
        follower, restore = self._follower, self._next
        if follower is None or restore is None or self._reads:
            return
        assert self._pool is not None
        self._reads, self._next = True, None
        self._pool.submit(
            lambda: follower.follow(restore), lambda future: self._mailbox.post(lambda: self._followed(future))
        )

    def _followed(self, future: Future[None]) -> None:
        self._reads = False
        future.result()
        if self._follower is not None and self._metrics is not None:
            self._metrics.holds(self._follower.checkpoint_id)
        self._go_on()
