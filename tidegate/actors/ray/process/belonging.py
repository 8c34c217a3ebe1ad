"""`Belonging`: ends a worker's process that the coordinator in charge does not know.

Ray keeps what a coordinator asks for while its link is cut. A process may so start when another coordinator has long
been in charge, which has never heard of it and would give it nothing to do. The same holds for a process on a node
that was cut off, in whose place another one was taken. Rules:

- A process asks whether it is one of the job's when it has started, and again every `ASK_EVERY_S`. So it ends within
  that time once the coordinator in charge can be reached.
- Only who is in charge can tell. A coordinator that takes over says that it does not know yet, and what one says that
  was replaced counts for nothing. Then it is asked again.
- Two answers in a row have to say so before the process ends: a process may just be put to work.
- The mailbox is not needed for this: the process may be stuck in a function of the user.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tidegate.actors.ray.process.lifeline import Lifeline, end_process
from tidegate.actors.ray.process.orders import Handle
from tidegate.actors.ray.process.orphans import end_orphans
from tidegate.actors.ray.process.process_info import ProcessInfo
from tidegate.actors.task.invariants import may_obey
from tidegate.storage.ids import Generation

log = logging.getLogger(__name__)

ASK_EVERY_S, ASK_AGAIN_S = 30.0, 0.5
LEAVE_S_MAX = 5.0
"""For longer no process stays to end others: Ray may not answer."""
DENIALS = 2
"""How often a process has to hear that nobody knows it."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a coordinator says of a process. None: it does not know its processes yet."""

    generation: Generation
    known: bool | None


class Step(enum.Enum):
    """What a process does that has asked: ask `LATER`, ask `SOON`, or `LEAVE`."""

    LATER = "later"
    SOON = "soon"
    LEAVE = "leave"


class Denials:
    """Decides about one process. Pure."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def heard(self, answer: Known | None, newest: int) -> Step:
        """An answer has come; None where nobody has answered. `newest`: the newest coordinator that was heard of."""
        if answer is None or answer.known is None or not may_obey(answer.generation, newest):
            self._in_a_row = 0
            return Step.SOON
        self._in_a_row = 0 if answer.known else self._in_a_row + 1
        if answer.known:
            return Step.LATER
        return Step.LEAVE if self._in_a_row >= DENIALS else Step.SOON


class Belonging:
    """Of one process. `ask` calls the coordinator; `newest` says which one was heard of last."""

    def __init__(self, ask: Callable[[], Any], newest: Callable[[], int], leave: Callable[[], None]) -> None:
        self._ask = ask
        self._newest = newest
        self._leave = leave
        self._denials = Denials()

    def hold(self) -> None:
        """Begin."""
        self._ask().future().add_done_callback(self._answered)

    def _answered(self, call: Future[Known]) -> None:
        answer = None if call.exception() is not None else call.result()
        step = self._denials.heard(answer, self._newest())
        if step is Step.LEAVE:
            log.warning("the coordinator in charge, %s, does not know this process: it ends", answer)
            self._leave()
            return
        again = threading.Timer(ASK_EVERY_S if step is Step.LATER else ASK_AGAIN_S, self.hold)
        again.daemon = True
        again.start()


def hold_on(coordinator: Handle, info: ProcessInfo, newest: Callable[[], int]) -> None:
    """Have this process live as long as its coordinator does, and knows it."""
    Lifeline(lambda: coordinator.live.remote(), _leave_with_orphans).hold()
    Belonging(lambda: coordinator.knows.remote(info.name, info.actor_id), newest, end_process).hold()


def _leave_with_orphans() -> None:
    """End this process, whose coordinator is gone for good, and before it those of its job that never started."""
    threading.Thread(target=_end_all, name="tidegate-leave", daemon=True).start()


def _end_all() -> None:
    limit = threading.Timer(LEAVE_S_MAX, end_process)
    limit.daemon = True
    limit.start()
    try:
        end_orphans()
    finally:
        end_process()
