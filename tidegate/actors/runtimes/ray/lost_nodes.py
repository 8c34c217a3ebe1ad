"""`LostNodes`: nodes that may be lost. Nothing is given to a process there, and none is started there, until Ray knows.

Rules:

- How a process has ended on a node that lives, Ray says at once: the raylet of the node sees it. Where only the
  connection broke, the raylet may be gone as well. Ray makes sure by its health check: some 15 s by default.
- Meanwhile Ray would still start processes on such a node, and they would be lost with it: a second restart for one
  loss. So an attempt waits, unless spare processes on other nodes can take over at once.
- Ray is asked again and again, for a bounded time. A process that answers after all is given up: its place is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.ray.fleet import Member
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox

log = logging.getLogger(__name__)

ASK_AGAIN_MS = 500
ASKS_MAX = 240
"""Two minutes at least."""


class LostNodes:
    """Those of one job. Everything runs on the coordinator's mailbox.

    `give_up` takes a process that answers after all, and which it is. `settled` is called whenever there is no doubt
    any more.
    """

    def __init__(
        self, mailbox: Mailbox, give_up: Callable[[Member, str], object], settled: Callable[[], object]
    ) -> None:
        self._mailbox = mailbox
        self._give_up = give_up
        self._settled = settled
        self._asked: dict[str, tuple[Member, int]] = {}
        """Processes of which Ray does not say how they ended, by name, and how often it was asked."""

    @property
    def doubtful(self) -> frozenset[str]:
        """Nodes that may be lost."""
        return frozenset(m.info.node_id for m, _ in self._asked.values() if m.info is not None)

    def call_failed(self, member: Member, error: BaseException) -> None:
        """A call to a process failed."""
        if isinstance(error, ActorUnavailableError) and member.info is not None and member.name not in self._asked:
            log.warning(
                "the connection to %s broke: its node %s may be lost, which Ray makes sure of",
                member.name,
                member.info.node_id,
            )
            self._asked[member.name] = (member, 0)
            self._ask(member)

    def _ask(self, member: Member) -> None:
        answer: Any = member.handle.identify.remote()
        answer.future().add_done_callback(lambda future: self._mailbox.post(partial(self._answered, member, future)))

    def _answered(self, member: Member, future: Future[Any]) -> None:
        _, asks = self._asked[member.name]
        error = future.exception()
        if isinstance(error, ActorUnavailableError) and asks + 1 < ASKS_MAX:
            self._asked[member.name] = (member, asks + 1)
            self._mailbox.call_later(ASK_AGAIN_MS, lambda: self._ask(member))
            return
        del self._asked[member.name]
        if error is None:
            self._give_up(member, f"{member.name} answers again, and its task goes on elsewhere")
        else:
            log.info("%s: %s", member.name, error_text(error))
        if not self._asked:
            self._settled()
