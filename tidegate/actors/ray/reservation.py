"""Reserves slots with placement groups of Ray, limits the wait for them, and describes which resources are missing.

Rules:

- A caller gets all of its slots or none: Ray places a placement group as a whole.
- During the wait, a line is logged every few seconds with what is missing, where, and since when. A wait that exceeds
  its limit raises an error with the same text.
- The text is for people who decide whether to add a node, to end another job, or to request less. So it lists each node
  with its free resources, which is only a snapshot. The functions that make it do no I/O.
- Nodes cannot be added to a cluster that this script has started. A request that would not fit there if the cluster
  were empty is refused at once.
- The caller releases its slots. Slots of a script end with it, slots of a detached job do not.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup

from tidegate.actors.graph.job_graph import DEFAULT_GROUP
from tidegate.actors.graph.slot_plan import SLOT_BUNDLE, Placement, SlotPlan, Strategy, strategy_of
from tidegate.actors.ray.authentication import is_on_spark
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import JobId

log = logging.getLogger(__name__)

TELL_EVERY_S = 5.0
NODE_ID_CHARACTERS = 8


def nodes_that_live() -> list[NodeRoom]:
    """Returns the living nodes of the Ray cluster, with their free and total resources."""
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
    """Returns whether this process has started the Ray cluster, so that nodes cannot be added to it.

    Ray has no public function for this.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    return bool(getattr(node, "head", False)) or is_on_spark()


def check_fits(wanted: SlotRequest) -> None:
    """Raises ConfigurationError for a request that can never fit on a cluster to which nodes cannot be added."""
    if wanted.bundles and started_here():
        nodes = nodes_that_live()
        if never_fits(wanted.needs, nodes, one_node=wanted.one_node):
            raise ConfigurationError(
                f"{wanted.name}: {missing_room(wanted.needs, nodes, one_node=wanted.one_node)}. Nodes cannot be added "
                "to this Ray, because this script has started it: request less, or start it with more (ray_options="
                '{"num_cpus": …, "num_gpus": …} of StreamEnvironment.raydp, ray.init)'
            )


def ask_for(wanted: SlotRequest) -> PlacementGroup:
    """Creates the placement group for a request, and returns it at once. Ray places its bundles when nodes have free
    resources.
    """
    lifetime = {"lifetime": "detached"} if wanted.detached else {}
    bundles = [dict(bundle) for bundle in wanted.bundles]
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=wanted.strategy, name=wanted.name, **lifetime)
    return group


def await_room(group: PlacementGroup, wanted: SlotRequest, timeout_s: float) -> str | None:
    """Waits until all bundles of a placement group have a node.

    Returns None then, or after `timeout_s` seconds a text about what is missing.
    """
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
        log.warning("%s has waited for %.0f s: %s", wanted.name, waited_s, missing)


def reserve(wanted: SlotRequest, timeout_s: float, advice: str) -> PlacementGroup:
    """Creates the placement group for a request, and waits until all its bundles have a node.

    Raises ConfigurationError after `timeout_s`, with what is missing and with `advice`.
    """
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
    """Removes a placement group, which ends the processes in it. Does nothing if Ray was disconnected, which also
    removes the group.
    """
    if group is not None and ray.is_initialized():
        remove: Any = ray.util.remove_placement_group
        remove(group)


COMMON = "the common slots"
ADVICE = "Request less (parallelism=, num_cpus=, num_gpus=, resources=), end other jobs, or add nodes"


def common_name(job_id: JobId) -> str:
    """Returns the name of the placement group of a detached job's common slots."""
    return f"{job_id} (slots)"


def own_name(job_id: JobId) -> str:
    """Returns the name of the placement group of a job's slots for steps with resources."""
    return f"{job_id} (slots of steps)"


def common_slots(job_id: JobId, plan: SlotPlan, placement: Placement) -> SlotRequest:
    """Returns the request for the common slots of a detached job."""
    bundles = [SLOT_BUNDLE] * plan.width
    labels = [_label(group) for group, slots in plan.groups.items() for _ in range(slots)]
    return SlotRequest(common_name(job_id), bundles, labels, strategy_of(placement), detached=True)


def _label(group: str) -> str:
    return COMMON if group == DEFAULT_GROUP else f"slot sharing group {group!r}"


def own_slots(job_id: JobId, plan: SlotPlan, placement: Placement, *, detached: bool) -> SlotRequest:
    """Returns the request for the slots of steps with resources. It has no bundles if there are no such steps."""
    return SlotRequest(own_name(job_id), plan.bundles, plan.labels, strategy_of(placement), detached)


# --- what is missing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Bundles to be reserved together. `labels` has the purpose of each bundle. `name` is shown in Ray's
    dashboard.
    """

    name: str
    bundles: Sequence[Mapping[str, float]]
    labels: Sequence[str]
    strategy: Strategy
    detached: bool = False
    """True if the slots outlive the script that requests them."""

    @property
    def needs(self) -> list[Need]:
        """Returns each bundle of the request as a `Need` with its purpose."""
        return [Need.of(bundle, label) for bundle, label in zip(self.bundles, self.labels, strict=True)]

    @property
    def one_node(self) -> bool:
        """Returns whether all bundles of the request must be on one node."""
        return self.strategy == "STRICT_PACK"


NODES_SHOWN_MAX = 8
_MEMORY = "memory"
_SLACK = 1e-6
"""Tolerance in comparisons of amounts, which Ray rounds to ten-thousandths."""

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """The free and the total resources of a living node."""

    name: str
    free: Amounts
    total: Amounts


@dataclass(frozen=True, slots=True)
class Need:
    """The resources of a bundle that needs a node, and the bundle's purpose."""

    bundle: tuple[tuple[str, float], ...]
    label: str

    @classmethod
    def of(cls, bundle: Amounts, label: str) -> Need:
        """Returns the `Need` for a bundle, which is a mapping of resources to amounts."""
        return cls(tuple(sorted((kind, float(amount)) for kind, amount in bundle.items() if amount)), label)


def missing_room(needs: Sequence[Need], nodes: Sequence[NodeRoom], *, one_node: bool = False) -> str:
    """Returns text about the bundles that have no node, and why. `one_node`: all bundles must be on one node."""
    counts = Counter(needs)
    what = " and ".join(f"{_count(n)} of {amounts_text(dict(b.bundle))} for {b.label}" for b, n in counts.items())
    verb = "has" if len(needs) == 1 else "have"
    return f"{what} {verb} no node. {why_no_room(needs, nodes, one_node=one_node)}"


def why_no_room(needs: Sequence[Need], nodes: Sequence[NodeRoom], *, one_node: bool = False) -> str:
    """Returns text about why bundles have no node, and how much of the needed resources is free on each node."""
    return f"{_why(needs, nodes, one_node)}. {_where(needs, nodes)}"


def never_fits(needs: Sequence[Need], nodes: Sequence[NodeRoom], *, one_node: bool = False) -> bool:
    """Returns whether these bundles would not fit on these nodes even if the nodes were empty. False if
    uncertain.
    """
    asked = _sum(needs)
    totals = [node.total for node in nodes]
    if one_node and not any(_holds(total, asked) for total in totals):
        return True
    each = all(any(_holds(total, dict(need.bundle)) for total in totals) for need in set(needs))
    return not each or any(amount > _all_of(kind, totals) + _SLACK for kind, amount in asked.items())


def amounts_text(amounts: Amounts) -> str:
    """Returns resources as text: "1 CPU + 0.5 GPU"."""
    return " + ".join(_amount(kind, amount) for kind, amount in sorted(amounts.items()))


def _why(needs: Sequence[Need], nodes: Sequence[NodeRoom], one_node: bool) -> str:
    """Returns text with the reason why bundles have no node, for each scarce resource."""
    asked, causes = _sum(needs), []
    for kind in sorted(asked):
        each = max(dict(need.bundle).get(kind, 0.0) for need in needs)
        total, free = ([getattr(node, what).get(kind, 0.0) for node in nodes] for what in ("total", "free"))
        if not any(total):
            causes.append(f"no node has any {_kind(kind)}")
        elif max(total) + _SLACK < each:
            causes.append(f"no node has {_amount(kind, each)}, not even when it is empty")
        elif sum(total) + _SLACK < asked[kind]:
            causes.append(f"all nodes together have {_amount(kind, sum(total))}, and {asked[kind]:g} are needed")
        elif sum(free) + _SLACK < asked[kind]:
            needed = _amount(kind, asked[kind])
            causes.append(f"{needed} needed, and {_amount(kind, sum(free))} free of {_amount(kind, sum(total))}")
        elif max(free) + _SLACK < each:
            causes.append(f"{_amount(kind, each)} needed on one node, and no node has more than {max(free):g} free")
    if one_node and len(needs) > 1 and not any(_holds(node.free, asked) for node in nodes):
        causes.append(f"they must be on one node (strict_pack), and none has {amounts_text(asked)} free")
    if not causes:
        causes.append("no node has all of a bundle free at once")
    text = "; ".join(causes)
    return text[0].upper() + text[1:]


def _where(needs: Sequence[Need], nodes: Sequence[NodeRoom]) -> str:
    kinds = sorted(_sum(needs))
    shown = [
        f"{node.name}: " + ", ".join(_left(kind, node.free.get(kind, 0.0), node.total.get(kind, 0.0)) for kind in kinds)
        for node in sorted(nodes, key=lambda node: node.name)[:NODES_SHOWN_MAX]
    ]
    more = len(nodes) - len(shown)
    tail = f"; and {more} more" if more else ""
    return f"Free on the nodes that live ({len(nodes)}): {'; '.join(shown)}{tail}" if nodes else "No node lives"


def _count(number: int) -> str:
    return "1 bundle" if number == 1 else f"{number} bundles"


def _sum(needs: Sequence[Need]) -> dict[str, float]:
    asked: Counter[str] = Counter()
    for need in needs:
        asked.update(dict(need.bundle))
    return dict(asked)


def _all_of(kind: str, nodes: Sequence[Amounts]) -> float:
    return sum(node.get(kind, 0.0) for node in nodes)


def _holds(node: Amounts, asked: Amounts) -> bool:
    return all(node.get(kind, 0.0) + _SLACK >= amount for kind, amount in asked.items())


def _kind(kind: str) -> str:
    return "memory" if kind == _MEMORY else kind


def _number(kind: str, amount: float) -> str:
    return f"{amount / 2**20:,.0f}" if kind == _MEMORY else f"{round(amount, 4):g}"


def _amount(kind: str, amount: float) -> str:
    return f"{_number(kind, amount)} {'MiB of memory' if kind == _MEMORY else kind}"


def _left(kind: str, free: float, total: float) -> str:
    return f"{_number(kind, free)} of {_amount(kind, total)}"
