"""`PendingDemand`: names the tasks and actors that Ray cannot place, while a function of the job may wait for them.

Task slots reserve CPUs. A function that calls `ray.get(task.remote())` waits for ever where all CPUs are slots, and Ray
reports nothing to it. Rules:

- Ray is asked only while the process of a task has been in one call for `BUSY_MS`, every `LOOK_EVERY_MS`, with a time
  limit, and not on the mailbox. The oldest call of `map_async` counts as well.
- Processes of jobs are placed in bundles of their own, so demands for bundles are left out (`room.py` reports them).
- A call of `map_async` that had no result in time names the demand in its error. Then the process of its task asks Ray,
  at most every `LOOK_EVERY_MS`.
- Ray does not report who waits for a task. So the text names both the process and the demand, and what to do if the
  one waits for the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError

from tidegate.actors.drivers.threads import WorkerPool
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.actors.ray.slots.missing_room import Amounts, Need, NodeRoom, amounts_text, why_no_room
from tidegate.actors.ray.slots.reservation import nodes_that_live
from tidegate.protocol.failure_reasons import bounded_text, error_text
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)

BUSY_MS = 10_000
LOOK_EVERY_MS = 5_000
LOOK_TIMEOUT_S = 5.0
SHAPES_MAX = 4
_WHAT_TO_DO = (
    "Slots reserve CPUs: if the function waits for Ray, leave CPUs free beside the slots (slots=, or more CPUs)"
)
_IN_A_BUNDLE = "_group_"
"""Part of the names of resources that belong to a placement group."""


def pending_demand() -> list[tuple[Amounts, int]]:
    """Return the resources that pending tasks and actors ask for, and how many ask for each. Asks Ray.

    Raises RayError or RuntimeError where Ray does not answer within `LOOK_TIMEOUT_S`.
    """
    # Ray has this for its autoscaler alone.
    from ray.core.generated import autoscaler_pb2

    worker: Any = ray._private.worker.global_worker
    messages: Any = autoscaler_pb2
    reply = messages.GetClusterResourceStateReply()
    reply.ParseFromString(worker.gcs_client.get_cluster_resource_state(timeout_s=LOOK_TIMEOUT_S))
    pending = reply.cluster_resource_state.pending_resource_requests
    return [(dict(each.request.resources_bundle), int(each.count)) for each in pending]


def what_is_pending(demand: Sequence[tuple[Amounts, int]], nodes: Sequence[NodeRoom]) -> str | None:
    """Describe the tasks and actors that no node has room for, or return None if there are none."""
    asked = [(shape, count) for shape, count in demand if any(shape.values()) and not _is_in_a_bundle(shape)]
    if not asked:
        return None
    shapes = " and ".join(f"{count} that need {amounts_text(shape)} each" for shape, count in asked[:SHAPES_MAX])
    more = "" if len(asked) <= SHAPES_MAX else f" and {len(asked) - SHAPES_MAX} more kinds"
    needs = [Need.of(shape, "") for shape, _ in asked]
    return f"Ray has pending tasks or actors: {shapes}{more}. {why_no_room(needs, nodes)}"


def look_at_demand() -> str | None:
    """Describe what Ray cannot place now, or return None if it places everything. Asks Ray."""
    demand = pending_demand()
    return what_is_pending(demand, nodes_that_live()) if demand else None


def _is_in_a_bundle(shape: Amounts) -> bool:
    return any(_IN_A_BUNDLE in kind for kind in shape)


class PendingDemand:
    """Looks at the pending demand of one job's cluster. `look` runs on the coordinator's mailbox.

    `ask` describes what Ray cannot place; it runs on a thread of its own.
    """

    def __init__(self, mailbox: Mailbox, ask: Callable[[], str | None] = look_at_demand) -> None:
        self._mailbox = mailbox
        self._ask = ask
        self._pool: WorkerPool | None = None
        self._asking = False
        self._due_ms = 0
        self._busy: Mapping[str, int] = {}
        self._logged = False
        self.waits_for: str | None = None
        """What a function may be waiting for now, or None. Read from any thread."""

    def look(self, busy: Mapping[str, int], now_ms: int) -> None:
        """Ask Ray if it is due. `busy`: how many ms each process has been in one call, by its name."""
        self._busy = {name: for_ms for name, for_ms in busy.items() if for_ms >= BUSY_MS}
        if not self._busy:
            self.waits_for, self._due_ms, self._logged = None, 0, False
            return
        if self._asking or now_ms < self._due_ms:
            return
        self._due_ms, self._asking = now_ms + LOOK_EVERY_MS, True
        if self._pool is None:
            self._pool = WorkerPool(1, "tidegate-demand", lambda error: log.warning("Ray cannot be asked: %s", error))
        self._pool.submit(self._ask, lambda answer: self._mailbox.post(lambda: self._answered(answer)))

    def close(self) -> None:
        """End the thread. The job is over."""
        self.waits_for = None
        if self._pool is not None:
            self._pool.close()

    def _answered(self, answer: Future[str | None]) -> None:
        self._asking = False
        if (error := answer.exception()) is not None:
            log.warning("the pending demand of Ray is not known: %s", error_text(error))
            return
        pending = answer.result()
        if pending is None or not self._busy:
            self.waits_for = None
            return
        name, for_ms = max(self._busy.items(), key=lambda each: each[1])
        others = f" and {len(self._busy) - 1} more" if len(self._busy) > 1 else ""
        self.waits_for = (
            f"a function in {name}{others}, in one call since {for_ms // 1_000} s, while {pending}. {_WHAT_TO_DO}"
        )
        if not self._logged:
            self._logged = True
            log.warning("the job waits for %s", bounded_text(self.waits_for))


class DemandForCalls:
    """Describes what Ray could not place while calls of one process had no result in time. Called from any thread."""

    def __init__(self, ask: Callable[[], str | None] = look_at_demand, clock: Callable[[], int] = monotonic_ms) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_ms: int | None = None
        self._answer: str | None = None

    def __call__(self) -> str | None:
        """Describe what Ray cannot place, with what to do; None if it places everything, or does not answer."""
        with self._lock:
            if self._asked_ms is None or self._clock() >= self._asked_ms + LOOK_EVERY_MS:
                try:
                    pending = self._ask()
                except (RayError, RuntimeError) as error:
                    log.warning("the pending demand of Ray is not known: %s", error_text(error))
                    pending = None
                self._asked_ms = self._clock()
                self._answer = None if pending is None else f"{pending}. {_WHAT_TO_DO}"
            return self._answer
