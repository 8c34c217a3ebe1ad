"""A subtask of a source asks for splits, and the coordinator assigns them.

Questions and answers are numbered: `first` is how many splits the subtask was given in its attempt before. So a
question that comes twice gets the same answer twice, and an answer that comes twice is taken once.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import StoredSplit
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber


@wire
@dataclass(frozen=True, slots=True)
class SplitsRequested:
    """A subtask has read all splits that it has, and asks for more. It asks again until it is answered."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    first: int


@wire
@dataclass(frozen=True, slots=True)
class AssignSplits:
    """Give a subtask these splits, in the order in which it is to read them. None: there are no more for it."""

    attempt: AttemptNumber
    task: TaskId
    first: int
    splits: tuple[StoredSplit, ...]
