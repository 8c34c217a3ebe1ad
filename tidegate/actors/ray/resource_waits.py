"""Finds out what a job lacks on its Ray cluster: nodes for its slots, and resources for Ray tasks of its functions.

Rules:

- Slots are bundles of placement groups. Ray moves the bundles of a lost node to other nodes as soon as one has free
  resources. Until then nothing starts in them, and Ray does not report it. `RoomWatch` logs how many bundles of which
  kind wait, why, and what is free on which node. Processes that are only slow to start do not count.
- A wait that is too long (`slot.request.timeout`, 5 min as in Flink) fails the attempt. So the restart strategy decides
  whether the job continues to wait.
- `BundleNodes` requests from Ray, on a thread, on which node each bundle is, before processes start in bundles. Ray may
  not answer at all if the coordinator is cut off.
- Slots reserve CPUs. A function that calls `ray.get(task.remote())` waits for ever if all CPUs are slots, and Ray does
  not report it. `PendingDemand` calls Ray only while a process has been in one call for `BUSY_MS`, every
  `LOOK_EVERY_MS`, with a time limit. The oldest call of `map_async` counts as well, and a call that times out names the
  demand in its error (`DemandForCalls`). Demands for bundles do not count. Ray does not report which function waits for
  a task. So the text names both the process and the demand, and what to do if one waits for the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from tidegate.actors.drivers.threads import ThreadPool
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import JobSlots, SlotPlacement
from tidegate.actors.ray.reservation import (
    COMMON,
    Amounts,
    Need,
    NodeRoom,
    amounts_text,
    missing_room,
    nodes_that_live,
    why_no_room,
)
from tidegate.protocol.failures import bounded_text, error_text
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)

LOOK_EVERY_MS = 5_000
REMOVED = "REMOVED"


def what_is_missing(group: Mapping[str, Any], labels: Mapping[int, str], nodes: Sequence[NodeRoom]) -> str | None:
    """Returns text about the bundles of a placement group that have no node, or None if all have one.

    `group` is a result of Ray's `placement_group_table`. `labels` has the purpose of bundles that are not common slots.
    `nodes` are the living nodes.
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
    """Requests from Ray which bundles of a job have no node. Returns text about them, or None. Raises RayError."""
    tables = [(labels, _table(group)) for group, labels in slots.groups]
    nodes = nodes_that_live()
    return "; ".join(filter(None, (what_is_missing(table, labels, nodes) for labels, table in tables))) or None


def _table(group: PlacementGroup) -> Any:
    return ray.util.placement_group_table(group)


class RoomWatch:
    """Watches how long processes of one job that have not started wait for free resources of the cluster.

    All methods run on the coordinator's mailbox. `look` returns text about what is missing, or None, and runs on a
    thread, because it may be slow. `starting` returns the names of the processes that have not started. `gave_up` is
    called with the text of a wait that has reached `wait_ms_max`.
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
        self._pool: ThreadPool | None = None
        self._since_ms: int | None = None
        self._watching = False
        self._closed = False
        self.waits_for: str | None = None
        """Text about the resources that are missing now, or None. May be read from any thread."""

    def watch(self) -> None:
        """Starts to watch for processes that wait for resources, until all have started."""
        self._since_ms = None
        if not self._watching:
            self._watching = True
            self._mailbox.call_later(LOOK_EVERY_MS, self._tick)

    def close(self) -> None:
        """Stops watching, because the job is over."""
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
            self._pool = ThreadPool(
                1, "tidegate-room", lambda error: log.warning("the wait for room is not watched any more: %s", error)
            )
        self._pool.submit(self._look, lambda future: self._mailbox.post(lambda: self._looked(future)))

    def _looked(self, future: Future[str | None]) -> None:
        if self._closed:
            return
        self._mailbox.call_later(LOOK_EVERY_MS, self._tick)
        if (error := future.exception()) is not None:
            log.warning("Ray does not report whether the cluster has room: %s", error_text(error))
            return
        missing = future.result()
        if missing is None or not (starting := self._starting()):
            self._since_ms, self.waits_for = None, None
            return
        now_ms = monotonic_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
        waited_s = (now_ms - self._since_ms) // 1_000
        self.waits_for = waits_for = f"room for {', '.join(starting)} (for {waited_s} s so far): {missing}"
        log.warning("the job waits for %s", bounded_text(waits_for))
        if now_ms - self._since_ms >= self._wait_ms_max:
            self._since_ms = None
            self._gave_up(
                f"the cluster had no room for its process for {waited_s} s: {missing}. Add nodes, end other jobs, or "
                "restore it with a lower parallelism"
            )


ANSWER_MS_MAX = 2_000
"""Time, in ms, for which an attempt waits for Ray's answer. Then its processes start in the normal bundles of
their slots.
"""


class Question(NamedTuple):
    """A request to Ray for the nodes of bundles: the nodes to avoid, and the attempt that needs bundles, or None."""

    avoided: frozenset[str]
    attempt: int | None


NO_QUESTION = Question(frozenset(), None)


def nodes_of(placement: SlotPlacement) -> dict[int, str]:
    """Requests from Ray the node of each bundle, by index. Bundles without a node are omitted. Raises RayError."""
    table: Any = ray.util.placement_group_table(placement.placement_group)
    places: Mapping[int, str] = table["bundles_to_node_id"]
    return {index: node for index, node in places.items() if node}


class BundleNodes:
    """Finds out the nodes of the bundles of one job.

    All methods run on the coordinator's mailbox. `look` returns the nodes, and runs on a thread, because it may be
    slow. `known` is called when Ray has answered, or has not answered within `ANSWER_MS_MAX`.
    """

    def __init__(self, mailbox: Mailbox, look: Callable[[], Mapping[int, str]], known: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._look = look
        self._known = known
        self._pool: ThreadPool | None = None
        self._asking = False
        self._question: Question = NO_QUESTION
        self.settled = True
        """True if Ray has answered the current request, or its time limit has passed."""
        self.nodes: Mapping[int, str] = {}
        """Ray's answer to the current request: the node of each bundle. Bundles without a node are omitted."""

    def ask(self, avoided: frozenset[str], attempt: int | None = None) -> None:
        """Requests the nodes of bundles from Ray, once for the same arguments.

        `avoided` are the nodes that may be lost. `attempt` is the attempt that is about to start processes in bundles,
        or None. Without either, Ray is not called.
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
        """Stops requesting the nodes of bundles, because the job is over."""
        if self._pool is not None:
            self._pool.close()

    def _submit(self) -> None:
        question, self._asking = self._question, True
        if self._pool is None:
            self._pool = ThreadPool(
                1,
                "tidegate-bundles",
                lambda error: log.warning("the nodes of bundles are not requested any more: %s", error),
            )
        self._pool.submit(self._look, lambda future: self._mailbox.post(lambda: self._looked(question, future)))

    def _looked(self, question: Question, future: Future[Mapping[int, str]]) -> None:
        self._asking = False
        if question != self._question:
            if self._question != NO_QUESTION:
                self._submit()
            return
        if (error := future.exception()) is not None:
            log.warning("Ray does not report where the slots of the job are: %s", error_text(error))
            self._settle(question)
            return
        self.nodes, self.settled = future.result(), True
        self._known()

    def _settle(self, question: Question) -> None:
        if question == self._question and not self.settled:
            self.settled = True
            self._known()


BUSY_MS = 10_000
LOOK_TIMEOUT_S = 5.0
SHAPES_MAX = 4
_WHAT_TO_DO = (
    "Slots reserve CPUs: if the function waits for Ray, leave CPUs free that are not slots (slots=, or more CPUs)"
)
_IN_A_BUNDLE = "_group_"
"""Part of Ray's names for resources of a placement group."""


def pending_demand() -> list[tuple[Amounts, int]]:
    """Requests from Ray the resources for which tasks and actors wait. Returns pairs of resources and the number of
    waiters.

    Raises RayError or RuntimeError if Ray does not answer within `LOOK_TIMEOUT_S`.
    """
    # Ray has this function only for its autoscaler.
    from ray.core.generated import autoscaler_pb2

    worker: Any = ray._private.worker.global_worker
    messages: Any = autoscaler_pb2
    reply = messages.GetClusterResourceStateReply()
    reply.ParseFromString(worker.gcs_client.get_cluster_resource_state(timeout_s=LOOK_TIMEOUT_S))
    pending = reply.cluster_resource_state.pending_resource_requests
    return [(dict(each.request.resources_bundle), int(each.count)) for each in pending]


def what_is_pending(demand: Sequence[tuple[Amounts, int]], nodes: Sequence[NodeRoom]) -> str | None:
    """Returns text about the tasks and actors for which no node has free resources, or None if there are none."""
    asked = [(shape, count) for shape, count in demand if any(shape.values()) and not _is_in_a_bundle(shape)]
    if not asked:
        return None
    shapes = " and ".join(f"{count} that need {amounts_text(shape)} each" for shape, count in asked[:SHAPES_MAX])
    more = "" if len(asked) <= SHAPES_MAX else f" and {len(asked) - SHAPES_MAX} more kinds"
    needs = [Need.of(shape, "") for shape, _ in asked]
    return f"Ray has pending tasks or actors: {shapes}{more}. {why_no_room(needs, nodes)}"


def look_at_demand() -> str | None:
    """Requests from Ray the tasks and actors that it cannot place. Returns text about them, or None if there are
    none.
    """
    demand = pending_demand()
    return what_is_pending(demand, nodes_that_live()) if demand else None


def _is_in_a_bundle(shape: Amounts) -> bool:
    return any(_IN_A_BUNDLE in kind for kind in shape)


class PendingDemand:
    """Watches which tasks and actors Ray cannot place, while functions of one job may wait for them.

    `look` is called on the coordinator's mailbox. `ask` returns text about the demand, and runs on a separate thread.
    """

    def __init__(self, mailbox: Mailbox, ask: Callable[[], str | None] = look_at_demand) -> None:
        self._mailbox = mailbox
        self._ask = ask
        self._pool: ThreadPool | None = None
        self._asking = False
        self._due_ms = 0
        self._busy: Mapping[str, int] = {}
        self._logged = False
        self.waits_for: str | None = None
        """Text about what a function may be waiting for now, or None. May be read from any thread."""

    def look(self, busy: Mapping[str, int], now_ms: int) -> None:
        """Starts a request to Ray if one is due. `busy` has, by process name, how long in ms it has been in one
        call.
        """
        self._busy = {name: for_ms for name, for_ms in busy.items() if for_ms >= BUSY_MS}
        if not self._busy:
            self.waits_for, self._due_ms, self._logged = None, 0, False
            return
        if self._asking or now_ms < self._due_ms:
            return
        self._due_ms, self._asking = now_ms + LOOK_EVERY_MS, True
        if self._pool is None:
            self._pool = ThreadPool(
                1,
                "tidegate-demand",
                lambda error: log.warning("the pending demand of Ray is not requested any more: %s", error),
            )
        self._pool.submit(self._ask, lambda answer: self._mailbox.post(lambda: self._answered(answer)))

    def close(self) -> None:
        """Ends the thread that queries Ray, because the job is over."""
        self.waits_for = None
        if self._pool is not None:
            self._pool.close()

    def _answered(self, answer: Future[str | None]) -> None:
        self._asking = False
        if (error := answer.exception()) is not None:
            log.warning("the pending demand of Ray is unknown: %s", error_text(error))
            return
        pending = answer.result()
        if pending is None or not self._busy:
            self.waits_for = None
            return
        name, for_ms = max(self._busy.items(), key=lambda each: each[1])
        others = f" and {len(self._busy) - 1} more" if len(self._busy) > 1 else ""
        self.waits_for = (
            f"a function in {name}{others}, in one call for {for_ms // 1_000} s, while {pending}. {_WHAT_TO_DO}"
        )
        if not self._logged:
            self._logged = True
            log.warning("the job waits for %s", bounded_text(self.waits_for))


class DemandForCalls:
    """Describes the tasks and actors that Ray cannot place, for the error of a call that timed out. Called on any
    thread.
    """

    def __init__(self, ask: Callable[[], str | None] = look_at_demand, clock: Callable[[], int] = monotonic_ms) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_ms: int | None = None
        self._answer: str | None = None

    def __call__(self) -> str | None:
        """Returns the text, with advice. None if Ray can place everything, or does not answer."""
        with self._lock:
            if self._asked_ms is None or self._clock() >= self._asked_ms + LOOK_EVERY_MS:
                try:
                    pending = self._ask()
                except (RayError, RuntimeError) as error:
                    log.warning("the pending demand of Ray is unknown: %s", error_text(error))
                    pending = None
                self._asked_ms = self._clock()
                self._answer = None if pending is None else f"{pending}. {_WHAT_TO_DO}"
            return self._answer
