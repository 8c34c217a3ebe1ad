"""`Heartbeats`: finds the processes of a job that live and do not make progress, reports what they do, and evicts them.

`HeartbeatMonitor` decides which processes hang, without I/O: it gets the time with each tick, and the answers. Rules:

- A process is in *doubt* when it has not answered for `timeout_ms`. A thread that does nothing else answers, so a long
  call of a user's function does not delay the answers. Only a call that holds Python's lock all the time does. Then no
  thread of that process makes progress, and neither data nor deployments are received.
- A process in doubt gets no task. First its stack is read, then it is asked a last question. If it does not answer that
  within a part of the timeout, it hangs. Any answer ends the doubt. The call that its mailbox was in before is still
  known then, so an answer does not excuse a call that takes too long.
- A coordinator that gets no answer from any other node may be cut off itself. Then the processes there have longer to
  answer. With the first answer of one of them, the silence of the others begins anew, once until they answer.
- A process is *busy* too long when its mailbox has been in the same call for `call_timeout_ms`. A call is at most the
  work on one batch, or one function of an operator's life. None: a call may take any time.
- A call of `map_async` may take as long as its own timeout allows. The monitor measures the oldest such call, so that
  the job can report what it may be waiting for.
- Time counts only while the monitor was awake: after a stop of a minute it has answers to read first. So between two
  ticks no more time passes than two ticks take, by a clock of its own.
- At most one question is on its way to a process, and next to it the last one. Each hung process is reported once.
- The failure of a hung process is reported before the process is evicted, so the failure names the task that hangs. A
  process whose task moved elsewhere while it was in doubt is evicted as well.
- Reading a stack takes a bounded time. If no process on the node can do it, the failure says so.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tidegate.actors.drivers.job_context import HeartbeatSettings
from tidegate.actors.drivers.threads import ThreadPool
from tidegate.actors.ray.health_endpoint import UNKNOWN, Pulse, stack_of
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.storage.clock import monotonic_ms, now_ms

log = logging.getLogger(__name__)

LOOK_MS_MAX = 5_000

Told = Callable[[str], object]


class Heartbeats:
    """Those of one job. Everything runs on the coordinator's mailbox.

    `found` is told of a process when it counts as hung, and gives what takes the text of the failure. `silent` is told
    before, of the node of one in doubt, and for how long the others there have not answered.
    """

    def __init__(
        self,
        settings: HeartbeatSettings,
        fleet: WorkerPool,
        mailbox: Mailbox,
        found: Callable[[WorkerHandle], Told],
        give_up: Callable[[WorkerHandle, str], object],
        silent: Callable[[str, Sequence[int]], object],
    ) -> None:
        self._settings = settings
        self._monitor = HeartbeatMonitor(settings)
        self._fleet = fleet
        self._mailbox = mailbox
        self._found = found
        self._give_up = give_up
        self._silent = silent
        self._answers: queue.SimpleQueue[tuple[str, Future[Pulse]]] = queue.SimpleQueue()
        """At most two for each process."""
        self._in_doubt: dict[str, WorkerHandle] = {}
        self._doing: dict[str, str] = {}
        """What those in doubt were doing, by name."""
        self._pool = ThreadPool(
            1, "tidegate-look", lambda error: log.warning("nobody can look at processes: %s", error)
        )
        self._closed = False

    def start(self) -> None:
        """Begin, and go on until `close`."""
        self._tick()

    def close(self) -> None:
        """The job is over."""
        self._closed = True
        self._pool.close()

    def busy_ms(self) -> dict[str, int]:
        """Return how long each process has been in its present call or waited for `map_async`, by its name."""
        return self._monitor.busy_ms()

    def _tick(self) -> None:
        if self._closed:
            return
        self._mailbox.call_later(self._settings.tick_ms, self._tick)
        while not self._answers.empty():
            name, future = self._answers.get_nowait()
            if future.exception() is None:
                pulse = future.result()
                self._monitor.answered(name, pulse.call, pulse.oldest_call)
            else:
                self._monitor.not_answered(name)
        living = {member.name: member for member in self._fleet.started()}
        for name in self._monitor.watched - living.keys():
            self._monitor.forget(name)
        for name in living.keys() - self._monitor.watched:
            self._monitor.watch(name, elsewhere=not living[name].is_on((self._fleet.node_id,)))
        asked, doubted, hung = self._monitor.tick(monotonic_ms())
        for name in asked:
            self._ask(living[name])
        for one in hung:
            living[one.name].given_up = True
        for one in hung:
            self._is_hung(living[one.name], one)
        self._tell_who_is_in_doubt(living)
        for name in doubted:
            self._is_in_doubt(living[name])

    def _tell_who_is_in_doubt(self, living: Mapping[str, WorkerHandle]) -> None:
        before, names = self._in_doubt, self._monitor.doubted
        self._in_doubt = {name: living[name] for name in names}
        self._doing = {name: doing for name, doing in self._doing.items() if name in names}
        for name, member in before.items():
            member.doubted = False
            if member.usable and name not in living:
                self._give_up(member, f"{name} did not answer, and its task went elsewhere meanwhile")
            elif member.usable and name not in names:
                log.info("%s does not hang: it answers again, or was out of reach", name)
        for member in self._in_doubt.values():
            member.doubted = True

    def _ask(self, member: WorkerHandle) -> None:
        def answered(answer: Future[Pulse]) -> None:
            if answer.exception() is None:
                member.heard_at_ms, member.acting = now_ms(), answer.result().task
            self._answers.put((member.name, answer))

        member.handle.pulse.remote().future().add_done_callback(answered)

    def _is_in_doubt(self, member: WorkerHandle) -> None:
        info = member.info
        assert info is not None
        beside = [m.name for m in self._fleet.started() if m is not member and m.is_on((info.node_id,))]
        self._silent(info.node_id, [self._monitor.silent_ms(name) for name in beside])

        def looked(doing: str) -> None:
            self._doing[member.name] = doing
            self._monitor.looked(member.name)

        self._look(member, "silent", looked)

    def _is_hung(self, member: WorkerHandle, hung: Hung) -> None:
        info = member.info
        assert info is not None
        tell = self._found(member)
        what = (
            f"has not answered for {hung.for_ms} ms (heartbeat.timeout)"
            if hung.kind == "silent"
            else f"has been busy with one call for {hung.for_ms} ms (task.call-timeout)"
        )

        def conclude(doing: str) -> None:
            text = f"it hangs: the process {member.name}, pid {info.pid}, {what}; {doing}"
            tell(text)
            self._give_up(member, text)

        if hung.kind == "silent":
            conclude(self._doing.get(member.name, UNKNOWN))
        else:
            self._look(member, "busy", conclude)

    def _look(self, member: WorkerHandle, kind: Literal["silent", "busy"], seen: Callable[[str], object]) -> None:
        """Find out what a process is doing, and say it on the mailbox, once."""
        info = member.info
        assert info is not None
        over = False

        def end(doing: str) -> None:
            nonlocal over
            if not over:
                over = True
                seen(doing)

        def take(answer: Future[str]) -> None:
            doing = UNKNOWN if answer.exception() is not None else answer.result()
            self._mailbox.post(lambda: end(doing))

        if kind == "busy":
            member.handle.stack.remote().future().add_done_callback(take)
        elif info.node_id == self._fleet.node_id:
            self._pool.submit(lambda: stack_of(info.pid, info.stack_descriptor, info.mailbox_thread), take)
        elif (neighbour := self._fleet.neighbour_of(member)) is not None:
            neighbour.handle.peer_stack.remote(info).future().add_done_callback(take)
        else:
            self._mailbox.post(lambda: end(UNKNOWN))
        self._mailbox.call_later(LOOK_MS_MAX, lambda: end(UNKNOWN))


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
