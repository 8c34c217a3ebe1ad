"""`FAULT_MIXES`: what goes wrong in random simulations, by the name that `draw.py` draws.

Rules: each mix is of few kinds, so that a run has several faults of a kind, and of few enough that a job gets on.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.testing.world.faults import Faults

_DURATION = "5s"

FAULT_MIXES: Mapping[str, Faults] = {
    "none": Faults(duration=_DURATION),
    "tasks": Faults(crash=0.01, delay="0ms..30ms", duration=_DURATION, crashes_max=4),
    "coordinator": Faults(coordinator_crash=0.03, delay="0ms..30ms", duration=_DURATION),
    "storage": Faults(storage=0.04, slow=0.03, slow_by="2s", duration=_DURATION),
    "network": Faults(duplicate=0.03, drop=0.004, delay="0ms..150ms", duration=_DURATION),
    "damage": Faults(
        crash=0.02, coordinator_crash=0.01, storage=0.01, damage=0.4, delay="0ms..30ms", duration=_DURATION
    ),
    "outage": Faults(
        crash=0.005, coordinator_crash=0.01, delay="0ms..30ms", outage="400ms..30s", duration=_DURATION,
        crashes_max=4,
    ),
    "links": Faults(
        crash=0.003, hang=0.04, heartbeats="700ms", coordinator_crash=0.03, delay="0ms..30ms", duration=_DURATION,
        crashes_max=4,
    ),
    "impatience": Faults(
        hang=0.02, heartbeats="150ms", coordinator_crash=0.04, delay="0ms..30ms", duration=_DURATION,
        crashes_max=4,
    ),
    "copies": Faults(crash=0.02, slow_copies="60s", delay="0ms..30ms", duration=_DURATION, crashes_max=6),
    "nodes": Faults(
        crash=0.002, node_loss=0.02, cut=0.03, heartbeats="700ms", coordinator_crash=0.005, delay="0ms..30ms",
        duration=_DURATION, crashes_max=4,
    ),
    "late copies": Faults(
        coordinator_crash=0.004, coordinator_crashes_max=8, slow_copies="900ms", delay="0ms..30ms",
        duration=_DURATION,
    ),
    "echoes": Faults(
        crash=0.03, storage=0.2, duplicate=0.9, delay="0ms..300ms", duration="10s", crashes_max=10
    ),
    "slow echoes": Faults(
        crash=0.03, storage=0.05, slow=0.3, slow_by="600ms", duplicate=0.9, delay="0ms..300ms", duration="10s",
        crashes_max=20,
    ),
    "restores": Faults(
        crash=0.02, restore_crash=0.08, coordinator_crash=0.01, storage=0.02, delay="0ms..60ms",
        duration=_DURATION, crashes_max=10,
    ),
    "lost entries": Faults(
        crash=0.005, coordinator_crash=0.03, storage=0.02, table_loss=0.15, delay="0ms..30ms", duration=_DURATION,
        crashes_max=4,
    ),
    "all": Faults(
        crash=0.005, coordinator_crash=0.01, storage=0.03, slow=0.03, slow_by="2s", duplicate=0.02, drop=0.002,
        delay="0ms..80ms", duration=_DURATION, crashes_max=4,
    ),
}  # fmt: skip
