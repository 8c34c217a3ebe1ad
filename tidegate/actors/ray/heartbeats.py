"""`Heartbeats`: finds processes of a job that live but make no progress, reports what they do, and evicts them.

`HeartbeatMonitor` decides which processes hang, without I/O: it gets the time with each tick, and the answers. Rules:

- A process is *in doubt* when it has not answered for `timeout_ms`. A dedicated thread answers, so a long call of a
  user's function does not delay the answers. Only a call that holds Python's lock all the time does. Then no thread of
  that process makes progress, and it receives neither data nor deployments.
- A process in doubt gets no task. First its stack is read, then it gets a last request. If it does not answer that
  within a part of the timeout, it hangs. Any answer ends the doubt. The monitor still remembers the call that the
  mailbox was in before, so an answer does not excuse a call that takes too long.
- A coordinator that gets no answer from any other node may be cut off itself. Then the processes there have longer to
  answer. With the first answer of one of them, the silence of the other processes there is counted from zero again,
  once until they answer.
- A process is *busy* too long when its mailbox has been in the same call for `call_timeout_ms`. A call is at most the
  work on one batch, or one function of an operator's life. With None a call may take any time.
- A call of `map_async` may take as long as its own timeout allows. The monitor measures the oldest such call, so that
  the job can report what it may be waiting for.
- Time counts only while the monitor was awake: after a pause of a minute it has answers to read first. So one tick
  counts for at most `TICKS_AT_ONCE_MAX` ticks.
- At most one request is on its way to a process, in addition to the last one. Each hung process is reported once.
- The failure of a hung process is reported before the process is evicted, so the failure names the task that hangs. A
  process whose task moved elsewhere while it was in doubt is evicted as well.
- Reading a stack takes a limited time. If no process on the node can do it, the failure reports that.
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

ReportFailure = Callable[[str], object]


class Heartbeats:
    """Sends heartbeat requests to the processes of one job. All methods run on the coordinator's mailbox.

    `found` is called with a process that hangs, and returns a function that takes the text of the failure. `evict` is
    called with a process and the reason. `silent` is called earlier, with the node of a process in doubt, and how long,
    in ms, each other process there has not answered.
    """

    def __init__(
        self,
        settings: HeartbeatSettings,
        workers: WorkerPool,
        mailbox: Mailbox,
        found: Callable[[WorkerHandle], ReportFailure],
        evict: Callable[[WorkerHandle, str], object],
        silent: Callable[[str, Sequence[int]], object],
    ) -> None:
        self._settings = settings
        self._monitor = HeartbeatMonitor(settings)
        self._workers = workers
        self._mailbox = mailbox
        self._found = found
        self._evict = evict
        self._silent = silent
        self._answers: queue.SimpleQueue[tuple[str, Future[Pulse]]] = queue.SimpleQueue()
        """Answers to heartbeats that the next tick handles, with the names of the processes."""
        self._in_doubt: dict[str, WorkerHandle] = {}
        self._doing: dict[str, str] = {}
        """Texts about what the processes in doubt are doing, by the name of the process."""
        self._pool = ThreadPool(
            1, "tidegate-look", lambda error: log.warning("stacks of processes cannot be read any more: %s", error)
        )
        self._closed = False

    def start(self) -> None:
        """Starts to send heartbeat requests at each tick, until `close`."""
        self._tick()

    def close(self) -> None:
        """Stops sending requests, because the job has ended."""
        self._closed = True
        self._pool.close()

    def busy_ms(self) -> dict[str, int]:
        """Returns, by process name, how long in ms its mailbox has been in one call, or a `map_async` call has
        been running.
        """
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
        living = {member.name: member for member in self._workers.started()}
        for name in self._monitor.watched - living.keys():
            self._monitor.forget(name)
        for name in living.keys() - self._monitor.watched:
            self._monitor.watch(name, elsewhere=not living[name].is_on((self._workers.node_id,)))
        asked, doubted, hung = self._monitor.tick(monotonic_ms())
        for name in asked:
            self._ask(living[name])
        for one in hung:
            living[one.name].evicted = True
        for one in hung:
            self._is_hung(living[one.name], one)
        self._update_doubts(living)
        for name in doubted:
            self._is_in_doubt(living[name])

    def _update_doubts(self, living: Mapping[str, WorkerHandle]) -> None:
        before, names = self._in_doubt, self._monitor.doubted
        self._in_doubt = {name: living[name] for name in names}
        self._doing = {name: doing for name, doing in self._doing.items() if name in names}
        for name, member in before.items():
            member.doubted = False
            if member.usable and name not in living:
                self._evict(member, f"{name} did not answer, and its task moved elsewhere meanwhile")
            elif member.usable and name not in names:
                log.info("%s does not hang: it answers again, or was out of reach", name)
        for member in self._in_doubt.values():
            member.doubted = True

    def _ask(self, member: WorkerHandle) -> None:
        def answered(answer: Future[Pulse]) -> None:
            if answer.exception() is None:
                member.answered_at_ms, member.acting = now_ms(), answer.result().task
            self._answers.put((member.name, answer))

        member.handle.pulse.remote().future().add_done_callback(answered)

    def _is_in_doubt(self, member: WorkerHandle) -> None:
        info = member.info
        assert info is not None
        neighbours = [m.name for m in self._workers.started() if m is not member and m.is_on((info.node_id,))]
        self._silent(info.node_id, [self._monitor.silent_ms(name) for name in neighbours])

        def looked(doing: str) -> None:
            self._doing[member.name] = doing
            self._monitor.looked(member.name)

        self._look(member, "silent", looked)

    def _is_hung(self, member: WorkerHandle, hung: Hung) -> None:
        info = member.info
        assert info is not None
        report = self._found(member)
        what = (
            f"has not answered for {hung.for_ms} ms (heartbeat.timeout)"
            if hung.kind == "silent"
            else f"has been busy with one call for {hung.for_ms} ms (task.call-timeout)"
        )

        def conclude(doing: str) -> None:
            text = f"it hangs: the process {member.name}, pid {info.pid}, {what}; {doing}"
            report(text)
            self._evict(member, text)

        if hung.kind == "silent":
            conclude(self._doing.get(member.name, UNKNOWN))
        else:
            self._look(member, "busy", conclude)

    def _look(self, member: WorkerHandle, kind: Literal["silent", "busy"], seen: Callable[[str], object]) -> None:
        """Finds out what a process is doing, and then calls `seen` once with the text, on the mailbox."""
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
        elif info.node_id == self._workers.node_id:
            self._pool.submit(lambda: stack_of(info.pid, info.stack_descriptor, info.mailbox_thread), take)
        elif (neighbour := self._workers.neighbour_of(member)) is not None:
            neighbour.handle.peer_stack.remote(info).future().add_done_callback(take)
        else:
            self._mailbox.post(lambda: end(UNKNOWN))
        self._mailbox.call_later(LOOK_MS_MAX, lambda: end(UNKNOWN))


TICKS_AT_ONCE_MAX = 2
"""Limit of the time that one late tick counts for, as a number of ticks."""
LAST_SHARE = 5
"""The answer to a last request may take 1/LAST_SHARE of the heartbeat timeout."""
LAST_TICKS_MIN = 2 * TICKS_AT_ONCE_MAX
"""Shortest time, as a number of ticks, that the answer to a last request may take.

A process that wakes up after the request has earlier requests to answer first.
"""
CUT_OFF_TIMES = 2
"""Multiple of the timeout that the answer to a last request may take if all processes on other nodes are silent.

After a cut network link works again, messages may be delayed for as long as the link was cut.
"""


@dataclass(frozen=True, slots=True)
class Hung:
    """A process that counts as hung. `for_ms`: how long it has not answered ("silent"), or has been in one call
    ("busy").
    """

    name: str
    kind: Literal["silent", "busy"]
    for_ms: int


class Decisions(NamedTuple):
    """Results of a tick: names of processes to send requests to, names of processes that are newly suspected to hang,
    and the hung processes.
    """

    ask: Sequence[str]
    doubt: Sequence[str]
    hung: Sequence[Hung]


@dataclass(slots=True)
class _Watched:
    elsewhere: bool
    answered_ms: int
    silent_from_ms: int
    """Time, in ms, from which silence counts: the last answer, or the time at which the silence was excused."""
    asked_ms: int
    excused: bool = False
    """True if the silence since the last answer was excused once, and is counted again."""
    doubt: Literal["looking", "looked", "asked"] | None = None
    last_ms: int = 0
    """Time of the last request, in ms."""
    waits: bool = False
    """True while a heartbeat request has no answer."""
    call: int | None = None
    """Number of the call in which the mailbox was at the last answer, or None."""
    since_ms: int = 0
    """Time, in ms, at which `call` was first reported."""
    oldest_call: int | None = None
    """Number of the longest-running `map_async` call at its last answer."""
    oldest_since_ms: int = 0
    """Time, in ms, at which `oldest_call` was first reported."""


class HeartbeatMonitor:
    """Decides which processes of one job hang, without I/O. Processes are identified by name. Times are in ms."""

    def __init__(self, settings: HeartbeatSettings) -> None:
        self._settings = settings
        self._watched: dict[str, _Watched] = {}
        self._awake_ms = 0
        self._last_tick_ms: int | None = None

    @property
    def watched(self) -> frozenset[str]:
        """Returns the names of the watched processes."""
        return frozenset(self._watched)

    @property
    def doubted(self) -> frozenset[str]:
        """Returns the names of the suspected processes, which are reported as hung unless they answer a last
        request.
        """
        return frozenset(name for name, watched in self._watched.items() if watched.doubt is not None)

    def silent_ms(self, name: str) -> int:
        """Returns how long, in ms, a process has not answered. 0 if it is not watched."""
        watched = self._watched.get(name)
        return 0 if watched is None else self._awake_ms - watched.answered_ms

    def busy_ms(self) -> dict[str, int]:
        """Returns, by process name, how long in ms it had been in its current call at its last answer.

        A call of the mailbox counts, or the oldest call of `map_async`, whichever began first. Processes without a call
        are omitted.
        """
        busy: dict[str, int] = {}
        for name, watched in self._watched.items():
            since = [watched.since_ms] if watched.call is not None else []
            since += [watched.oldest_since_ms] if watched.oldest_call is not None else []
            if since:
                busy[name] = watched.answered_ms - min(since)
        return busy

    def watch(self, name: str, elsewhere: bool = False) -> None:
        """Starts to watch a process. `elsewhere`: it is on another node than the coordinator, so the network link
        may be cut.
        """
        now_ms = self._awake_ms
        self._watched.setdefault(name, _Watched(elsewhere, now_ms, now_ms, now_ms - self._settings.interval_ms))

    def forget(self, name: str) -> None:
        """Stops watching a process that has ended, or is no longer used. Idempotent."""
        self._watched.pop(name, None)

    def answered(self, name: str, call: int | None, oldest_call: int | None = None) -> None:
        """Records a process's answer to a heartbeat.

        `call` is the number of the current call of its mailbox, or None. `oldest_call` is the number of its
        longest-running call of `map_async`, or None.
        """
        found = self._watched.get(name)
        if found is None:
            return
        if found.elsewhere and self._other_nodes_are_silent():
            self._excuse_other_nodes(found)
        found.answered_ms = found.silent_from_ms = self._awake_ms
        found.waits, found.excused, found.doubt = False, False, None
        if call is None or call != found.call:
            found.call, found.since_ms = call, self._awake_ms
        if oldest_call is None or oldest_call != found.oldest_call:
            found.oldest_call, found.oldest_since_ms = oldest_call, self._awake_ms

    def looked(self, name: str) -> None:
        """Records that the stack of a suspected process was read, or could not be read. The monitor may then send the
        last request to the process.
        """
        found = self._watched.get(name)
        if found is not None and found.doubt == "looking":
            found.doubt = "looked"

    def not_answered(self, name: str) -> None:
        """Records that a request or its answer was lost, so that another request may be sent."""
        found = self._watched.get(name)
        if found is not None:
            found.waits = False

    def tick(self, now_ms: int) -> Decisions:
        """Processes a tick of the clock. Returns which processes get requests, which are newly suspected, and which
        hang.
        """
        if self._last_tick_ms is not None:
            passed_ms = max(0, now_ms - self._last_tick_ms)
            self._awake_ms += min(passed_ms, TICKS_AT_ONCE_MAX * self._settings.tick_ms)
        self._last_tick_ms = now_ms
        last_ms = self._last_ms_max(), self._last_ms_max(cut_off=self._other_nodes_are_silent())
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
            return Hung(name, "silent", self._awake_ms - watched.answered_ms) if over else None
        limit_ms = self._settings.call_timeout_ms
        # It was in that call until its last answer. What it has done since is unknown.
        busy_ms = watched.answered_ms - watched.since_ms
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

    def _other_nodes_are_silent(self) -> bool:
        """Returns whether all processes on other nodes are suspected, so that the network link may be cut."""
        return all(watched.doubt is not None for watched in self._watched.values() if watched.elsewhere)

    def _excuse_other_nodes(self, answered: _Watched) -> None:
        """Clears the suspicion of all other processes on other nodes, because one of them answers again and the link
        was cut.
        """
        for watched in self._watched.values():
            if watched.elsewhere and watched is not answered and not watched.excused:
                watched.excused, watched.doubt, watched.silent_from_ms = True, None, self._awake_ms

    def _last_ms_max(self, cut_off: bool = False) -> int:
        """Returns how long, in ms, the answer to a last request may take. `cut_off`: all processes on other nodes
        are silent.
        """
        timeout_ms = self._settings.timeout_ms
        part_ms = max(timeout_ms // LAST_SHARE, LAST_TICKS_MIN * self._settings.tick_ms)
        return max(part_ms, CUT_OFF_TIMES * timeout_ms) if cut_off else part_ms
