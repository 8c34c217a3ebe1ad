"""`SlotOptions`: the keywords of a step that choose its slots (`docs/placement.md`).

A step has resources, which give each of its subtasks a slot to itself, or a slot sharing group, or neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from tidegate.actors.graph.resources import Resources
from tidegate.api.given_names import check_name
from tidegate.storage.errors import ConfigurationError


class SlotOptions(TypedDict, total=False):
    """The slots of a step: what each subtask reserves, in the words of `ray.remote`, or with which steps it shares."""

    num_cpus: float
    """CPUs; 1 where only others are named."""
    num_gpus: float
    """GPUs, also parts of one. The process of a subtask sees those that it has, and no others."""
    resources: Mapping[str, float]
    """Resources of nodes by the names that they were started with (`ray start --resources`)."""
    slot_sharing_group: str
    """The steps with which it shares slots. Without it a step is in the group of its inputs, or in "default"."""


def slot_of(step: str, slot: SlotOptions | None) -> tuple[Resources | None, str | None]:
    """Returns the resources and the slot sharing group that a step names; None for each that it does not name.

    Raises ConfigurationError for wrong amounts, for a wrong name, and for both at once, and TypeError for keywords that
    a step does not have.
    """
    if slot is None:
        return None, None
    if unknown := sorted(set(slot) - SlotOptions.__optional_keys__):
        raise TypeError(f"{step}: unexpected keyword argument {unknown[0]!r}")
    resources = Resources.of(step, slot.get("num_cpus"), slot.get("num_gpus"), slot.get("resources"))
    group = checked_group(step, slot.get("slot_sharing_group"))
    if resources is not None and group is not None:
        named = [name for name in ("num_cpus", "num_gpus", "resources") if slot.get(name) is not None]
        raise ConfigurationError(
            f"{step}: slot_sharing_group={group!r} and {', '.join(f'{name}=' for name in named)} exclude each other: a "
            "step with resources shares its slots with no other step. Remove one of them"
        )
    return resources, group


def checked_group(step: str, group: str | None) -> str | None:
    """Returns the slot sharing group that a step names. ConfigurationError if it cannot be a name."""
    if group is not None:
        check_name(f"{step}(slot_sharing_group=)", "a name", group)
    return group
