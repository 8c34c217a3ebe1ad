"""`BundleNodes`: on which node each bundle of a reservation is, asked of Ray before processes start in bundles.

A bundle whose node is lost has no node until Ray finds room for it. A process that is started there waits. The answer
comes from a thread: Ray may not answer at all, where it is the coordinator that is cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray

from tidegate.actors.drivers.threads import WorkerPool
from tidegate.actors.ray.fleet_options import SlotPlacement
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.protocol.failure_reasons import error_text

log = logging.getLogger(__name__)

ANSWER_MS_MAX = 2_000
"""For longer no attempt waits for Ray's answer: its processes then start in the bundles of their slots."""


class Question(NamedTuple):
    """What Ray is asked for."""

    avoided: frozenset[str]
    attempt: int | None


NO_QUESTION = Question(frozenset(), None)


def nodes_of(placement: SlotPlacement) -> dict[int, str]:
    """The node of each bundle that has one. Asks Ray. Raises RayError."""
    table: Any = ray.util.placement_group_table(placement.placement_group)
    places: Mapping[int, str] = table["bundles_to_node_id"]
    return {index: node for index, node in places.items() if node}


class BundleNodes:
    """Those of one job. Everything runs on the coordinator's mailbox, but `look`, which may take its time.

    `known` is called when a question is settled: Ray has answered, has raised an error, or has not answered within
    `ANSWER_MS_MAX`.
    """

    def __init__(self, mailbox: Mailbox, look: Callable[[], Mapping[int, str]], known: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._look = look
        self._known = known
        self._pool: WorkerPool | None = None
        self._asking = False
        self._question: Question = NO_QUESTION
        self.settled = True
        """Whether nothing more is to be expected for the present question."""
        self.nodes: Mapping[int, str] = {}
        """What Ray has answered to the present question. A bundle that is missing has no node."""

    def ask(self, avoided: frozenset[str], attempt: int | None = None) -> None:
        """Ask Ray, once for the same question.

        `avoided`: nodes that are in doubt. `attempt`: the attempt that is about to start processes in bundles, None if
        it starts none. Without either Ray is not asked.
        """
        question = Question(avoided, attempt)
        if question == self._question:
            return
        self._question, self.nodes, self.settled = question, {}, question == NO_QUESTION
        if self.settled:
            return
        self._mailbox.call_later(ANSWER_MS_MAX, lambda: self._settle(question))
        if not self._asking:
            self._submit()

    def close(self) -> None:
        """The job is over."""
        if self._pool is not None:
            self._pool.close()

    def _submit(self) -> None:
        question, self._asking = self._question, True
        if self._pool is None:
            self._pool = WorkerPool(1, "tidegate-bundles", lambda error: log.warning("no bundle is known: %s", error))
        self._pool.submit(self._look, lambda future: self._mailbox.post(lambda: self._looked(question, future)))

    def _looked(self, question: Question, future: Future[Mapping[int, str]]) -> None:
        self._asking = False
        if question != self._question:
            if self._question != NO_QUESTION:
                self._submit()
            return
        if (error := future.exception()) is not None:
            log.warning("where the slots of the job are is not known: %s", error_text(error))
            self._settle(question)
            return
        self.nodes, self.settled = future.result(), True
        self._known()

    def _settle(self, question: Question) -> None:
        if question == self._question and not self.settled:
            self.settled = True
            self._known()
