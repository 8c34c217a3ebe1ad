"""`WarmStandby`: copies the keyed state of subtasks that run in another process into a spare process, at each
checkpoint.

Rules:

- A standby follows the keyed subtasks of one slot. `StateFollower` (`tidegate/actors/restore/state_follower.py`) reads
  the changes of each checkpoint.
- It reads one checkpoint of one subtask at a time, in turn. Of checkpoints that complete meanwhile it reads only the
  newest.
- When the process gets subtasks, they start from the copied state. Other subtasks are not followed any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.threads import ThreadPool
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.metrics import StandbyMetrics
from tidegate.actors.restore.state_follower import StateFollower
from tidegate.actors.runtimes.task_metrics import task_tags
from tidegate.protocol.failures import error_text
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import now_ms
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.local_copies import PrivateFolder

log = logging.getLogger(__name__)


class _Followed:
    """A subtask whose state is copied, and the next checkpoint to copy."""

    def __init__(self, follower: StateFollower, metrics: StandbyMetrics) -> None:
        self.follower, self.metrics = follower, metrics
        self.next: RestorePoint | None = None
        """The newest checkpoint to read, or None."""


class WarmStandby:
    """Copies the state of subtasks into one spare process. All methods run on its mailbox, except `holds`."""

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
        self._followed: dict[TaskId, _Followed] = {}
        self._due: deque[_Followed] = deque()
        """Subtasks with a new checkpoint to read, in the order in which they became due."""
        self._pool: ThreadPool | None = None
        self._reads = False

    @property
    def holds(self) -> dict[TaskId, CheckpointId | None]:
        """Returns the subtasks whose state is copied, each with the copied checkpoint, or None. May be called from any
        thread.
        """
        return {task: each.follower.checkpoint_id for task, each in list(self._followed.items())}

    def follow(self, task: TaskId, restore: RestorePoint) -> None:
        """Queues the read of a completed checkpoint of a subtask, behind the reads that already wait."""
        if task not in self._followed:
            context = self._context
            self._pool = self._pool or ThreadPool(1, "tidegate-standby", self._died)
            copies = context.options.local_copies
            follower = StateFollower(
                task,
                context.graph,
                replace(context.options.backend, restore_threads=self._threads),
                self._open_store,
                now_ms,
                None if copies is None else PrivateFolder(copies),
                self._threads,
            )
            self._followed[task] = _Followed(follower, StandbyMetrics(task_tags(context, task)))
        each = self._followed[task]
        each.next = restore
        if each not in self._due:
            self._due.append(each)
        self._read_next()

    def end(self, tasks: Iterable[TaskId] = ()) -> dict[TaskId, StateFollower]:
        """Stops copying the state of these subtasks, because this process gets them. Returns their followers, which
        have the copied state.
        """
        followed, self._followed = self._followed, {}
        self._due.clear()
        for each in followed.values():
            each.metrics.holds(None)
        kept = {task: followed.pop(task).follower for task in tasks if task in followed}
        for each in followed.values():
            each.follower.close()
        return kept

    def _read_next(self) -> None:
        if self._reads or not self._due:
            return
        due = self._due.popleft()
        assert self._pool is not None
        assert due.next is not None
        self._reads = True
        self._pool.submit(
            partial(due.follower.follow, due.next),
            lambda future: self._mailbox.post(partial(self._was_read, due, future)),
        )

    def _was_read(self, each: _Followed, future: Future[None]) -> None:
        self._reads = False
        error = future.exception()
        if each not in self._followed.values():
            if error is not None:  # The subtasks of the process do not depend on it any more.
                log.info("a checkpoint that was followed could not be read: %s", error_text(error))
        elif error is not None:
            raise error
        else:
            each.metrics.holds(each.follower.checkpoint_id)
        self._read_next()
