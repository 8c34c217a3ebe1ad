"""Nodes that are lost with all that is on them, and nodes that are cut off and come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broken import BROKEN, Break
from pipelines import keyed

import tidegate as tg
from tidegate.testing import Faults, SimulationReport, simulate

TWO_REGIONS_FAIL = 1
ONE_FAILS_WHILE_ANOTHER_IS_DEPLOYED = 5


def rows_survive(faults: Faults, seed: int = 1) -> SimulationReport:
    """A keyed job with these faults writes the rows that it must."""
    report = simulate(keyed, seed=seed, faults=faults)
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])
    return report


def test_a_node_takes_all_its_processes_along() -> None:
    """Their tasks start on other nodes, from the newest checkpoint."""
    report = rows_survive(Faults(node_loss=0.05, duration="3s"))
    assert report.coverage["node_lost"]
    assert not report.coverage["node_cut_off"]


@pytest.mark.parametrize("cut_for", ["20ms..100ms", "2s..3s"])
def test_a_node_that_is_cut_off_comes_back(cut_for: str) -> None:
    """Before anybody notices, or after its processes were taken for hung. What was held comes in order then."""
    report = rows_survive(Faults(cut=0.05, cut_for=cut_for, heartbeats="700ms", duration="5s"))
    assert report.coverage["node_cut_off"]


def test_a_cut_that_is_short_costs_no_restart() -> None:
    """Messages in flight arrive late. In this seed no cut ends with the loss of the node."""
    report = rows_survive(Faults(cut=0.05, cut_for="20ms..100ms", heartbeats="700ms", duration="5s"), seed=7)
    assert (report.coverage["node_lost"], report.restarts) == (0, 0)


@pytest.mark.parametrize(
    ("rule", "seed"),
    [
        ("nodes: what fails beside a restart is forgotten", TWO_REGIONS_FAIL),
        ("nodes: what fails beside a deployment is forgotten", ONE_FAILS_WHILE_ANOTHER_IS_DEPLOYED),
    ],
)
def test_regions_that_fail_together_all_start_again(rule: str, seed: int) -> None:
    """A node has tasks of several regions. A coordinator that forgets one of them is noticed."""
    assert BROKEN[rule].simulate(seed).violation is not None
    report = Break(7, fixed=BROKEN[rule].fixed).simulate(seed)
    assert report.ok, report


@pytest.mark.parametrize(
    "wrong", [lambda: Faults(cut=0.1, cut_for="3s..1s"), lambda: Faults(cut_for="often"), lambda: Faults(node_loss=2.0)]
)
def test_faults_of_nodes_are_checked(wrong: Callable[[], Faults]) -> None:
    """When they are made."""
    with pytest.raises(tg.ConfigurationError):
        wrong()
