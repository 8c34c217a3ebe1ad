"""What a job reserves for itself: slots of steps with resources, and common slots if it outlives its driver."""

from __future__ import annotations

from tidegate.actors.graph.job_graph import DEFAULT_GROUP
from tidegate.actors.graph.slot_plan import SLOT_BUNDLE, Placement, SlotPlan, strategy_of
from tidegate.actors.ray.slots.wanted import Wanted
from tidegate.storage.ids import JobId

COMMON = "the common slots"
ADVICE = "Ask for less (parallelism=, num_cpus=, num_gpus=, resources=), end other jobs, or add nodes"


def common_name(job_id: JobId) -> str:
    """The name of the placement group with the common slots of a detached job."""
    return f"{job_id} (slots)"


def own_name(job_id: JobId) -> str:
    """The name of the placement group with the slots of steps with resources."""
    return f"{job_id} (slots of steps)"


def common_slots(job_id: JobId, plan: SlotPlan, placement: Placement) -> Wanted:
    """The common slots of a job that outlives its driver."""
    bundles = [SLOT_BUNDLE] * plan.width
    labels = [_label(group) for group, slots in plan.groups.items() for _ in range(slots)]
    return Wanted(common_name(job_id), bundles, labels, strategy_of(placement), detached=True)


def _label(group: str) -> str:
    return COMMON if group == DEFAULT_GROUP else f"slot sharing group {group!r}"


def own_slots(job_id: JobId, plan: SlotPlan, placement: Placement, *, detached: bool) -> Wanted:
    """The slots of steps with resources; no bundles where there are none."""
    return Wanted(own_name(job_id), plan.bundles, plan.labels, strategy_of(placement), detached)
