"""`Wanted`: bundles that somebody asks Ray for, and what they are for, so that it can say what is missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.actors.graph.slot_plan import Strategy
from tidegate.actors.ray.slots.missing_room import Need


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bundles that are to be reserved together. `labels`: for each one, what it is for. `name` is for the dashboard."""

    name: str
    bundles: Sequence[Mapping[str, float]]
    labels: Sequence[str]
    strategy: Strategy
    detached: bool = False
    """Whether they outlive the script that asks for them."""

    @property
    def needs(self) -> list[Need]:
        """Each bundle, with what it is for."""
        return [Need.of(bundle, label) for bundle, label in zip(self.bundles, self.labels, strict=True)]

    @property
    def one_node(self) -> bool:
        """Whether all must be on one node."""
        return self.strategy == "STRICT_PACK"
