"""Reserves slots: placement groups of Ray, how long to wait for them, and what is reported while they have no nodes.

Rules:

- A caller gets all of its slots or none: Ray gives a placement group whole.
- While it waits, a line is logged every few seconds with what is missing, where, and since when. A wait that is over
  raises an error with the same text.
- On a cluster that this script has started nobody adds nodes. A request that would not fit there if the cluster were
  empty is refused at once.
- The caller gives its slots back. Slots of a script end with it, slots of a detached job do not.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup

from tidegate.actors.graph.job_graph import DEFAULT_GROUP
from tidegate.actors.graph.slot_plan import SLOT_BUNDLE, Placement, SlotPlan, strategy_of
from tidegate.actors.ray.authentication import is_on_spark
from tidegate.actors.ray.missing_resources import NodeRoom, SlotRequest, missing_room, never_fits
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import JobId

log = logging.getLogger(__name__)

TELL_EVERY_S = 5.0
NODE_ID_CHARACTERS = 8


def nodes_that_live() -> list[NodeRoom]:
    """The nodes of the cluster. Asks Ray."""
    free = available_resources_per_node()
    return [
        NodeRoom(
            f"{node['NodeManagerHostname']} ({node['NodeID'][:NODE_ID_CHARACTERS]})",
            free.get(node["NodeID"], {}),
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def started_here() -> bool:
    """Whether the cluster ends with this process, and nobody adds nodes to it. Ray has no public word for it."""
    node = getattr(ray._private.worker, "_global_node", None)
    return bool(getattr(node, "head", False)) or is_on_spark()


def check_fits(wanted: SlotRequest) -> None:
    """Refuse what cannot ever fit on a cluster that nobody adds nodes to. ConfigurationError."""
    if wanted.bundles and started_here():
        nodes = nodes_that_live()
        if never_fits(wanted.needs, nodes, one_node=wanted.one_node):
            raise ConfigurationError(
                f"{wanted.name}: {missing_room(wanted.needs, nodes, one_node=wanted.one_node)}. Nobody adds nodes to "
                "this Ray, because this script has started it: ask for less, or start it with more (ray_options="
                '{"num_cpus": …, "num_gpus": …} of StreamEnvironment.raydp, ray.init)'
            )


def ask_for(wanted: SlotRequest) -> PlacementGroup:
    """Ask Ray for the bundles; they come when there is room."""
    lifetime = {"lifetime": "detached"} if wanted.detached else {}
    bundles = [dict(bundle) for bundle in wanted.bundles]
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=wanted.strategy, name=wanted.name, **lifetime)
    return group


def await_room(group: PlacementGroup, wanted: SlotRequest, timeout_s: float) -> str | None:
    """Wait until all bundles have a node. Returns None then, and after `timeout_s` what is missing, in words."""
    since_ms = monotonic_ms()
    waited_s = 0.0
    while True:
        # Ray takes whole seconds, and cuts off the rest.
        if group.wait(timeout_seconds=math.ceil(min(TELL_EVERY_S, timeout_s - waited_s))):
            return None
        waited_s = (monotonic_ms() - since_ms) / 1_000
        missing = missing_room(wanted.needs, nodes_that_live(), one_node=wanted.one_node)
        if waited_s >= timeout_s:
            return f"{missing}. It has waited for {waited_s:.0f} s"
        log.warning("%s waits since %.0f s: %s", wanted.name, waited_s, missing)


def reserve(wanted: SlotRequest, timeout_s: float, advice: str) -> PlacementGroup:
    """The bundles, once all of them have a node. ConfigurationError, with what is missing, after `timeout_s`."""
    check_fits(wanted)
    group = ask_for(wanted)
    try:
        missing = await_room(group, wanted, timeout_s)
    except BaseException:
        release(group)
        raise
    if missing is None:
        return group
    release(group)
    raise ConfigurationError(f"{wanted.name}: {missing}. {advice}")


def release(group: PlacementGroup | None) -> None:
    """Give slots back. What still runs in them ends. A cluster that was left has done so itself."""
    if group is not None and ray.is_initialized():
        remove: Any = ray.util.remove_placement_group
        remove(group)


COMMON = "the common slots"
ADVICE = "Ask for less (parallelism=, num_cpus=, num_gpus=, resources=), end other jobs, or add nodes"


def common_name(job_id: JobId) -> str:
    """The name of the placement group with the common slots of a detached job."""
    return f"{job_id} (slots)"


def own_name(job_id: JobId) -> str:
    """The name of the placement group with the slots of steps with resources."""
    return f"{job_id} (slots of steps)"


def common_slots(job_id: JobId, plan: SlotPlan, placement: Placement) -> SlotRequest:
    """The common slots of a job that outlives its driver."""
    bundles = [SLOT_BUNDLE] * plan.width
    labels = [_label(group) for group, slots in plan.groups.items() for _ in range(slots)]
    return SlotRequest(common_name(job_id), bundles, labels, strategy_of(placement), detached=True)


def _label(group: str) -> str:
    return COMMON if group == DEFAULT_GROUP else f"slot sharing group {group!r}"


def own_slots(job_id: JobId, plan: SlotPlan, placement: Placement, *, detached: bool) -> SlotRequest:
    """The slots of steps with resources; no bundles where there are none."""
    return SlotRequest(own_name(job_id), plan.bundles, plan.labels, strategy_of(placement), detached)
