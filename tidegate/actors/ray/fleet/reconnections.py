"""`Reconnections`: what follows when calls to a process broke, though nobody says that the process has ended. Pure.

Ray breaks calls that are on their way when a connection breaks: because the process is gone with its node, or because
a link was cut for some while. It does not say which of the two. So `LostNodes` asks the process. Rules:

- A process that answers goes on: what broke is called again, and nothing has happened. The same holds where its task is
  over meanwhile, or has failed: the call says that.
- It counts as dead when Ray says so, when it could not be asked `FAILURES_MAX` times in a row, or has not answered
  within `limit_ms`. Until then it gets no task.
- One that counts as dead is asked on, for a bounded time, because Ray has not said yet whether its node is lost. If it
  answers after all, that is too late: its place is taken. A question may also be on its way for ever: after
  `ASKED_MS_MAX` nothing more is expected.
- A connection that breaks again and again is of no use: `BREAKS_MAX` times within `BREAKS_MS`, and the process counts
  as dead at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ASK_AGAIN_MS = 500
FAILURES_MAX = 3
"""A link that was cut is back as a rule when the first call breaks, and then the first question is answered."""
ASKS_MAX = 240
"""Of one that counts as dead: two minutes at least."""
BREAKS_MAX, BREAKS_MS = 10, 60_000
ASKED_MS_MAX = 120_000
"""How long an answer of one that counts as dead is waited for, beyond the time that it has to answer."""
LIMIT_SHARE, LIMIT_MS_MIN = 5, 2_000
"""An answer may take this part of `heartbeat.timeout`, as one to a last question may, but so long in any case."""


def limit_ms(heartbeat_timeout_ms: int) -> int:
    """How long a process may take to answer."""
    return max(LIMIT_MS_MIN, heartbeat_timeout_ms // LIMIT_SHARE)


class Step(NamedTuple):
    """What follows. `verdict`: it is known from now on that the process lives, is dead, or answers too late.

    `ask`: it is to be asked again, after `ASK_AGAIN_MS`. `over`: nothing more is to be found out.
    """

    verdict: Literal["alive", "dead", "late"] | None
    ask: bool = False
    over: bool = False


@dataclass(slots=True)
class _Asked:
    since_ms: int
    failures: int = 0
    dead: bool = False


@dataclass(slots=True)
class Reconnections:
    """Those to the processes of one job, by name. All times in ms, by a clock that nobody sets."""

    limit_ms: int
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _breaks: dict[str, deque[int]] = field(default_factory=dict)
    """When connections broke lately."""

    def broke(self, name: str, now_ms: int) -> Step:
        """A call broke. `ask`: this is the first one to hear of, so the process is to be asked at once."""
        asked = self._asked.get(name)
        if asked is not None:
            return Step("dead" if asked.dead else None)
        breaks = self._breaks.setdefault(name, deque(maxlen=BREAKS_MAX))
        breaks.append(now_ms)
        often = len(breaks) == BREAKS_MAX and now_ms - breaks[0] < BREAKS_MS
        self._asked[name] = _Asked(now_ms, dead=often)
        return Step("dead" if often else None, ask=True)

    def answered(self, name: str) -> Step:
        """The process has answered."""
        asked = self._asked.pop(name, None)
        if asked is None:
            return Step(None)
        return Step("late" if asked.dead else "alive", over=True)

    def failed(self, name: str, now_ms: int, *, final: bool) -> Step:
        """The question broke as well. `final`: Ray says that the process has ended."""
        asked = self._asked.get(name)
        if asked is None:
            return Step(None)
        asked.failures += 1
        if final or asked.failures >= ASKS_MAX:
            self.forget(name)
            return Step(None if asked.dead else "dead", over=True)
        if asked.dead:
            return Step(None, ask=True)
        asked.dead = asked.failures >= FAILURES_MAX or self._is_over(asked, now_ms)
        return Step("dead" if asked.dead else None, ask=True)

    def pass_time(self, name: str, now_ms: int) -> Step:
        """Time has passed without an answer."""
        asked = self._asked.get(name)
        if asked is None or not self._is_over(asked, now_ms):
            return Step(None)
        if not asked.dead:
            asked.dead = True
            return Step("dead")
        if now_ms - asked.since_ms < self.limit_ms + ASKED_MS_MAX:
            return Step(None)
        self.forget(name)
        return Step(None, over=True)

    def forget(self, name: str) -> None:
        """Nothing more is asked of a process, which has ended."""
        self._asked.pop(name, None)
        self._breaks.pop(name, None)

    def _is_over(self, asked: _Asked, now_ms: int) -> bool:
        return now_ms - asked.since_ms >= self.limit_ms
