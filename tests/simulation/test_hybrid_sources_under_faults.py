"""A bounded source and then an unbounded one under faults: each row counts once, also when tasks die at the switch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from random_jobs.draw import draw
from random_jobs.scenarios import simulate_scenario

from tidegate.actors.coordinator.source_coordinator import UntakenSplits
from tidegate.actors.task.source_cursor import SourceCursor
from tidegate.testing import SimulationReport

_IN_ORDER = ("ordered", "late", "windows", "relations", "idle", "timers", "induced")
"""Pipelines with rows in an order that a source with two parts does not keep."""
_INSTEAD = ("union", "subtasks", "paced", "pipelines")


def simulated(seed: int) -> SimulationReport:
    """Runs two jobs of a seed, the second one from a checkpoint of the first, mostly at another parallelism."""
    drawn = draw(seed)
    values = {**drawn.values, "sources": "hybrid, finding" if seed % 2 else "hybrid"}
    if values["topology"] in _IN_ORDER:
        values["topology"] = _INSTEAD[seed % len(_INSTEAD)]
    return simulate_scenario(replace(drawn, values=values), shrink=False)


@pytest.mark.parametrize("seed", [*range(12), pytest.param(33, id="the source had finished, and was restored since")])
def test_two_jobs_count_every_row_once(seed: int) -> None:
    """Whatever crashes, and wherever the first job ends: before, at or after the switch."""
    report = simulated(seed)
    assert report.ok, f"{report}\n{report.sequence()}"


def _forgets(self: SourceCursor, second: Any) -> None:
    """Splits of the second part that the task had in its checkpoint are not read."""
    self._waiting = self._waiting[:1]
    _BEGIN_SECOND(self, second)


def _drops(self: UntakenSplits, task: Any, taken: Any, splits: Any) -> None:
    """A split of each share is lost on its way."""
    _GIVE_LATER(self, task, taken, splits)
    taken.given = taken.given[: -1 if len(splits) > 1 else None]


_BEGIN_SECOND = SourceCursor.begin_second
_GIVE_LATER = UntakenSplits.give_later


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        lambda: patch.object(SourceCursor, "begin_second", _forgets),
        lambda: patch.object(UntakenSplits, "give_later", _drops),
    ],
    ids=["splits are forgotten at the switch", "a split of a share is lost"],
)
def test_a_broken_switch_is_noticed(broken: Callable[[], AbstractContextManager[object]]) -> None:
    """By the rows, or by the oracle of splits, within a few seeds."""
    with broken():
        assert any(not simulated(seed).ok for seed in range(12))
