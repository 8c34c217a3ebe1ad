"""`AsyncCallers`: the operators of a chain whose functions are called beside the task (`AsyncMap`).

Rules:

- A task takes no input while rows wait for a call: `blocked`. At the end of its input it waits for all results.
- What functions return goes on between two turns, to the operator behind: rows, and watermarks that waited for them.
  All steps of such a watermark come before the rows behind it: these are judged by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.messages.instructions import MakeCalls
from tidegate.actors.task.pipeline.chain_links import Link
from tidegate.actors.task.task_status import TaskStatus
from tidegate.operators.functions.async_map import Answer, AsyncMap
from tidegate.storage.ids import OperatorUid

_WORKING = (TaskStatus.RUNNING, TaskStatus.FINISHING)


class AsyncCallers:
    """`advance`, `step` and `feed` are those of the chain."""

    def __init__(
        self,
        specs: Sequence[OperatorSpec],
        links: Sequence[Link],
        advance: Callable[[int, int], None],
        step: Callable[[int], bool],
        feed: Callable[[int, pa.RecordBatch], None],
    ) -> None:
        self._callers = {
            spec.uid: (position, link.operator)
            for position, (spec, link) in enumerate(zip(specs, links, strict=True))
            if isinstance(link.operator, AsyncMap)
        }
        self._advance, self._step, self._feed = advance, step, feed
        self.draining = False
        """Whether the input has ended for good."""

    @property
    def blocked(self) -> bool:
        """Whether nothing can be done before a function has returned."""
        return any(caller.full or (self.draining and caller.busy) for _, caller in self._callers.values())

    def take_calls(self, status: TaskStatus) -> list[MakeCalls]:
        """Calls to make now, by a task that works: before that nobody is there for the results."""
        if status not in _WORKING:
            return []
        taken = ((uid, tuple(caller.take_calls())) for uid, (_, caller) in self._callers.items())
        return [MakeCalls(uid, calls) for uid, calls in taken if calls]

    def answered(self, answers: Iterable[tuple[OperatorUid, Answer]], status: TaskStatus) -> None:
        """Functions have returned, or failed. Nothing for a task that was stopped: its rows are in the savepoint."""
        if status not in _WORKING:
            return
        by_operator: dict[OperatorUid, list[Answer]] = {}
        for uid, answer in answers:
            by_operator.setdefault(uid, []).append(answer)
        for uid, found in by_operator.items():
            position, caller = self._callers[uid]
            for item in caller.answered(found):
                if isinstance(item, int):
                    self._advance(position + 1, item)
                    while self._step(position):
                        pass
                else:
                    self._feed(position + 1, item)
