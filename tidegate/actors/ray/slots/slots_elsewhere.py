"""Which bundle a slot's processes start in while nodes are to be avoided, or bundles have no node. Pure.

A job waits for Ray's word on a node that may be lost, some 15 s, because the bundles there cannot be used before that.
When Ray knows that the node is lost its bundles have no node until there is room on another one. In neither case does
a job wait where its reservation has slots to spare on nodes that live. Rules:

- A slot keeps its bundle where that is on a node which is not avoided: its other processes may be there, and copies.
- Else it gets a free slot of a bundle on such a node. Of several bundles the one with the most free slots.
- A slot counts as free that no process of this job is in. Another job may have it: so who stands in takes no share of
  its processor by Ray's count, as a spare process does not, and never waits for that.
- A bundle of which nobody knows the node is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import TypeAlias

Nodes: TypeAlias = Mapping[int, str]
"""The node of each bundle, as far as it is known."""
NOWHERE: Nodes = {}


def bundles_elsewhere(
    slots: Sequence[tuple[int, int]],
    bundles: Sequence[int],
    used: Mapping[int, int],
    nodes: Nodes,
    avoided: Container[str],
) -> dict[int, int]:
    """The bundle of each of these slots for now; a slot that can start nowhere is left out.

    `slots`: the number of each, and its bundle. `bundles`: that of every slot of the reservation. `used`: how many
    slots of a bundle have processes of this job.
    """
    reached = {bundle for bundle in bundles if nodes.get(bundle) and nodes[bundle] not in avoided}
    found = {slot: bundle for slot, bundle in slots if bundle in reached}
    free = Counter(bundle for bundle in bundles if bundle in reached)
    free.subtract({bundle: number for bundle, number in used.items() if bundle in reached})
    # A slot that keeps its bundle is not free, although its processes are gone.
    free.subtract(Counter(found.values()))
    for slot, _ in slots:
        best = max(free, key=lambda bundle: (free[bundle], -bundle), default=None)
        if slot not in found and best is not None and free[best] > 0:
            found[slot] = best
            free[best] -= 1
    return found
