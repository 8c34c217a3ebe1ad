"""`HeldBack`: what a task is told of checkpoints while its operators are finishing, to be taken in afterwards.

`SubtaskCheckpoints` holds back triggers, barriers that have arrived, and the timer of the alignment. Operators may take
as long as they like to finish, and the coordinator goes on to trigger checkpoints and to give them up. Rules:

- What belongs to a checkpoint that was given up is forgotten at once.
- At most `HELD_MAX` checkpoints are held back (invariant 10). One more gives up the oldest.
- Of one checkpoint there are a trigger and a barrier of each channel at most. What is told again is held once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tidegate.actors.task.barriers import TRACKED_MAX
from tidegate.actors.task.invariants import check_hold, may_hold
from tidegate.protocol.identity import ChannelId
from tidegate.storage.ids import CheckpointId

HELD_MAX = TRACKED_MAX
"""As many as may be pending at a time in a task that counts barriers."""

Told: TypeAlias = Callable[[int], None]
"""Takes in what was told, at a time (ms)."""
News: TypeAlias = tuple[CheckpointId, ChannelId | None] | None
"""A checkpoint, and the channel on which its barrier has arrived; without a channel its trigger. None: the timer."""


class HeldBack:
    """What is held back, in the order in which it was told."""

    def __init__(self) -> None:
        self._told: dict[News, Told] = {}

    @property
    def checkpoints(self) -> frozenset[CheckpointId]:
        """Checkpoints of which something is held back."""
        return frozenset(news[0] for news in self._told if news is not None)

    def add(self, news: News, told: Told) -> CheckpointId | None:
        """Hold back one more. Returns the checkpoint that has to be given up for it, if there is one."""
        self._told.setdefault(news, told)
        oldest = None
        if not may_hold(len(self.checkpoints), HELD_MAX):
            oldest = min(self.checkpoints)
            self.forget(oldest)
        check_hold(len(self.checkpoints), HELD_MAX)
        return oldest

    def forget(self, checkpoint_id: CheckpointId) -> bool:
        """A checkpoint was given up. Returns whether it was triggered here: then no barrier of it comes in."""
        triggered = (checkpoint_id, None) in self._told
        self._told = {news: told for news, told in self._told.items() if news is None or news[0] != checkpoint_id}
        return triggered

    def take_all(self) -> list[Told]:
        """Everything, in order. Nothing is held afterwards."""
        all_told, self._told = list(self._told.values()), {}
        return all_told
