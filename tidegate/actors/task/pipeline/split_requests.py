"""`SplitRequests`: a source task asks the coordinator for splits, one question at a time.

Rules:

- It asks when the last row of its last split was read, so that a fast task gets more splits than a slow one.
- A question and its answer have a number: how many splits the task was given before in its attempt. An answer counts
  once, however often it comes.
- Questions and answers may get lost, with their coordinator too. So a question is repeated until it is answered.
- An answer without splits says that there are no more. Only then has the source an end for this task.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.messages.events import SplitsAssigned, TaskTimer
from tidegate.connectors.source import SourceSplit
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber

ASK_AGAIN_MS = 1_000
"""A question that was not answered for so long is repeated."""


class SplitRequests:
    """Of one task in one attempt."""

    def __init__(self, attempt: AttemptNumber) -> None:
        self._attempt = attempt
        self._given = 0
        self._asked = False
        self.over = False
        """Whether the coordinator has said that there are no more."""

    def ask(self, at_ms: int) -> tuple[do.TaskInstruction, ...]:
        """What to do for a task that has nothing to read any more."""
        if self.over or self._asked:
            return ()
        self._asked = True
        again = do.SetTaskTimer(TaskTimer.SPLITS, at_ms + ASK_AGAIN_MS)
        return do.RequestSplits(self._attempt, self._given), again

    def ask_again(self) -> None:
        """A question is so old that it may have got lost, or its answer."""
        self._asked = False

    def answered(self, event: SplitsAssigned) -> Sequence[SourceSplit]:
        """The splits that are new in an answer."""
        if event.first > self._given:
            raise ProtocolError(f"splits from number {event.first} on were assigned, and {self._given} were there")
        if event.first < self._given:
            return ()
        self._asked = False
        self._given += len(event.splits)
        self.over = not event.splits
        return event.splits
