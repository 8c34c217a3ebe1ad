"""`LettingGo`: processes that were told to let go of an attempt, which the next one waits for.

Rules:

- The next attempt waits for each that lives. One that is still starting has taken nothing yet: what it is told now
  waits for its constructor.
- One that has not let go after `DROP_TIMEOUT_MS` is stuck, in a function of the user say, and is given up. For one that
  is still starting the time begins anew: on a busy node that may take long.
- Where only the connection broke, it is told again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

from tidegate.actors.ray.fleet.member import Member
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, Generation

DROP_TIMEOUT_MS = 10_000


Broke: TypeAlias = Callable[
    [Member, BaseException | None, Callable[[BaseException], object], Callable[[], object]], bool
]
"""Looks at how a call of a process ended: `LostNodes.broke`."""


class LettingGo:
    """Those of one job. All on the coordinator's mailbox. `look` is called when one has let go, or is given up."""

    def __init__(
        self, mailbox: Mailbox, broke: Broke, give_up: Callable[[Member, str], object], look: Callable[[], object]
    ) -> None:
        self._mailbox, self._broke, self._give_up, self._look = mailbox, broke, give_up, look
        self._told: list[tuple[Member, Future[None]]] = []
        """Processes that were told, and their answers."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for."""
        self._told = [(member, dropped) for member, dropped in self._told if member.usable and not dropped.done()]
        return all(member.info is None for member, _ in self._told)

    def tell(self, member: Member, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation) -> None:
        """Have a process let go of an attempt of subtasks. `generation` is that of the coordinator."""

        def done(future: Future[None]) -> None:
            self._broke(
                member, future.exception(), lambda _: None, partial(self.tell, member, tasks, attempt, generation)
            )
            self._mailbox.post(self._look)

        dropped = member.handle.drop.remote(tasks, attempt, generation).future()
        self._told.append((member, dropped))
        dropped.add_done_callback(done)
        self._mailbox.call_later(DROP_TIMEOUT_MS, partial(self._look_at, member, attempt, dropped))

    def _look_at(self, member: Member, attempt: AttemptNumber, dropped: Future[None]) -> None:
        if dropped.done() or not member.usable:
            return
        if member.info is None:
            self._mailbox.call_later(DROP_TIMEOUT_MS, partial(self._look_at, member, attempt, dropped))
        else:
            self._give_up(member, f"{member.name} has not let go of attempt {attempt} within {DROP_TIMEOUT_MS} ms")
            self._look()
