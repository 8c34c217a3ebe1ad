"""`Lifeline`: ends a worker's process when its coordinator is gone for good.

Tasks outlive their coordinator, because Ray restarts it. So Ray does not end them with it (they are detached actors),
and nobody would when the job has ended, its driver has died, or the coordinator cannot come back. Rules:

- A call to the coordinator stays pending for as long as it lives. Whether it will come back, Ray says when that fails.
- It is asked a second time before the process ends: once could be a mistake.
- The mailbox is not needed for this: the process may be stuck in a function of the user.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray.exceptions import ActorDiedError

ASK_AGAIN_S = 0.5
DEATHS = 2
"""How often Ray has to say that the coordinator is dead."""


def end_process() -> None:
    """End this process at once."""
    os._exit(0)


class Lifeline:
    """Of one process. `live` calls the coordinator."""

    def __init__(self, live: Callable[[], Any], leave: Callable[[], None] = end_process) -> None:
        self._live = live
        self._leave = leave
        self._deaths = 0

    def hold(self) -> None:
        """Begin."""
        self._live().future().add_done_callback(self._ended)

    def _ended(self, call: Future[Any]) -> None:
        self._deaths = self._deaths + 1 if isinstance(call.exception(), ActorDiedError) else 0
        if self._deaths >= DEATHS:
            self._leave()
            return
        again = threading.Timer(ASK_AGAIN_S, self.hold)
        again.daemon = True
        again.start()
