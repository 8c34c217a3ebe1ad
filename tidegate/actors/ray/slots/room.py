"""`Room`: tells what a job waits for whose processes have no place in the cluster, and ends a wait that is too long.

Rules:

- Slots are bundles of placement groups. Ray moves those of a lost node to other nodes as soon as one has room for
  them. Until then nothing is started in them, and nobody says so. Here it is said: how many of which kind, what stands
  against it, and what is free on which node.
- A wait that takes too long (`slot.request.timeout`, 5 min as in Flink) fails the attempt. So the restart strategy
  decides whether the job goes on waiting, and the failure tells for how long it has, and for what.
- Processes that are only slow to start wait for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from tidegate.actors.drivers.threads import WorkerPool
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.actors.ray.slots.job_slots import JobSlots
from tidegate.actors.ray.slots.missing_room import Need, NodeRoom, missing_room
from tidegate.actors.ray.slots.own_slots import COMMON
from tidegate.actors.ray.slots.reservation import nodes_that_live
from tidegate.protocol.failure_reasons import bounded_text, error_text
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)

LOOK_EVERY_MS = 5_000
REMOVED = "REMOVED"


def what_is_missing(group: Mapping[str, Any], labels: Mapping[int, str], nodes: Sequence[NodeRoom]) -> str | None:
    """What a placement group waits for, in words; None where all of its bundles have a node.

    `group`: as Ray's `placement_group_table` describes it. `labels`: what its bundles are for, if that is not common
    slots. `nodes`: those that live.
    """
    if group.get("state") == REMOVED:
        return "its placement group was removed, with the session or the driver that it belonged to"
    places: Mapping[int, str] = group["bundles_to_node_id"]
    homeless = sorted(index for index, node in places.items() if not node)
    if not homeless:
        return None
    needs = [Need.of(group["bundles"][index], labels.get(index, COMMON)) for index in homeless]
    return missing_room(needs, nodes, one_node=group.get("strategy") == "STRICT_PACK")


def look_at(slots: JobSlots) -> str | None:
    """What a job with these slots waits for now. Asks Ray. Raises RayError."""
    tables = [(labels, _table(group)) for group, labels in slots.groups]
    nodes = nodes_that_live()
    return "; ".join(filter(None, (what_is_missing(table, labels, nodes) for labels, table in tables))) or None


def _table(group: PlacementGroup) -> Any:
    return ray.util.placement_group_table(group)


class Room:
    """That of one job. Everything runs on the coordinator's mailbox, but `look`, which may take its time.

    `starting` tells which processes have not started; `gave_up` takes the text of a wait of `wait_ms_max`.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        look: Callable[[], str | None],
        starting: Callable[[], Sequence[str]],
        gave_up: Callable[[str], object],
        wait_ms_max: int,
    ) -> None:
        self._mailbox = mailbox
        self._look = look
        self._starting = starting
        self._gave_up = gave_up
        self._wait_ms_max = wait_ms_max
        self._pool: WorkerPool | None = None
        self._since_ms: int | None = None
        self._watching = False
        self._closed = False
        self.waits_for: str | None = None
        """What is missing now. From any thread."""

    def watch(self) -> None:
        """Processes were asked for: look until all have started."""
        self._since_ms = None
        if not self._watching:
            self._watching = True
            self._mailbox.call_later(LOOK_EVERY_MS, self._tick)

    def close(self) -> None:
        """The job is over."""
        self._closed = True
        self.waits_for = None
        if self._pool is not None:
            self._pool.close()

    def _tick(self) -> None:
        if self._closed:
            return
        if not self._starting():
            self._watching, self._since_ms, self.waits_for = False, None, None
            return
        if self._pool is None:
            self._pool = WorkerPool(1, "tidegate-room", lambda error: log.warning("nobody looks for room: %s", error))
        self._pool.submit(self._look, lambda future: self._mailbox.post(lambda: self._looked(future)))

    def _looked(self, future: Future[str | None]) -> None:
        if self._closed:
            return
        self._mailbox.call_later(LOOK_EVERY_MS, self._tick)
        if (error := future.exception()) is not None:
            log.warning("whether the cluster has room is not known: %s", error_text(error))
            return
        missing = future.result()
        if missing is None or not (starting := self._starting()):
            self._since_ms, self.waits_for = None, None
            return
        now_ms = monotonic_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
        waited_s = (now_ms - self._since_ms) // 1_000
        self.waits_for = waits_for = f"room since {waited_s} s, for {', '.join(starting)}: {missing}"
        log.warning("the job waits for %s", bounded_text(waits_for))
        if now_ms - self._since_ms >= self._wait_ms_max:
            self._since_ms = None
            self._gave_up(
                f"the cluster had no room for its process for {waited_s} s: {missing}. Add nodes, end other jobs, or "
                "restore it with a lower parallelism"
            )
