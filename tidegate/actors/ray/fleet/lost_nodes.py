"""`LostNodes`: nodes that may be lost. Nothing is given to a process there, and none is started there, until Ray knows.

Rules:

- How a process has ended on a node that lives, Ray says at once: the raylet of the node sees it. Where only the
  connection broke, the process may live, or the raylet may be gone as well.
- So the process is asked (`reconnections.py` decides). If it answers, what broke is called again, and nothing has
  happened. Else whoever waits for it hears that it is lost, and Ray makes sure of its node by its health check: some
  15 s by default.
- Meanwhile Ray would still start processes on such a node, and they would be lost with it: a second restart for one
  loss. So an attempt waits, unless spare processes on other nodes can take over at once, or processes can start on
  others because nothing is reserved, or in free slots of the reservation (`slots_elsewhere.py`).
- A node from which nobody answers any more is suspect (`suspect_nodes.py`), and avoided as well. Ray is asked to start
  a small actor there, which the head of Ray does itself: over the connection by which it checks the node's health. So
  its answer says that Ray keeps the node, its failure that Ray has given it up. Others may reach a node whose link is
  back long before Ray's head does, and what begins there then is lost if that comes too late.
- Ray is asked again and again, for a bounded time. A process that answers after all is given up: its place is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.ray.fleet.member import Member
from tidegate.actors.ray.fleet.reconnections import ASK_AGAIN_MS, Reconnections, Step
from tidegate.actors.ray.fleet.suspect_nodes import SUSPECT_MS_MAX, SuspectNodes
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.protocol.failure_reasons import error_text
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)


class _Presence:
    """Something that a node starts when it can."""

    def __repr__(self) -> str:
        """What Ray shows of this actor."""
        return "tidegate: does this node start processes?"

    def here(self) -> None:
        """It has started."""


@cache
def _presence_actor() -> Any:
    """Made when it is asked for, as `worker_actor` is."""
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(_Presence)


def start_there(node: str) -> Future[None]:
    """Have Ray's head start something on this node, and nowhere else; done when it has, or never will."""
    there: Any = NodeAffinitySchedulingStrategy(node, soft=False)
    presence: Any = _presence_actor()
    actor = presence.options(scheduling_strategy=there).remote()
    started: Future[None] = actor.here.remote().future()
    started.add_done_callback(partial(_let_go, actor))
    return started


def _let_go(actor: Any, started: Future[None]) -> None:
    """It ends when nobody has its handle any more, and not before it has started."""


@dataclass(slots=True, eq=False)
class _Broken:
    """A process to which calls broke."""

    member: Member
    error: BaseException
    """What Ray said last."""
    calls: list[tuple[Callable[[BaseException], object], Callable[[], object]]] = field(default_factory=list)
    """What follows for each of them, if the process is dead, and if it lives."""


class LostNodes:
    """Those of one job. Everything runs on the coordinator's mailbox.

    `give_up` takes a process that answers too late, and which it is. `settled` is called whenever there is no doubt
    any more. `is_kept` says whether a process still has its place.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        give_up: Callable[[Member, str], object],
        settled: Callable[[], object],
        suspects: SuspectNodes,
        reconnections: Reconnections,
        is_kept: Callable[[Member], bool],
        probe: Callable[[str], Future[None]] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._give_up = give_up
        self._settled = settled
        self._suspects = suspects
        self._reconnections = reconnections
        self._is_kept = is_kept
        self._probe = start_there if probe is None else probe
        self._broken: dict[str, _Broken] = {}
        """Processes of which Ray does not say whether they have ended, by name."""

    @property
    def doubtful(self) -> frozenset[str]:
        """Nodes that may be lost. From any thread."""
        broken = list(self._broken.values())
        return self._suspects.nodes | {one.member.info.node_id for one in broken if one.member.info is not None}

    def silent(self, node: str, others_ms: Sequence[int]) -> None:
        """A process on a node does not answer; and for how long the others there have not."""
        if not self._suspects.is_silent(node, others_ms, monotonic_ms()):
            return
        log.warning("nobody on node %s answers: it is suspect, and nothing is started there", node)
        self._probe(node).add_done_callback(
            lambda future: self._mailbox.post(lambda: self._probed(node, future.exception()))
        )
        self._mailbox.call_later(SUSPECT_MS_MAX, self._pass_time)

    def _probed(self, node: str, error: BaseException | None) -> None:
        if self._suspects.is_known(node):
            what = "answers" if error is None else f"is lost: {error_text(error)}"
            log.warning("node %s %s: it is suspect no more", node, what)
            self._settled()

    def _pass_time(self) -> None:
        for node in self._suspects.pass_time(monotonic_ms()):
            log.warning("node %s was suspect for %d ms: processes are started there again", node, SUSPECT_MS_MAX)
            self._settled()

    def broke(
        self,
        member: Member,
        error: BaseException | None,
        dead: Callable[[BaseException], object],
        again: Callable[[], object],
    ) -> bool:
        """Whether a call to a process broke, and Ray does not say that the process has ended. From any thread.

        Then `dead` takes how it has ended, if it counts as dead, or `again` makes the call again, if it lives and has
        its place: once it is known which of the two. Until then it gets no task.
        """
        if not isinstance(error, ActorUnavailableError):
            return False
        member.cut_off = True
        self._mailbox.post(lambda: self._broke(member, error, dead, again))
        return True

    def _broke(
        self,
        member: Member,
        error: ActorUnavailableError,
        dead: Callable[[BaseException], object],
        again: Callable[[], object],
    ) -> None:
        # Again: an answer to the question about another call may have come in between.
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
        # `pulse` has a thread to itself, which nothing holds up.
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
            self._give_up(member, f"{member.name} answers again, and its task goes on elsewhere")
        if over and not self._broken:
            self._settled()

    def _is_dead(self, broken: _Broken) -> bool:
        """A process counts as dead from now on. Whether that is all: nobody knows on which node it would have been."""
        member, calls = broken.member, broken.calls
        if member.info is not None and not member.dead:
            node = member.info.node_id
            log.warning("%s does not answer: its node %s may be lost, which Ray makes sure of", member.name, node)
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
            self._give_up(member, f"{member.name} was out of reach, and its task went elsewhere meanwhile")
            return
        log.warning("the connection to %s is there again: it goes on", member.name)
        for _, again in broken.calls:
            again()
