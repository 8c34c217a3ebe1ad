"""Protocols with one rule broken on purpose. The oracle has to see each of them, or its silence means nothing.

Each break belongs to an invariant; together they go through every invariant of the architecture, the barrier tables,
and those of jobs and checkpoints. What shows a break may be another invariant: a lost batch is a wrong cut (3) or a
missing row (6), whichever is seen first.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from broken_coordinator import COORDINATOR_BREAKS
from broken_layers import LAYER_BREAKS, LAYER_PATCHES
from broken_rules import RULE_BREAKS, Patch
from broken_tasks import TASK_BREAKS

from tidegate.simulation.draw import draw
from tidegate.simulation.scenarios import simulate_scenario
from tidegate.testing import Protocol, SimulationReport


@dataclass(frozen=True, slots=True)
class Break:
    """One broken rule: other parts, or a patch while a seed runs."""

    invariant: int
    protocol: Protocol | None = None
    patch: Patch = nullcontext

    def simulate(self, seed: int, *, shrink: bool = False) -> SimulationReport:
        """Run a seed with the rule broken."""
        with self.patch():
            return simulate_scenario(draw(seed), protocol=self.protocol, shrink=shrink)


BROKEN: dict[str, Break] = {
    **{
        rule: Break(invariant, protocol)
        for rule, (invariant, protocol) in (TASK_BREAKS | COORDINATOR_BREAKS | LAYER_BREAKS).items()
    },
    **{rule: Break(invariant, patch=patch) for rule, (invariant, patch) in (RULE_BREAKS | LAYER_PATCHES).items()},
}
"""Every break, by the rule."""

FAST = (
    "an element passes a blocked channel",
    "a snapshot is taken at the first barrier",
    "gaps are ignored",
    "acknowledged before the file is durable",
    "positions are not restored",
    "sinks commit on acknowledgement",
    "complete without the last task",
    "state of the newest checkpoint is deleted",
    "layers: what the newest does not need goes",
    "layers: those below are left out",
)
"""Breaks that show within very few seeds: the tests try these, the benchmark `mutations.py` all."""
