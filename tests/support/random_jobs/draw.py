"""Draws the scenario that a seed stands for: one value of each dimension, with the faults.

Each dimension is drawn on its own, except where two values contradict each other (`CONTRADICTIONS`). `draw` is a
function of the seed, so a report only needs to name the seed. A dimension or value that is added later is drawn by a
generator of its own, so that most seeds keep their scenario.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from random_jobs.topologies import TOPOLOGIES
from random_jobs.window_topologies import PROGRAMS, SESSIONS
from tidegate.testing.world.faults import Faults

DIMENSIONS: Mapping[str, tuple[Hashable, ...]] = {
    "topology": tuple(TOPOLOGIES),
    "mode": ("exactly-once", "at-least-once"),
    "alignment": ("aligned", "unaligned", "timeout"),
    "max_concurrent": (1, 2, 3),
    "interval_ms": (60, 250, 1_000),
    "min_pause_ms": (0, 100),
    "timeout_ms": (10_000, 20_000),
    "retained": (1, 3),
    "tolerable": (0, 3),
    "retention": ("no_externalized_checkpoints", "delete_on_cancellation", "retain_on_cancellation"),
    "buffers": ("tiny", "small", "wide"),
    "turn_rows": (1, 3, 1_000),
    "width": ("one", "few", "many"),
    "faults": ("none", "tasks", "coordinator", "storage", "network", "all", "damage", "outage"),
    "ask": ("nothing", "checkpoint", "savepoint"),
    "ending": ("finish", "cancel", "fail", "suspend", "terminate"),
    "then": ("same", "rescaled"),
    "hooks": ("none", "one"),
    "state": ("whole", "incremental", "changelog"),
    "log": ("long", "short"),
    "restart": ("fixed-delay", "exponential-delay", "failure-rate"),
    "savepoints": ("canonical", "native"),
    "takeover": ("adopt", "restart"),
    "survivors": ("keep", "keep a little", "read"),
    "sources": ("at once", "trickling", "finding"),
    "splits": ("assigned", "many", "dealt out"),
    "copies": ("none", "node"),
    "combined": ("never", "always", "at first", "then"),
    "slots": ("shared", "halves", "apart"),
}
"""Every dimension with its values."""

_DRAWN_APART = frozenset(
    {
        "state",
        "log",
        "restart",
        "savepoints",
        "takeover",
        "survivors",
        "sources",
        "splits",
        "copies",
        "combined",
        "slots",
    }
)
"""Dimensions that were added later, drawn by a generator of their own, so that seeds keep their other values."""

_ADDED: Mapping[str, tuple[Hashable, ...]] = {
    "topology": ("rules", "kept"),
    "state": ("changelog",),
    "faults": ("damage", "outage"),
    "sources": ("finding",),
}
"""Values that were added later. `_ADDED_SHARE` of the seeds have one of them, and all other seeds keep their value."""
_ADDED_SHARE = 0.2

_ORDERED = "ordered"
_ORDERED_SHARE = 0.09
"""Part of the seeds with the pipeline that checks the order of its rows. Each such part was added later."""
_APART = ("pipelines", "subtasks")
_APART_SHARE = 0.12
"""Part of the seeds with pipelines of several regions."""
_AS_DRAWN = 0.5
"""Part of the seeds with a special pipeline in which all other values stay as drawn."""
_LATE_ROWS = "late"
_OF_TIME = ("aside", _LATE_ROWS)
_OF_TIME_SHARE = 0.1
"""Part of the seeds with pipelines of side outputs and of event time."""
_CHANGING = ("changes", "ranks", "matches")
"""Pipelines with streams of changes, which run exactly once. They are drawn apart as well."""
_CHANGING_SHARE = 0.12
_WINDOWS = "windows"
_WINDOWS_SHARE = 0.08
"""Part of the seeds with the pipeline of windows."""
_TEXTS = "texts"
_TEXTS_SHARE = 0.06
"""Part of the seeds with the pipeline of aggregates whose values have any width."""
_PACED = "paced"
_PACED_SHARE = 0.06
"""Part of the seeds with the pipeline whose sources wait for each other."""
_RELATIONS = "relations"
_RELATIONS_SHARE = 0.1
"""Part of the seeds with the pipeline of joins, changes, rankings, times to live and async calls."""
_IDLE = "idle"
_OF_ALL_TIMES = (_WINDOWS, _RELATIONS, _IDLE)
_OF_ALL_TIMES_SHARE = 0.2
"""Part of the remaining seeds with windows, relations or idle splits."""
_ONCE = (_LATE_ROWS, _WINDOWS, _TEXTS, _RELATIONS, _IDLE)
"""Pipelines that are drawn apart and run exactly once."""
_SESSIONS_SHARE = 0.12
"""Part of the remaining seeds with sessions that tasks lose and restore."""
_RARE: tuple[Mapping[str, Hashable], ...] = (
    {"ask": "a burst"},
    {"ask": "many savepoints"},
    {"ask": "many savepoints", "faults": "copies"},
    {"faults": "echoes"},
)
_RARE_SHARE = 0.03
"""Part of the seeds in which users request more than a coordinator accepts, copies take long, or most messages arrive
twice.
"""

_LINKS = ("links", "impatience")
_LINKS_SHARE = 0.05
"""Part of the seeds in which processes hang, and coordinators that are cut off take all processes for hung.

They have successors by then or, with `impatience`, not yet.
"""

_LATE: Mapping[str, Hashable] = {"faults": "late copies", "ask": "many savepoints"}
_LATE_SHARE = 0.03
"""Part of the seeds in which replaced coordinators still copy savepoints."""

_NODES_SHARE = 0.05
"""Part of the seeds in which nodes are lost or cut off."""

_RESTORES_SHARE = 0.05
"""Part of the seeds in which processes die while they restore their state."""

_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "mode": (4, 1),
    "max_concurrent": (3, 1, 1),
    "interval_ms": (1, 2, 2),
    "width": (2, 3, 1),
    "ending": (4, 1, 1, 1, 1),
    "log": (3, 1),
    "takeover": (3, 1),
    "survivors": (4, 1, 1),
    "sources": (4, 1),
    "copies": (7, 1),
    "combined": (3, 1, 1, 1),
    "slots": (6, 1, 1),
}

CONTRADICTIONS: tuple[tuple[tuple[str, Hashable], tuple[str, Hashable]], ...] = (
    (("mode", "at-least-once"), ("alignment", "unaligned")),
    (("mode", "at-least-once"), ("alignment", "timeout")),
    (("alignment", "unaligned"), ("max_concurrent", 2)),
    (("alignment", "unaligned"), ("max_concurrent", 3)),
    (("alignment", "timeout"), ("max_concurrent", 2)),
    (("alignment", "timeout"), ("max_concurrent", 3)),
    (("max_concurrent", 2), ("min_pause_ms", 100)),
    (("max_concurrent", 3), ("min_pause_ms", 100)),
    (("topology", "broadcast"), ("then", "rescaled")),
    *((("topology", name), ("mode", "at-least-once")) for name in (*_CHANGING, *_ONCE)),
    *((("topology", name), ("sources", "finding")) for name in (_LATE_ROWS, _WINDOWS, _RELATIONS, _IDLE)),
)
"""Values that are never drawn together. The later dimension gives way.

They are values that a submission refuses, rows that would depend on the parallelism, and changes of rows that were
processed twice.
"""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One drawn combination of values, with further numbers that do not count as dimensions."""

    seed: int
    values: Mapping[str, Hashable]
    rows: int
    widths: tuple[int, ...]
    then_widths: tuple[int, ...]
    ask_at_ms: int
    end_at_ms: int
    aligned_timeout_ms: int

    def __str__(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{shown} widths={','.join(map(str, self.widths))} rows={self.rows}"


def draw(seed: int) -> Scenario:
    """Draws the scenario of a seed."""
    chance = random.Random(f"scenario {seed}")
    values: dict[str, Hashable] = {}
    for name, choices in DIMENSIONS.items():
        apart_ones = (_ORDERED, *_APART, *_OF_TIME, *_CHANGING, _WINDOWS, _TEXTS, _PACED, _RELATIONS, _IDLE)
        added = (*_ADDED.get(name, ()), *apart_ones)
        choices = tuple(choice for choice in choices if choice not in added)
        allowed = [c for c in choices if not any((before, (name, c)) in CONTRADICTIONS for before in values.items())]
        weights = [dict(zip(choices, _WEIGHTS.get(name, (1,) * len(choices)), strict=True))[c] for c in allowed]
        own = random.Random(f"{name} {seed}") if name in _DRAWN_APART else chance
        values[name] = own.choices(allowed, weights)[0]
        apart = random.Random(f"added {name} {seed}")
        if name in _ADDED and apart.random() < _ADDED_SHARE:
            values[name] = apart.choice(_ADDED[name])
    widths = _widths(chance, values["width"])
    then_widths = _widths(chance, chance.choice(DIMENSIONS["width"])) if values["then"] == "rescaled" else widths
    scenario = Scenario(
        seed=seed,
        values=values,
        rows=chance.randrange(8, 60),
        widths=widths,
        then_widths=then_widths,
        ask_at_ms=chance.randrange(100, 1_500),
        end_at_ms=chance.randrange(200, 2_000),
        aligned_timeout_ms=chance.choice((10, 50, 200)),
    )
    if values["state"] != "whole":
        scenario = _with_layers(scenario)
    later = random.Random(f"ordered {seed}")
    if later.random() < _ORDERED_SHARE:
        return _ordered(later, scenario)
    later = random.Random(f"apart {seed}")
    if later.random() < _APART_SHARE:
        return _apart(later, scenario)
    later = random.Random(f"rare {seed}")
    if later.random() < _RARE_SHARE:
        return replace(scenario, values={**scenario.values, **later.choice(_RARE)})
    later = random.Random(f"links {seed}")
    if later.random() < _LINKS_SHARE:
        return replace(scenario, values={**scenario.values, "faults": later.choice(_LINKS)})
    later = random.Random(f"late copies {seed}")
    if later.random() < _LATE_SHARE:
        return replace(scenario, values={**scenario.values, **_LATE})
    later = random.Random(f"nodes {seed}")
    if later.random() < _NODES_SHARE:
        return replace(scenario, values={**scenario.values, "faults": "nodes"})
    later = random.Random(f"of time {seed}")
    if later.random() < _OF_TIME_SHARE:
        topology = later.choice(_OF_TIME)
        if topology == _LATE_ROWS:
            return _of_programs(later, scenario, topology)
        return replace(scenario, values={**scenario.values, "topology": topology})
    later = random.Random(f"keys come {seed}")
    if later.random() < _CHANGING_SHARE:
        return replace(
            scenario, values={**scenario.values, "topology": later.choice(_CHANGING), "mode": "exactly-once"}
        )
    later = random.Random(f"restores {seed}")
    if later.random() < _RESTORES_SHARE:
        return replace(scenario, values={**scenario.values, "faults": "restores"})
    later = random.Random(f"windows {seed}")
    if later.random() < _WINDOWS_SHARE:
        return _of_programs(later, scenario, _WINDOWS)
    later = random.Random(f"texts {seed}")
    if later.random() < _TEXTS_SHARE:
        return replace(scenario, values={**scenario.values, "topology": _TEXTS, "mode": "exactly-once"})
    later = random.Random(f"paced {seed}")
    if later.random() < _PACED_SHARE:
        return replace(scenario, values={**scenario.values, "topology": _PACED})
    later = random.Random(f"related {seed}")
    if later.random() < _RELATIONS_SHARE:
        return _of_programs(later, scenario, _RELATIONS)
    later = random.Random(f"of all times {seed}")
    if later.random() < _OF_ALL_TIMES_SHARE:
        return _of_programs(later, scenario, later.choice(_OF_ALL_TIMES))
    later = random.Random(f"sessions {seed}")
    if later.random() < _SESSIONS_SHARE:
        return _of_sessions(later, scenario)
    return scenario


def _with_layers(scenario: Scenario) -> Scenario:
    """Makes half of the scenarios with layers take many checkpoints, so that layers pile up before a restore."""
    chance = random.Random(f"layers {scenario.seed}")
    if chance.random() < 0.5:
        return scenario
    values = {**scenario.values, "interval_ms": 60, "min_pause_ms": 0}
    return replace(scenario, values=values, rows=chance.randrange(60, 150))


def _ordered(chance: random.Random, scenario: Scenario) -> Scenario:
    """Returns the scenario with the pipeline that checks the order of its rows.

    Half of these continue at another parallelism, with more rows, from a checkpoint that is likely to hold rows in
    flight. Hardly one in a hundred other scenarios does.
    """
    values = {**scenario.values, "topology": _ORDERED}
    if chance.random() < _AS_DRAWN:
        return replace(scenario, values=values)
    values |= {
        "mode": "exactly-once",
        "alignment": chance.choice(("unaligned", "timeout")),
        "max_concurrent": 1,
        "interval_ms": chance.choice((60, 250)),
        "retention": "retain_on_cancellation",
        "width": "few",
        "ending": "cancel",
        "then": "rescaled",
    }
    few = _widths(chance, "few")
    more = tuple(width + chance.choice((1, 2)) for width in few)
    widths, then_widths = chance.choice(((few, more), (few, more), (more, few)))
    return replace(scenario, values=values, rows=chance.randrange(30, 80), widths=widths, then_widths=then_widths)


def _apart(chance: random.Random, scenario: Scenario) -> Scenario:
    """Returns the scenario with a pipeline of several regions.

    Half of these only lose tasks and have no hooks, because an event that concerns the whole job would hide what a
    single region does.
    """
    values = {**scenario.values, "topology": chance.choice(_APART)}
    if chance.random() < _AS_DRAWN:
        return replace(scenario, values=values)
    values |= {"faults": "tasks", "hooks": "none", "interval_ms": chance.choice((60, 250)), "ending": "finish"}
    return replace(scenario, values=values, rows=chance.randrange(30, 80))


def _of_programs(chance: random.Random, scenario: Scenario, topology: str) -> Scenario:
    """Returns the scenario with a pipeline whose program the number of rows selects.

    Half of these have more rows, and so more rows in flight.
    """
    values = {**scenario.values, "topology": topology, "mode": "exactly-once"}
    if values["sources"] == "finding":
        values["sources"] = "trickling"
    if chance.random() < _AS_DRAWN:
        return replace(scenario, values=values)
    return replace(scenario, values={**values, "interval_ms": 60}, rows=chance.randrange(60, 110))


def _of_sessions(chance: random.Random, scenario: Scenario) -> Scenario:
    """Returns the scenario with sessions, frequent checkpoints, and tasks that are lost while sessions are open."""
    values = {**scenario.values, "topology": _WINDOWS, "mode": "exactly-once", "interval_ms": 60, "faults": "tasks"}
    if values["sources"] == "finding":
        values["sources"] = "trickling"
    rows = len(PROGRAMS) * chance.randrange(3, 6) + chance.choice(SESSIONS)
    return replace(scenario, values=values, rows=rows)


def _widths(chance: random.Random, width: Hashable) -> tuple[int, ...]:
    """Draws the parallelisms of four operators.

    If one operator has many subtasks, the other three have few, so that a run stays short.
    """
    if width == "one":
        return (1, 1, 1, 1)
    widths = [chance.choice((1, 2, 2, 3)) for _ in range(4)]
    if width == "many":
        widths = [min(w, 2) for w in widths]
        widths[chance.randrange(4)] = chance.randrange(4, 9)
    return tuple(widths)


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
