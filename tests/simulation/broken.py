"""Protocols with one rule broken on purpose. The oracle has to see each of them, or its silence means nothing.

Each break is a `Protocol` and the number of the invariant it belongs to; together they go through every invariant of
the architecture, the barrier tables and the phases of a checkpoint. What shows a break may be another invariant: a
lost batch is a wrong cut (3) or a missing row (6), whichever is seen first.
"""

from __future__ import annotations

from broken_coordinator import COORDINATOR_BREAKS
from broken_tasks import TASK_BREAKS

from tidegate.testing import Protocol

BROKEN: dict[str, tuple[int, Protocol]] = {**TASK_BREAKS, **COORDINATOR_BREAKS}
"""Every break: the rule, its invariant, and the protocol that breaks it."""

FAST = (
    "an element passes a blocked channel",
    "a snapshot is taken at the first barrier",
    "gaps are ignored",
    "acknowledged before the file is durable",
    "positions are not restored",
    "sinks commit on acknowledgement",
    "complete without the last task",
    "state of the newest checkpoint is deleted",
)
"""Breaks that show within very few seeds: the tests try these, the benchmark `mutations.py` all."""
