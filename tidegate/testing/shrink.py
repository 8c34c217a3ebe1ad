"""Shrinks a run that violates an invariant to the shortest one of the same seed that still does.

Whole kinds of faults are left out first, then faults after the first k, with k by bisection. A run with fewer faults is
another run (what follows the first left-out fault differs), so it is tried, and kept only if it violates an invariant
too. The number of runs is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from tidegate.testing.report import SimulationReport
from tidegate.testing.world.faults import FAULT_KINDS, Faults

RUNS_MAX = 40


def shortest(report: SimulationReport, faults: Faults, run: Callable[[Faults], SimulationReport]) -> SimulationReport:
    """The shortest violating run that was found with fewer faults; `run` repeats the seed with other ones."""
    best = report
    runs = report.runs

    def fails(tried: Faults) -> bool:
        nonlocal best, runs
        if runs >= RUNS_MAX:
            return False
        runs += 1
        found = run(tried)
        if found.violation is None:
            return False
        best = found
        return True

    for kind in FAULT_KINDS:
        if getattr(faults, kind) > 0 and fails(_without(faults, kind)):
            faults = best.faults
    low, high = 0, best.faults_happened
    while low < high:
        middle = (low + high) // 2
        if fails(replace(faults, faults_max=middle)):
            high = min(middle, best.faults_happened)
        else:
            low = middle + 1
    return replace(best, runs=runs)


def _without(faults: Faults, kind: str) -> Faults:
    """The same faults, but for one kind."""
    values = {field.name: getattr(faults, field.name) for field in fields(Faults)}
    return Faults(**{**values, kind: 0.0})
