"""A coordinator that is cut off takes all tasks for hung: what it causes meanwhile, and what it must not cause."""

from __future__ import annotations

import pytest
from broken import BROKEN, Break
from broken_takeovers import CUT_OFF

from tidegate.testing import SimulationReport

ENDED_WHAT_WAS_ADOPTED = 1
"""The seed in which a process was ended that obeyed the successor, before kills had to wait for the log."""
A_PROCESS_HANGS = 4


def run(seed: int) -> SimulationReport:
    """Coordinators are cut off, and processes hang."""
    return Break(8, fixed=CUT_OFF).simulate(seed)


@pytest.mark.parametrize("seed", [ENDED_WHAT_WAS_ADOPTED, 5])
def test_tasks_that_a_successor_has_adopted_go_on(seed: int) -> None:
    """A replaced coordinator does not end tasks, because it cannot log that it gave them up."""
    report = run(seed)
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])
    assert report.coverage["all_taken_for_hung"]


@pytest.mark.parametrize(
    "rule", ["takeover: who seems to hang is ended at once", "takeover: who was replaced ends its tasks"]
)
def test_what_a_replaced_coordinator_ends_is_seen(rule: str) -> None:
    """Once a coordinator killed processes that it took for hung at once, and all tasks when it was replaced."""
    report = BROKEN[rule].simulate(ENDED_WHAT_WAS_ADOPTED)
    assert "ends the process" in str(report.violation)


def test_a_process_that_hangs_is_ended_and_its_task_goes_on() -> None:
    """In another process: it gets no task any more."""
    report = run(A_PROCESS_HANGS)
    assert report.ok, report
    assert report.coverage["process_killed"]


def test_who_was_given_up_gets_no_task_of_a_successor() -> None:
    """Kills of a replaced coordinator may arrive late. In this seed they ended tasks that the successor had started."""
    rule = "takeover: who was given up gets a task again"
    assert BROKEN[rule].simulate(0).violation is not None
    report = Break(8, fixed=BROKEN[rule].fixed).simulate(0)
    assert report.ok, report
