"""`LostNodes`: nodes that may be lost. No process is started or deployed there until Ray reports whether they are lost.

Rules:

- Ray reports at once how a process has ended on a living node, because the raylet of the node sees it. If only the
  connection broke, the process may live, or the raylet may be gone as well.
- So the process gets a request whether it lives (`Reconnections` decides). If it answers, the broken call is made
  again, and the job continues. Otherwise its subtasks fail, and Ray checks its node, which takes 15 s by default.
- Meanwhile Ray would still start processes on such a node, and they would be lost with it: a second restart for one
  loss. So an attempt waits, unless spare processes on other nodes can take over at once, or processes can start
  elsewhere because nothing is reserved, or in free slots of the reservation.
- A node whose processes all stop answering is suspect (`SuspectNodes`), and avoided as well. If the network link of a
  node is cut, no connection closes, and Ray takes a minute to give the node up. Ray gets the order to start a small
  actor there. The head of Ray does that over the connection by which it checks the node's health. So a started actor
  means that Ray keeps the node, and a failure means that Ray has given it up. Other processes may reach the node long
  before Ray's head does, and processes that start there then are lost if the head is too late.
- Requests to a process are repeated for a limited time. A process that answers too late is evicted, because its tasks
  run elsewhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.worker_pool import WorkerHandle
from tidegate.protocol.failures import error_text
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)


class _Presence:
    """A small actor, started only to find out whether Ray's head can start actors on a node."""

    def __repr__(self) -> str:
        """Returns the name under which Ray shows the actor in logs."""
        return "tidegate: does this node start processes?"

    def here(self) -> None:
        """Returns at once. A call is answered only when the actor has started."""


@cache
def _presence_actor() -> Any:
    """Returns the Ray actor class of `_Presence`, created on first use."""
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(_Presence)


def start_there(node: str) -> Future[None]:
    """Makes Ray's head start a small actor on a node. Returns a future that is done when it has started, or
    fails.
    """
    there: Any = NodeAffinitySchedulingStrategy(node, soft=False)
    presence: Any = _presence_actor()
    actor = presence.options(scheduling_strategy=there).remote()
    started: Future[None] = actor.here.remote().future()
    started.add_done_callback(partial(_release_actor, actor))
    return started


def _release_actor(actor: Any, started: Future[None]) -> None:
    """Does nothing. As a callback it keeps the actor's handle until the start, because Ray ends an actor without
    a handle.
    """


@dataclass(slots=True, eq=False)
class _Broken:
    """A process to which the connection broke, and the calls that failed."""

    member: WorkerHandle
    error: BaseException
    """The last error that Ray raised."""
    calls: list[tuple[Callable[[BaseException], object], Callable[[], object]]] = field(default_factory=list)
    """For each broken call, a pair: the action if the process is dead, and the action if it lives."""


class LostNodes:
    """The nodes of one job that may be lost. All methods run on the coordinator's mailbox.

    `evict` is called with a process that answers too late, and the reason. `settled` is called whenever no node is
    doubtful any more. `is_kept` returns whether a process is still used for its tasks.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        evict: Callable[[WorkerHandle, str], object],
        settled: Callable[[], object],
        suspects: SuspectNodes,
        reconnections: Reconnections,
        is_kept: Callable[[WorkerHandle], bool],
        probe: Callable[[str], Future[None]] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._evict = evict
        self._settled = settled
        self._suspects = suspects
        self._reconnections = reconnections
        self._is_kept = is_kept
        self._probe = start_there if probe is None else probe
        self._broken: dict[str, _Broken] = {}
        """Processes, by name, for which it is unknown whether they live."""

    @property
    def doubtful(self) -> frozenset[str]:
        """Returns the ids of the nodes that may be lost. May be called from any thread."""
        broken = list(self._broken.values())
        return self._suspects.nodes | {one.member.info.node_id for one in broken if one.member.info is not None}

    def silent(self, node: str, others_ms: Sequence[int]) -> None:
        """Records that a process on a node does not answer.

        `others_ms`: how long, in ms, each other process there has not answered. If all are silent, the node becomes
        suspect.
        """
        if not self._suspects.is_silent(node, others_ms, monotonic_ms()):
            return
        log.warning("no process on node %s answers: the node is suspect, and nothing is started there", node)
        self._probe(node).add_done_callback(
            lambda future: self._mailbox.post(lambda: self._probed(node, future.exception()))
        )
        self._mailbox.call_later(SUSPECT_MS_MAX, self._pass_time)

    def _probed(self, node: str, error: BaseException | None) -> None:
        if self._suspects.clear_suspicion(node):
            what = "answers" if error is None else f"is lost: {error_text(error)}"
            log.warning("node %s %s: it is not suspect any more", node, what)
            self._settled()

    def _pass_time(self) -> None:
        for node in self._suspects.pass_time(monotonic_ms()):
            log.warning("node %s was suspect for %d ms: processes are started there again", node, SUSPECT_MS_MAX)
            self._settled()

    def broke(
        self,
        member: WorkerHandle,
        error: BaseException | None,
        dead: Callable[[BaseException], object],
        again: Callable[[], object],
    ) -> bool:
        """Handles a failed call to a process. Returns True if only the connection broke, so that the process may still
        live.

        In that case exactly one of two actions runs later: `dead` with the error if the process counts as dead, or
        `again` if it lives and is still used. Until then the process gets no task. May be called from any thread.
        """
        if not isinstance(error, ActorUnavailableError):
            return False
        member.cut_off = True
        self._mailbox.post(lambda: self._broke(member, error, dead, again))
        return True

    def _broke(
        self,
        member: WorkerHandle,
        error: ActorUnavailableError,
        dead: Callable[[BaseException], object],
        again: Callable[[], object],
    ) -> None:
        # Set again: an answer to a question about an earlier call may have cleared it.
        member.cut_off = True
        step = self._reconnections.broke(member.name, monotonic_ms())
        broken = self._broken.setdefault(member.name, _Broken(member, error))
        broken.calls.append((dead, again))
        if step.ask:
            log.warning("the connection to %s broke: it is asked whether it lives", member.name)
            self._watch_time(broken)
            self._ask(broken)
        if step.verdict is not None:
            self._take(broken, Step(step.verdict))

    def _ask(self, broken: _Broken) -> None:
        # `pulse` has its own thread, so it never waits for other calls.
        answer: Any = broken.member.handle.pulse.remote()
        answer.future().add_done_callback(lambda future: self._mailbox.post(partial(self._answered, broken, future)))

    def _answered(self, broken: _Broken, future: Future[Any]) -> None:
        name, error = broken.member.name, future.exception()
        if self._broken.get(name) is not broken:
            return
        if error is None:
            self._take(broken, self._reconnections.answered(name))
            return
        broken.error = error
        final = not isinstance(error, ActorUnavailableError)
        self._take(broken, self._reconnections.failed(name, monotonic_ms(), final=final))
        if final:
            log.info("%s: %s", name, error_text(error))

    def _watch_time(self, broken: _Broken) -> None:
        self._mailbox.call_later(self._reconnections.limit_ms, partial(self._time_has_passed, broken))

    def _time_has_passed(self, broken: _Broken) -> None:
        name = broken.member.name
        if self._broken.get(name) is broken:
            self._take(broken, self._reconnections.pass_time(name, monotonic_ms()))
        if self._broken.get(name) is broken:
            self._watch_time(broken)

    def _take(self, broken: _Broken, step: Step) -> None:
        member, over = broken.member, step.over
        if step.verdict == "dead":
            over |= self._is_dead(broken)
        if over:
            del self._broken[member.name]
        elif step.ask:
            self._mailbox.call_later(ASK_AGAIN_MS, lambda: self._ask(broken))
        if step.verdict == "alive":
            self._lives(broken)
        elif step.verdict == "late":
            self._evict(member, f"{member.name} answers again, and its task runs elsewhere now")
        if over and not self._broken:
            self._settled()

    def _is_dead(self, broken: _Broken) -> bool:
        """Marks a process as dead. Returns True if its node is unknown, so that nothing more can be found out."""
        member, calls = broken.member, broken.calls
        if member.info is not None and not member.dead:
            node = member.info.node_id
            log.warning("%s does not answer: its node %s may be lost, which Ray checks", member.name, node)
        member.dead, broken.calls = True, []
        for dead, _ in calls:
            dead(broken.error)
        if member.info is None:
            self._reconnections.forget(member.name)
        return member.info is None

    def _lives(self, broken: _Broken) -> None:
        member = broken.member
        member.cut_off = False
        if not member.usable:
            return
        if not self._is_kept(member):
            self._evict(member, f"{member.name} was out of reach, and its task went elsewhere meanwhile")
            return
        log.warning("the connection to %s works again, and the process continues", member.name)
        for _, again in broken.calls:
            again()


ASK_AGAIN_MS = 500
FAILURES_MAX = 3
"""Number of failed requests after which a process counts as dead. After a cut link, the first request usually
works.
"""
ASKS_MAX = 240
"""Limit of requests to a process that counts as dead. They take at least two minutes."""
BREAKS_MAX, BREAKS_MS = 10, 60_000
ASKED_MS_MAX = 120_000
"""Additional time in ms for which answers of a process that counts as dead are accepted."""
LIMIT_SHARE, LIMIT_MS_MIN = 5, 2_000
"""An answer may take 1/LIMIT_SHARE of `heartbeat.timeout`, but at least LIMIT_MS_MIN milliseconds."""


def limit_ms(heartbeat_timeout_ms: int) -> int:
    """Returns the time, in ms, within which a process has to answer after its connection broke."""
    return max(LIMIT_MS_MIN, heartbeat_timeout_ms // LIMIT_SHARE)


class Step(NamedTuple):
    """The next step for a process whose connection broke.

    `verdict`: the process was found to be alive, dead, or too late; None if still unknown. `ask`: send the process
    another request after `ASK_AGAIN_MS`. `over`: no more requests are needed.
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
    """Decides whether processes with broken connections live, without I/O. Processes are identified by name.

    Times are in ms of a monotonic clock. `limit_ms`: the time for an answer.
    """

    limit_ms: int
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _breaks: dict[str, deque[int]] = field(default_factory=dict)
    """Times, in ms, of the last breaks of each process's connection."""

    def broke(self, name: str, now_ms: int) -> Step:
        """Records a failed call. `ask` is True in the result if it is the first one, so that a request has to be
        sent at once.
        """
        asked = self._asked.get(name)
        if asked is not None:
            return Step("dead" if asked.dead else None)
        breaks = self._breaks.setdefault(name, deque(maxlen=BREAKS_MAX))
        breaks.append(now_ms)
        often = len(breaks) == BREAKS_MAX and now_ms - breaks[0] < BREAKS_MS
        self._asked[name] = _Asked(now_ms, dead=often)
        return Step("dead" if often else None, ask=True)

    def answered(self, name: str) -> Step:
        """Records that a process has answered, so that it lives."""
        asked = self._asked.pop(name, None)
        if asked is None:
            return Step(None)
        return Step("late" if asked.dead else "alive", over=True)

    def failed(self, name: str, now_ms: int, *, final: bool) -> Step:
        """Records a failed request. `final`: Ray reports that the process has ended."""
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
        """Checks whether a process has exceeded its time limit without an answer."""
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
        """Drops the records about a process that has ended."""
        self._asked.pop(name, None)
        self._breaks.pop(name, None)

    def _is_over(self, asked: _Asked, now_ms: int) -> bool:
        return now_ms - asked.since_ms >= self.limit_ms


SUSPECT_MS_MAX = 120_000
"""Longest time, in ms, for which a node is suspect. Ray gives up a node that is cut off in about half of this time."""
SHARE = 2
"""A node becomes suspect when its other processes have been silent for 1/SHARE of the heartbeat timeout."""


class SuspectNodes:
    """The nodes of one job that do not answer any more. Times are in ms of a monotonic clock.

    `own` is the coordinator's node, which is never suspect. `timeout_ms` is the heartbeat timeout.
    """

    def __init__(self, own: str, timeout_ms: int, limit_ms: int = SUSPECT_MS_MAX) -> None:
        self._own = own
        self._timeout_ms = timeout_ms
        self._limit_ms = limit_ms
        self._since_ms: dict[str, int] = {}

    @property
    def nodes(self) -> frozenset[str]:
        """Returns the suspect nodes. May be called from any thread."""
        return frozenset(list(self._since_ms))

    def is_silent(self, node: str, others_ms: Collection[int], now_ms: int) -> bool:
        """Records that a process of a node does not answer. Returns whether the node becomes suspect because of this
        report.

        `others_ms`: how long, in ms, each other process there has not answered.
        """
        if node == self._own or node in self._since_ms or any(ms * SHARE < self._timeout_ms for ms in others_ms):
            return False
        self._since_ms[node] = now_ms
        return True

    def clear_suspicion(self, node: str) -> bool:
        """Removes a node that answered, or that Ray reported dead, from the suspect nodes. Returns whether it was
        suspect.
        """
        return self._since_ms.pop(node, None) is not None

    def pass_time(self, now_ms: int) -> list[str]:
        """Removes and returns the nodes that have been suspect for longer than the limit."""
        over = [node for node, since_ms in self._since_ms.items() if now_ms - since_ms >= self._limit_ms]
        for node in over:
            del self._since_ms[node]
        return over
