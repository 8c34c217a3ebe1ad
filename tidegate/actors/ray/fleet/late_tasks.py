"""`LateTasks`: says of something that does not come which tasks it waits for, and what these are doing.

`LateCheckpoints` and `LateDeployments` call it. What waits for one task waits for its time-out, ten minutes by default,
and then nobody can see any more what held that task up. Rules:

- It is said after `LATE_MS`, and again after twice that time, four times, and so on.
- The first few of the tasks are asked. Their answers come from a thread that does nothing else, and nobody waits for
  them longer than `LOOK_MS_MAX`.
- Nothing is decided by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from tidegate.protocol.failure_reasons import bounded_text
from tidegate.protocol.identity import TaskId

log = logging.getLogger(__name__)

LATE_MS = 30_000
LOOK_MS_MAX = 5_000
ASKED_MAX = 4
"""So many tasks are asked what they are doing."""
SILENT = "it does not say what it is doing"

Ask = Callable[[TaskId], Future[str] | None]
"""Asks the process of a task what it is doing; None if it has none."""


class LateTasks:
    """Those of one job. It runs on the coordinator's mailbox; `post` and `call_later` are the mailbox's."""

    def __init__(
        self,
        ask: Ask,
        post: Callable[[Callable[[], object]], None],
        call_later: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._ask = ask
        self._post = post
        self._call_later = call_later

    def tell(self, what: str, age_ms: int, tasks: Iterable[TaskId], fields: Mapping[str, object]) -> None:
        """`what` waits for these tasks, and has done so for a while. `fields`: of the line in the log."""
        waiting = sorted(tasks)
        asked = {task: self._ask(task) for task in waiting[:ASKED_MAX]}
        answers = {task: "it has no process" for task, answer in asked.items() if answer is None}
        open_tasks = {task for task, answer in asked.items() if answer is not None}
        more = f", and {len(waiting) - len(asked)} more tasks" if len(waiting) > len(asked) else ""
        told = False

        def conclude() -> None:
            nonlocal told
            if told:
                return
            told = True
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
