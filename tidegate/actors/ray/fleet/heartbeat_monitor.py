"""`HeartbeatMonitor`: which processes of a job are to be asked for a sign of life, and which count as hung.

Pure: it is told the time with each tick, and what was answered. Rules:

- A process is in *doubt* when it has not answered for `timeout_ms`. Its answers come from a thread that does nothing
  else, so a long call of a user's function is no silence. A call that keeps Python's lock all the time is: then nobody
  else in that process gets on either, and neither data nor orders come in.
- One in doubt is looked at, and asked a last question after that. It counts as hung when it has not answered that
  either, within a part of the timeout. Any answer ends the doubt. What its mailbox was in before is still known then,
  so an answer is no excuse for a call that takes too long.
- Who hears nobody on any other node may be cut off itself. Then the processes there have longer to answer, and with the
  first answer of one of them the silence of the others begins anew; for each once until it answers itself.
- A process is *busy* too long when its mailbox has been in one and the same call for `call_timeout_ms`. A call is at
  most the work on one batch, or one function of an operator's life. None: a call may take as long as it likes.
- A call of `map_async` may take as long as its own timeout allows, and no process counts as hung for it. The monitor
  measures the oldest such call, so that the job can report what it may be waiting for.
- Time counts only as far as the monitor has been awake for it. Who was stopped for a minute cannot tell the silence of
  others from its own: on waking up it has answers to read first. So between two ticks no more passes than two ticks
  take, by a clock of its own that stands still meanwhile.
- There is at most one question on its way to a process, and the last one beside it. Each hung one is named once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tidegate.actors.drivers.heartbeat_settings import HeartbeatSettings

TICKS_AT_ONCE_MAX = 2
"""So many ticks are counted for one, at most."""
LAST_SHARE = 5
"""A last question may take this part of the timeout."""
LAST_TICKS_MIN = 2 * TICKS_AT_ONCE_MAX
"""And so many ticks at least: who wakes up after it was asked has answers to read first."""
CUT_OFF_TIMES = 2
"""So many times the timeout, where nobody on other nodes answers: what waits for a link that was cut may take as long
again as it was cut."""


@dataclass(frozen=True, slots=True)
class Hung:
    """A process counts as hung, and for how long it has been silent, or busy with one call."""

    name: str
    kind: Literal["silent", "busy"]
    for_ms: int


class Decisions(NamedTuple):
    """What follows from a tick, by names: who is to be asked, who is in doubt and to be looked at, who hangs."""

    ask: Sequence[str]
    doubt: Sequence[str]
    hung: Sequence[Hung]


@dataclass(slots=True)
class _Watched:
    elsewhere: bool
    heard_ms: int
    silent_from_ms: int
    """From when its silence counts: when it was heard, or excused."""
    asked_ms: int
    excused: bool = False
    """Whether its silence has begun anew since it was heard."""
    doubt: Literal["looking", "looked", "asked"] | None = None
    last_ms: int = 0
    """When the last question was asked."""
    waits: bool = False
    """Whether a question is on its way."""
    call: int | None = None
    """The call that its mailbox was in when it last answered."""
    since_ms: int = 0
    """When that call was first seen."""
    oldest_call: int | None = None
    """The call of `map_async` that had been under way for longest when it last answered."""
    oldest_since_ms: int = 0
    """When that one was first seen."""


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

    @property
    def doubted(self) -> frozenset[str]:
        """Names of those that count as hung unless they answer."""
        return frozenset(name for name, watched in self._watched.items() if watched.doubt is not None)

    def silent_ms(self, name: str) -> int:
        """For how long a process has not answered; 0 for one that nobody watches."""
        watched = self._watched.get(name)
        return 0 if watched is None else self._awake_ms - watched.heard_ms

    def busy_ms(self) -> dict[str, int]:
        """Return how long each process that is in a call had been in it when it last answered, by its name.

        A call of its mailbox counts, or the oldest one of `map_async`, whichever began first.
        """
        busy: dict[str, int] = {}
        for name, watched in self._watched.items():
            since = [watched.since_ms] if watched.call is not None else []
            since += [watched.oldest_since_ms] if watched.oldest_call is not None else []
            if since:
                busy[name] = watched.heard_ms - min(since)
        return busy

    def watch(self, name: str, elsewhere: bool = False) -> None:
        """A process has started: from now on it answers. `elsewhere`: there is a link to it, which may be cut."""
        now_ms = self._awake_ms
        self._watched.setdefault(name, _Watched(elsewhere, now_ms, now_ms, now_ms - self._settings.interval_ms))

    def forget(self, name: str) -> None:
        """A process has ended, or is known to be of no use. Idempotent."""
        self._watched.pop(name, None)

    def answered(self, name: str, call: int | None, oldest_call: int | None = None) -> None:
        """Take in an answer of a process.

        `call`: number of what its mailbox is doing, None if it does nothing. `oldest_call`: number of its call of
        `map_async` that has been under way for longest.
        """
        found = self._watched.get(name)
        if found is None:
            return
        if found.elsewhere and self._hears_nobody_elsewhere():
            self._excuse_others_elsewhere(found)
        found.heard_ms = found.silent_from_ms = self._awake_ms
        found.waits, found.excused, found.doubt = False, False, None
        if call is None or call != found.call:
            found.call, found.since_ms = call, self._awake_ms
        if oldest_call is None or oldest_call != found.oldest_call:
            found.oldest_call, found.oldest_since_ms = oldest_call, self._awake_ms

    def looked(self, name: str) -> None:
        """It was found out what a process in doubt is doing, or that nobody can: the last question is due."""
        found = self._watched.get(name)
        if found is not None and found.doubt == "looking":
            found.doubt = "looked"

    def not_answered(self, name: str) -> None:
        """A question or its answer got lost: it is asked again."""
        found = self._watched.get(name)
        if found is not None:
            found.waits = False

    def tick(self, now_ms: int) -> Decisions:
        """Time passes: who is to be asked now, who is in doubt, and who counts as hung from now on."""
        if self._last_tick_ms is not None:
            passed_ms = max(0, now_ms - self._last_tick_ms)
            self._awake_ms += min(passed_ms, TICKS_AT_ONCE_MAX * self._settings.tick_ms)
        self._last_tick_ms = now_ms
        last_ms = self._last_ms_max(), self._last_ms_max(cut_off=self._hears_nobody_elsewhere())
        judged = [self._judge(name, watched, last_ms[watched.elsewhere]) for name, watched in self._watched.items()]
        hung = [found for found in judged if found is not None]
        for found in hung:
            del self._watched[found.name]
        ask = [name for name, watched in self._watched.items() if self._is_to_be_asked(watched)]
        doubt = [name for name, watched in self._watched.items() if self._begins_to_be_doubted(watched)]
        return Decisions(ask, doubt, hung)

    def _judge(self, name: str, watched: _Watched, last_ms_max: int) -> Hung | None:
        if watched.doubt is not None:
            over = watched.doubt == "asked" and self._awake_ms - watched.last_ms >= last_ms_max
            return Hung(name, "silent", self._awake_ms - watched.heard_ms) if over else None
        limit_ms = self._settings.call_timeout_ms
        # Up to its last answer it was in that call; what it has done since is not known.
        busy_ms = watched.heard_ms - watched.since_ms
        if limit_ms is not None and watched.call is not None and busy_ms >= limit_ms:
            return Hung(name, "busy", busy_ms)
        return None

    def _is_to_be_asked(self, watched: _Watched) -> bool:
        if watched.doubt == "looked":
            watched.doubt, watched.last_ms = "asked", self._awake_ms
        elif watched.waits or (
            watched.doubt != "asked" and self._awake_ms - watched.asked_ms < self._settings.interval_ms
        ):
            return False
        watched.waits, watched.asked_ms = True, self._awake_ms
        return True

    def _begins_to_be_doubted(self, watched: _Watched) -> bool:
        begins = watched.doubt is None and self._awake_ms - watched.silent_from_ms >= self._settings.timeout_ms
        if begins:
            watched.doubt = "looking"
        return begins

    def _hears_nobody_elsewhere(self) -> bool:
        """Whether all processes on other nodes are in doubt."""
        return all(watched.doubt is not None for watched in self._watched.values() if watched.elsewhere)

    def _excuse_others_elsewhere(self, heard: _Watched) -> None:
        """The first one on another node answers after none did: it was the link."""
        for watched in self._watched.values():
            if watched.elsewhere and watched is not heard and not watched.excused:
                watched.excused, watched.doubt, watched.silent_from_ms = True, None, self._awake_ms

    def _last_ms_max(self, cut_off: bool = False) -> int:
        """How long the answer to a last question may take."""
        timeout_ms = self._settings.timeout_ms
        part_ms = max(timeout_ms // LAST_SHARE, LAST_TICKS_MIN * self._settings.tick_ms)
        return max(part_ms, CUT_OFF_TIMES * timeout_ms) if cut_off else part_ms
