"""Protocols with one rule broken on purpose. The oracle has to notice each break, or its silence means nothing.

Each break belongs to an invariant. Together they cover every invariant of the architecture, the barrier tables, and the
invariants of jobs and checkpoints. A break may show as another invariant: a lost batch is a wrong cut (3) or a missing
row (6), whichever is seen first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from broken_aggregates import AGGREGATE_FIXED, AGGREGATE_PATCHES
from broken_alignment import ALIGNMENT_FIXED, ALIGNMENT_PATCHES
from broken_causes import CAUSE_BREAKS, CAUSE_FIXED, CAUSE_PATCHES
from broken_changelog import CHANGELOG_FIXED, CHANGELOG_PATCHES
from broken_combining import COMBINING_FIXED, COMBINING_PATCHES
from broken_commits import COMMIT_FIXED, COMMIT_PATCHES
from broken_coordinator import COORDINATOR_BREAKS
from broken_copies import COPY_FIXED, COPY_PATCHES
from broken_failover import FAILOVER_FIXED, FAILOVER_PATCHES
from broken_fallback import FALLBACK_BREAKS, FALLBACK_FIXED
from broken_layers import LAYER_BREAKS, LAYER_FIXED, LAYER_PATCHES
from broken_nodes import NODE_FIXED, NODE_PATCHES
from broken_predicates import PREDICATE_FIXED, PREDICATE_PATCHES
from broken_relations import RELATION_FIXED, RELATION_PATCHES
from broken_requests import REQUEST_FIXED, REQUEST_PATCHES
from broken_restarts import RESTART_FIXED, RESTART_PATCHES
from broken_rules import RULE_BREAKS, RULE_FIXED, Patch
from broken_sides import SIDE_FIXED, SIDE_PATCHES
from broken_sketches import SKETCH_FIXED, SKETCH_PATCHES
from broken_slots import SLOT_FIXED, SLOT_PATCHES
from broken_sources import SOURCE_FIXED, SOURCE_PATCHES
from broken_splits import SPLIT_FIXED, SPLIT_PATCHES
from broken_tables import TABLE_FIXED, TABLE_PATCHES
from broken_takeovers import TAKEOVER_FIXED, TAKEOVER_PATCHES
from broken_tasks import TASK_BREAKS
from broken_time import TIME_FIXED, TIME_PATCHES
from broken_undo import UNDO_FIXED, UNDO_PATCHES
from broken_windows import WINDOW_FIXED, WINDOW_PATCHES
from random_jobs.draw import draw
from random_jobs.scenarios import simulate_scenario

from tidegate.testing import Protocol, SimulationReport


@dataclass(frozen=True, slots=True)
class Break:
    """One broken rule: other parts, or a patch while a seed runs."""

    invariant: int
    protocol: Protocol | None = None
    patch: Patch = nullcontext
    fixed: Mapping[str, Hashable] = field(default_factory=dict)
    """Values of the scenario, and `rows`, that are fixed instead of drawn."""

    def simulate(self, seed: int, *, shrink: bool = False) -> SimulationReport:
        """Run a seed with the rule broken."""
        scenario = draw(seed)
        rows = self.fixed.get("rows", scenario.rows)
        assert isinstance(rows, int)
        # Copies and combined rows were added when seeds had been found: they show what they showed.
        drawn = {**scenario.values, "copies": "none", "combined": "never"}
        values = {name: self.fixed.get(name, value) for name, value in drawn.items()}
        with self.patch():
            return simulate_scenario(replace(scenario, values=values, rows=rows), protocol=self.protocol, shrink=shrink)


_UNALIGNED = {"mode": "exactly-once", "alignment": "unaligned", "max_concurrent": 1}
_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "credit: what was lost is never asked for": _UNALIGNED | {"faults": "network", "buffers": "tiny", "rows": 60},
    "the folder of a failed savepoint stays": {"faults": "storage", "ask": "savepoint"},
    **LAYER_FIXED,
    **CHANGELOG_FIXED,
    **FAILOVER_FIXED,
    **FALLBACK_FIXED,
    **TABLE_FIXED,
    **RULE_FIXED,
    **PREDICATE_FIXED,
    **REQUEST_FIXED,
    **RESTART_FIXED,
    **TAKEOVER_FIXED,
    **CAUSE_FIXED,
    **UNDO_FIXED,
    **SOURCE_FIXED,
    **SIDE_FIXED,
    **SKETCH_FIXED,
    **TIME_FIXED,
    **WINDOW_FIXED,
    **AGGREGATE_FIXED,
    **RELATION_FIXED,
    **SPLIT_FIXED,
    **NODE_FIXED,
    **COPY_FIXED,
    **COMBINING_FIXED,
    **ALIGNMENT_FIXED,
    **SLOT_FIXED,
    **COMMIT_FIXED,
}
"""Fixed values of breaks that need several unlikely events at once. With drawn values they would need hundreds of
seeds.

Examples are a lost last grant of a channel and rows that wait for it, a savepoint that has written something and fails
in every attempt, and a restored checkpoint of a changelog that has rolled over.
"""

BROKEN: dict[str, Break] = {
    **{
        rule: Break(invariant, protocol, fixed=_FIXED.get(rule, {}))
        for rule, (invariant, protocol) in (
            TASK_BREAKS | COORDINATOR_BREAKS | LAYER_BREAKS | FALLBACK_BREAKS | CAUSE_BREAKS
        ).items()
    },
    **{
        rule: Break(invariant, patch=patch, fixed=_FIXED.get(rule, {}))
        for rule, (invariant, patch) in (
            RULE_BREAKS
            | LAYER_PATCHES
            | CHANGELOG_PATCHES
            | FAILOVER_PATCHES
            | TABLE_PATCHES
            | PREDICATE_PATCHES
            | CAUSE_PATCHES
            | REQUEST_PATCHES
            | RESTART_PATCHES
            | TAKEOVER_PATCHES
            | UNDO_PATCHES
            | SOURCE_PATCHES
            | SIDE_PATCHES
            | SKETCH_PATCHES
            | TIME_PATCHES
            | WINDOW_PATCHES
            | AGGREGATE_PATCHES
            | RELATION_PATCHES
            | SPLIT_PATCHES
            | NODE_PATCHES
            | COPY_PATCHES
            | COMBINING_PATCHES
            | ALIGNMENT_PATCHES
            | SLOT_PATCHES
            | COMMIT_PATCHES
        ).items()
    },
}
"""Every break, by the rule."""

FAST = (
    "an element passes a blocked channel",
    "gaps are ignored",
    "acknowledged before the file is durable",
    "positions are not restored",
    "sinks commit on acknowledgement",
    "what is decided is done before it is logged",
    "complete without the last task",
    "state of the newest checkpoint is deleted",
    "layers: what the newest does not need goes",
    "changelog: a task deletes what a checkpoint has",
    "tables: a commit hides those before it",
    "restarts: back-off does not grow",
    "causes: the event before the right one is named",
    "takeover: tasks that run start anew",
    "takeover: who seems to hang is ended at once",
    "undo: nothing is undone",
    "combining: a row counts once too much",
    "combining: rows of several slices become one",
    "time: watermarks in flight are not in the checkpoint",
    "slots: the queue of a dead process comes to the next one",
    "slots: a frame with a barrier goes ahead of the queue",
    "slots: a barrier overtakes rows on the queue",
    "slots: one subtask acknowledges for its slot",
    "slots: a message has the first report alone",
    "commits: rows are committed before their checkpoint is complete",
    "commits: the token is ignored",
)
"""Breaks that show within very few seeds: the tests try these, the benchmark `mutations.py` all."""

_SHOWN_BY: Mapping[str, int] = {
    "gaps are ignored": 26,
    "positions are not restored": 296,
    "an element passes a blocked channel": 272,
    "slots: the queue of a dead process comes to the next one": 283,
    "combining: a row counts once too much": 465,
    "tables: a compaction stands for what a checkpoint covers in part": 29,
    "tables: a fallback takes nothing back": 114,
    "damage: the tables are not taken back": 114,
    "time: watermarks in flight are not in the checkpoint": 9,
    "undo: nothing is undone": 6,
}
"""A seed whose run is short and shows the break, for breaks that earlier seeds do not show soon.

When the code changes, a seed has another run. So the other seeds of a test are tried if this one shows nothing.
"""


def seeds_until_caught(rule: str, seeds: Iterable[int]) -> list[int]:
    """Returns the seeds for a test of a break, with the seed first that is known to show it."""
    known = [_SHOWN_BY[rule]] if rule in _SHOWN_BY else []
    return [*known, *(seed for seed in seeds if seed not in known)]
