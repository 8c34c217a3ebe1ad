"""`HeartbeatMonitor`: which processes of a job are to be asked for a sign of life, and which count as hung.

Pure: it is told the time with each tick, and what was answered. Rules:

- A process is *silent* when it has not answered for `timeout_ms`. Its answers come from a thread that does nothing
  else, so a long call of a user's function is no silence. A call that keeps Python's lock all the time is: then nobody
  else in that process gets on either, and neither data nor orders come in.
- A process is *busy* too long when its mailbox has been in one and the same call for `call_timeout_ms`. A call is at
  most the work on one batch, or one function of an operator's life. None: a call may take as long as it likes.
- Time counts only as far as the monitor has been awake for it. Who was stopped for a minute cannot tell the silence of
  others from its own: on waking up it has answers to read first. So between two ticks no more passes than two ticks
  take, by a clock of its own that stands still meanwhile.
- There is at most one question on its way to a process, and each hung one is named once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.actors.hosts.heartbeat_settings import HeartbeatSettings

TICKS_AT_ONCE_MAX = 2
"""So many ticks are counted for one, at most."""


@dataclass(frozen=True, slots=True)
class Hung:
    """A process counts as hung, and for how long it has been silent, or busy with one call."""

    name: str
    kind: Literal["silent", "busy"]
    for_ms: int


@dataclass(slots=True)
class _Watched:
    heard_ms: int
    asked_ms: int
    waits: bool = False
    """Whether a question is on its way."""
    call: int | None = None
    """The call that its mailbox was in when it last answered."""
    since_ms: int = 0
    """When that call was first seen."""


class HeartbeatMonitor:
    """The processes of one job, by name. All times in ms."""

    def __init__(self, settings: HeartbeatSettings) -> None:
        self._settings = settings
        self._watched: dict[str, _Watched] = {}
        self._awake_ms = 0
        self._last_tick_ms: int | None = None

    @property
    def watched(self) -> frozenset[str]:
        """Names of the processes that it looks at."""
        return frozenset(self._watched)

    def silent_ms(self, name: str) -> int:
        """For how long a process has not answered; 0 for one that nobody watches."""
        watched = self._watched.get(name)
        return 0 if watched is None else self._awake_ms - watched.heard_ms

    def watch(self, name: str) -> None:
        """A process has started: from now on it answers."""
        now_ms = self._awake_ms
        self._watched.setdefault(name, _Watched(heard_ms=now_ms, asked_ms=now_ms - self._settings.interval_ms))

    def forget(self, name: str) -> None:
        """A process has ended, or is known to be of no use. Idempotent."""
        self._watched.pop(name, None)

    def answered(self, name: str, call: int | None) -> None:
        """A process has answered; `call` numbers what its mailbox is doing, None: nothing."""
        found = self._watched.get(name)
        if found is None:
            return
        found.heard_ms, found.waits = self._awake_ms, False
        if call is None or call != found.call:
            found.call, found.since_ms = call, self._awake_ms

    def not_answered(self, name: str) -> None:
        """A question or its answer got lost: it is asked again."""
        found = self._watched.get(name)
        if found is not None:
            found.waits = False

    def tick(self, now_ms: int) -> tuple[Sequence[str], Sequence[Hung]]:
        """Time passes: who is to be asked now, and who counts as hung from now on."""
        if self._last_tick_ms is not None:
            passed_ms = max(0, now_ms - self._last_tick_ms)
            self._awake_ms += min(passed_ms, TICKS_AT_ONCE_MAX * self._settings.tick_ms)
        self._last_tick_ms = now_ms
        hung = [found for name, watched in self._watched.items() if (found := self._judge(name, watched))]
        for found in hung:
            del self._watched[found.name]
        ask = []
        for name, watched in self._watched.items():
            if not watched.waits and self._awake_ms - watched.asked_ms >= self._settings.interval_ms:
                watched.waits, watched.asked_ms = True, self._awake_ms
                ask.append(name)
        return ask, hung

    def _judge(self, name: str, watched: _Watched) -> Hung | None:
        silent_ms = self._awake_ms - watched.heard_ms
        if silent_ms >= self._settings.timeout_ms:
            return Hung(name, "silent", silent_ms)
        limit_ms = self._settings.call_timeout_ms
        # Up to its last answer it was in that call; what it has done since is not known.
        busy_ms = watched.heard_ms - watched.since_ms
        if limit_ms is not None and watched.call is not None and busy_ms >= limit_ms:
            return Hung(name, "busy", busy_ms)
        return None
