"""`LostNodes`: nodes that may be lost. Nothing is given to a process there, and none is started there, until Ray knows.

Rules:

- How a process has ended on a node that lives, Ray says at once: the raylet of the node sees it. Where only the
  connection broke, the raylet may be gone as well. Ray makes sure by its health check: some 15 s by default.
- Meanwhile Ray would still start processes on such a node, and they would be lost with it: a second restart for one
  loss. So an attempt waits, unless spare processes on other nodes can take over at once, or processes can start on
  others because nothing is reserved, or in free slots of the reservation (`slots_elsewhere.py`).
- A node from which nobody answers any more is suspect (`suspect_nodes.py`), and avoided as well. A small task of Ray is
  given to it. Its answer says that the node is back, its failure that Ray has given the node up.
- Ray is asked again and again, for a bounded time. A process that answers after all is given up: its place is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.ray.fleet.member import Member
from tidegate.actors.runtimes.ray.fleet.suspect_nodes import SUSPECT_MS_MAX, SuspectNodes
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)

ASK_AGAIN_MS = 500
ASKS_MAX = 240
"""Two minutes at least."""


@ray.remote(num_cpus=0, max_retries=0)
def _nothing() -> None:
    """Something that a node does when it can."""


def start_there(node: str) -> Any:
    """Start something on this node, and nowhere else; returns its reference."""
    there: Any = NodeAffinitySchedulingStrategy(node, soft=False)
    return _nothing.options(scheduling_strategy=there).remote()


class LostNodes:
    """Those of one job. Everything runs on the coordinator's mailbox.

    `give_up` takes a process that answers after all, and which it is. `settled` is called whenever there is no doubt
    any more.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        give_up: Callable[[Member, str], object],
        settled: Callable[[], object],
        suspects: SuspectNodes,
        probe: Callable[[str], Any] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._give_up = give_up
        self._settled = settled
        self._suspects = suspects
        self._probe = start_there if probe is None else probe
        self._asked: dict[str, tuple[Member, int]] = {}
        """Processes of which Ray does not say how they ended, by name, and how often it was asked."""

    @property
    def doubtful(self) -> frozenset[str]:
        """Nodes that may be lost. From any thread."""
        asked = list(self._asked.values())
        return self._suspects.nodes | {m.info.node_id for m, _ in asked if m.info is not None}

    def silent(self, node: str, others_ms: Sequence[int]) -> None:
        """A process on a node does not answer; and for how long the others there have not."""
        if not self._suspects.is_silent(node, others_ms, monotonic_ms()):
            return
        log.warning("nobody on node %s answers: it is suspect, and nothing is started there", node)
        self._probe(node).future().add_done_callback(
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
