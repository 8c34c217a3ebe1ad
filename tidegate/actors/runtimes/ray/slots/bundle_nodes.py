"""`BundleNodes`: on which node each bundle of a reservation is, asked of Ray when nodes may be lost.

The answer comes from a thread: Ray may not answer at all, where it is the coordinator that is cut off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import ray

from tidegate.actors.hosts.threads import WorkerPool
from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.ray.fleet_options import SlotPlacement
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox

log = logging.getLogger(__name__)


def nodes_of(placement: SlotPlacement) -> dict[int, str]:
    """The node of each bundle that has one. Asks Ray. Raises RayError."""
    table: Any = ray.util.placement_group_table(placement.placement_group)
    places: Mapping[int, str] = table["bundles_to_node_id"]
    return {index: node for index, node in places.items() if node}


class BundleNodes:
    """Those of one job. Everything runs on the coordinator's mailbox, but `look`, which may take its time."""

    def __init__(self, mailbox: Mailbox, look: Callable[[], Mapping[int, str]], known: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._look = look
        self._known = known
        self._pool: WorkerPool | None = None
        self._asking = False
        self._avoided: frozenset[str] = frozenset()
        self.nodes: Mapping[int, str] = {}
        """What Ray has said last, about nodes that are still in doubt."""

    def ask(self, avoided: frozenset[str]) -> None:
        """These nodes are in doubt. Ray is asked once for the same ones; `known` is called when it has answered."""
        if avoided == self._avoided:
            return
        self._avoided, self.nodes = avoided, {}
        if avoided and not self._asking:
            self._submit()

    def close(self) -> None:
        """The job is over."""
        if self._pool is not None:
            self._pool.close()

    def _submit(self) -> None:
        avoided, self._asking = self._avoided, True
        if self._pool is None:
            self._pool = WorkerPool(1, "tidegate-bundles", lambda error: log.warning("no bundle is known: %s", error))
        self._pool.submit(self._look, lambda future: self._mailbox.post(lambda: self._looked(avoided, future)))

    def _looked(self, avoided: frozenset[str], future: Future[Mapping[int, str]]) -> None:
        self._asking = False
        if avoided != self._avoided:
            if self._avoided:
                self._submit()
            return
        if (error := future.exception()) is not None:
            log.warning("where the slots of the job are is not known: %s", error_text(error))
            return
        self.nodes = future.result()
        self._known()
