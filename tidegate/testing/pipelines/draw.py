"""Draws what a seed stands for in a random simulation: one value of every dimension.

A dimension is drawn on its own, except where two values contradict each other (`CONTRADICTIONS`). `draw` is a function
of the seed, so that a report need only name the seed. What is added later is drawn apart, so that most seeds stay what
they were.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from tidegate.testing.pipelines.topologies import TOPOLOGIES
from tidegate.testing.pipelines.window_topologies import PROGRAMS, SESSIONS

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
"""Dimensions that were added when seeds had been run: what a seed stands for besides stays what it was."""

_ADDED: Mapping[str, tuple[Hashable, ...]] = {
    "topology": ("rules", "kept"),
    "state": ("changelog",),
    "faults": ("damage", "outage"),
    "sources": ("finding",),
}
"""Values that were added when seeds had been run: so many seeds stand for one of them, the others for what they did."""
_ADDED_SHARE = 0.2

_ORDERED = "ordered"
_ORDERED_SHARE = 0.09
"""Seeds that stand for the pipeline that sees the order of its rows, which was added later too."""
_APART = ("pipelines", "subtasks")
_APART_SHARE = 0.12
"""Seeds that stand for pipelines of several regions, which were added later too."""
_AS_DRAWN = 0.5
"""Part of the latter in which everything else stays as it was drawn."""
_LATE_ROWS = "late"
_OF_TIME = ("aside", _LATE_ROWS)
_OF_TIME_SHARE = 0.1
"""Seeds that stand for pipelines of side outputs and of event time, which were added later too."""
_CHANGING = ("changes", "ranks", "matches")
"""Pipelines with streams of changes, which run exactly once; drawn apart as well."""
_CHANGING_SHARE = 0.12
_WINDOWS = "windows"
_WINDOWS_SHARE = 0.08
"""Seeds that stand for the pipeline of windows, which was added later too."""
_TEXTS = "texts"
_TEXTS_SHARE = 0.06
"""Seeds that stand for the pipeline of aggregates with values of any width, which was added later too."""
_PACED = "paced"
_PACED_SHARE = 0.06
"""Seeds that stand for the pipeline whose sources wait for each other, which was added later too."""
_RELATIONS = "relations"
_RELATIONS_SHARE = 0.1
"""Seeds that stand for the pipeline of joins, changes, rankings, times to live and calls, which was added later too."""
_IDLE = "idle"
_OF_ALL_TIMES = (_WINDOWS, _RELATIONS, _IDLE)
_OF_ALL_TIMES_SHARE = 0.2
"""Of the seeds that none of these stands for, so many do stand for windows and relations as well, and for splits that
are idle, which were added later."""
_ONCE = (_LATE_ROWS, _WINDOWS, _TEXTS, _RELATIONS, _IDLE)
"""Of pipelines that are drawn apart, those that run exactly once as well."""
_SESSIONS_SHARE = 0.12
"""Of the seeds that none of these stands for, so many stand for sessions that tasks lose and get back, which were added
later too."""
_RARE: tuple[Mapping[str, Hashable], ...] = (
    {"ask": "a burst"},
    {"ask": "many savepoints"},
    {"ask": "many savepoints", "faults": "copies"},
    {"faults": "echoes"},
)
_RARE_SHARE = 0.03
"""Seeds in which users ask for more than a coordinator takes, copies of savepoints take long, or most messages come
twice, which were added later too."""

_LINKS = ("links", "impatience")
_LINKS_SHARE = 0.05
"""Seeds in which processes hang, and coordinators that are cut off take all for hung, which were added later too: when
they have successors, or (`impatience`) before that.
"""

_LATE: Mapping[str, Hashable] = {"faults": "late copies", "ask": "many savepoints"}
_LATE_SHARE = 0.03
"""Seeds in which coordinators that were replaced still copy savepoints, which were added later too."""

_NODES_SHARE = 0.05
"""Seeds in which nodes are lost, or cut off, which were added later too."""

_RESTORES_SHARE = 0.05
"""Seeds in which processes die while they restore their state, which were added later too."""

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
"""Values that are never drawn together, the later dimension gives way: what a submission refuses, rows that would
depend on the parallelism, and changes of rows that were processed twice."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One drawn combination, with the numbers that do not matter for what is covered."""

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
    """The scenario of a seed."""
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
    """Half of the scenarios with layers take many checkpoints, so that layers pile up before something is restored."""
    chance = random.Random(f"layers {scenario.seed}")
    if chance.random() < 0.5:
        return scenario
    values = {**scenario.values, "interval_ms": 60, "min_pause_ms": 0}
    return replace(scenario, values=values, rows=chance.randrange(60, 150))


def _ordered(chance: random.Random, scenario: Scenario) -> Scenario:
    """The same with the pipeline that sees the order of its rows.

    Half of these go on at another parallelism, from a checkpoint that is likely to hold rows in flight, and with more
    rows: of what is drawn otherwise hardly one scenario in some hundred does.
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
    """The same with a pipeline of several regions. Half of these lose tasks and nothing else, and without hooks:
    whatever concerns the whole job would hide what a single region does.
    """
    values = {**scenario.values, "topology": chance.choice(_APART)}
    if chance.random() < _AS_DRAWN:
        return replace(scenario, values=values)
    values |= {"faults": "tasks", "hooks": "none", "interval_ms": chance.choice((60, 250)), "ending": "finish"}
    return replace(scenario, values=values, rows=chance.randrange(30, 80))


def _of_programs(chance: random.Random, scenario: Scenario, topology: str) -> Scenario:
    """The same with a pipeline whose program the rows choose. Half of these have more rows, and so more on the way."""
    values = {**scenario.values, "topology": topology, "mode": "exactly-once"}
    if values["sources"] == "finding":
        values["sources"] = "trickling"
    if chance.random() < _AS_DRAWN:
        return replace(scenario, values=values)
    return replace(scenario, values={**values, "interval_ms": 60}, rows=chance.randrange(60, 110))


def _of_sessions(chance: random.Random, scenario: Scenario) -> Scenario:
    """The same with sessions, checkpoints one after the other, and tasks that are lost while sessions are open."""
    values = {**scenario.values, "topology": _WINDOWS, "mode": "exactly-once", "interval_ms": 60, "faults": "tasks"}
    if values["sources"] == "finding":
        values["sources"] = "trickling"
    rows = len(PROGRAMS) * chance.randrange(3, 6) + chance.choice(SESSIONS)
    return replace(scenario, values=values, rows=rows)


def _widths(chance: random.Random, width: Hashable) -> tuple[int, ...]:
    """Parallelisms of four operators. Where one has many subtasks the others have few, so that a run stays short."""
    if width == "one":
        return (1, 1, 1, 1)
    widths = [chance.choice((1, 2, 2, 3)) for _ in range(4)]
    if width == "many":
        widths = [min(w, 2) for w in widths]
        widths[chance.randrange(4)] = chance.randrange(4, 9)
    return tuple(widths)
