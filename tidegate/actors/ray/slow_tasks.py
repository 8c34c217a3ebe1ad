"""Logs which tasks a slow checkpoint or a slow deployment is waiting for, and what these tasks are doing.

A checkpoint or deployment that waits for one task waits until its timeout, ten minutes by default. Afterwards it is too
late to see what delayed the task. Rules:

- The line is logged after `LATE_MS`, and again after twice that time, four times, and so on.
- The first `ASKED_MAX` of the tasks are requested to report their stacks. A separate thread of each process answers,
  and the wait ends after `LOOK_MS_MAX`.
- No decision depends on the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.coordinator.deployment import not_ready
from tidegate.actors.drivers.log_lines import log_fields
from tidegate.protocol.failures import bounded_text
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId

log = logging.getLogger(__name__)


class SlowCheckpoints:
    """Logs which tasks the slow checkpoints of one job wait for. `look` runs on the coordinator's mailbox."""

    def __init__(self, tasks: SlowTaskLog) -> None:
        self._tasks = tasks
        self._due_ms: dict[CheckpointId, int] = {}
        """Age, in ms, at which each pending checkpoint is logged next."""

    def look(self, pending: Iterable[PendingCheckpoint], now_ms: int) -> None:
        """Logs the pending checkpoints that are slow, and for which a line is due."""
        due_ms, self._due_ms = self._due_ms, {}
        for each in pending:
            limit_ms, age_ms = due_ms.get(each.checkpoint_id, LATE_MS), now_ms - each.triggered_at_ms
            if late := age_ms >= limit_ms and bool(each.waiting):
                what = f"{each.properties.kind.words} {each.checkpoint_id}"
                fields = log_fields(checkpoint=each.checkpoint_id, attempt=each.attempt)
                self._tasks.log_waiting(what, age_ms, each.waiting, fields)
            self._due_ms[each.checkpoint_id] = 2 * limit_ms if late else limit_ms


class SlowDeployments:
    """Logs which tasks the slow deployments of one job wait for. `look` runs on the coordinator's mailbox."""

    def __init__(self, tasks: SlowTaskLog) -> None:
        self._tasks = tasks
        self._attempt: AttemptNumber | None = None
        self._since_ms = 0
        self._due_ms = LATE_MS
        """Age, in ms, at which the attempt is logged next."""

    def look(self, state: CoordinatorState, has_room: bool, now_ms: int) -> None:
        """Logs the running deployment if it is slow and a line is due. `has_room`: the job does not wait for
        resources.
        """
        waiting = not_ready(state) if has_room else ()
        if not waiting:
            self._attempt = None
            return
        if self._attempt != state.attempt:
            self._attempt, self._since_ms, self._due_ms = state.attempt, now_ms, LATE_MS
        age_ms = now_ms - self._since_ms
        if age_ms >= self._due_ms:
            self._due_ms *= 2
            self._tasks.log_waiting(f"attempt {state.attempt}", age_ms, waiting, log_fields(attempt=state.attempt))


LATE_MS = 30_000
LOOK_MS_MAX = 5_000
ASKED_MAX = 4
"""Limit of tasks that are requested to report what they are doing."""
SILENT = "it does not report what it is doing"

Ask = Callable[[TaskId], Future[str] | None]
"""A function that requests from a task's process what it is doing. Returns None if the task has no process."""


class SlowTaskLog:
    """Logs what the tasks are doing for which one job waits. Runs on the coordinator's mailbox, by `post` and
    `call_later`.
    """

    def __init__(
        self,
        ask: Ask,
        post: Callable[[Callable[[], object]], None],
        call_later: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._ask = ask
        self._post = post
        self._call_later = call_later

    def log_waiting(self, what: str, age_ms: int, tasks: Iterable[TaskId], fields: Mapping[str, object]) -> None:
        """Logs that `what` has waited `age_ms` for these tasks, once they have reported what they are doing.

        `fields` are added to the log line.
        """
        waiting = sorted(tasks)
        asked = {task: self._ask(task) for task in waiting[:ASKED_MAX]}
        answers = {task: "it has no process" for task, answer in asked.items() if answer is None}
        open_tasks = {task for task, answer in asked.items() if answer is not None}
        more = f", and {len(waiting) - len(asked)} more tasks" if len(waiting) > len(asked) else ""
        logged = False

        def conclude() -> None:
            nonlocal logged
            if logged:
                return
            logged = True
            doing = "; ".join(f"{task}: {answers.get(task, SILENT)}" for task in asked)
            log.warning(
                "%s has been under way for %d s, and waits for %d tasks: %s%s",
                what,
                age_ms // 1_000,
                len(waiting),
                bounded_text(doing),
                more,
                extra=fields,
            )

        def take(task: TaskId, answer: Future[str]) -> None:
            if answer.exception() is None:
                answers[task] = answer.result()
            open_tasks.discard(task)
            if not open_tasks:
                conclude()

        def answered(task: TaskId, answer: Future[str]) -> None:
            self._post(lambda: take(task, answer))

        for task, answer in asked.items():
            if answer is not None:
                answer.add_done_callback(partial(answered, task))
        if not open_tasks:
            conclude()
        else:
            self._call_later(LOOK_MS_MAX, conclude)
