"""Nodes from which nobody answers: when they are suspect, and how that ends."""

from __future__ import annotations

import pytest

from tidegate.actors.ray.lost_nodes import SuspectNodes
from tidegate.actors.ray.placement import node_elsewhere

TIMEOUT_MS, LIMIT_MS = 10_000, 60_000


def suspects() -> SuspectNodes:
    """Those of a job whose coordinator is on node here."""
    return SuspectNodes("here", TIMEOUT_MS, LIMIT_MS)


@pytest.mark.parametrize(
    ("others_ms", "suspect"),
    [([], True), ([9_000, 5_000], True), ([9_000, 4_999], False), ([0], False)],
)
def test_a_node_is_suspect_when_all_there_are_silent(others_ms: list[int], suspect: bool) -> None:
    """One that hangs among others that answer says nothing of its node."""
    nodes = suspects()
    assert nodes.is_silent("north", others_ms, 0) is suspect
    assert nodes.nodes == ({"north"} if suspect else frozenset())


def test_the_node_of_the_coordinator_is_never_suspect() -> None:
    """It hears itself."""
    assert not suspects().is_silent("here", [], 0)


def test_a_node_becomes_suspect_once_and_is_none_when_it_is_known() -> None:
    """And may become so again."""
    nodes = suspects()
    assert [nodes.is_silent("north", [], 0) for _ in range(2)] == [True, False]
    assert [nodes.clear_suspicion("north") for _ in range(2)] == [True, False]
    assert nodes.nodes == frozenset()
    assert nodes.is_silent("north", [], 0)


def test_a_suspicion_ends_by_itself() -> None:
    """Each after its own time."""
    nodes = suspects()
    nodes.is_silent("north", [], 0)
    nodes.is_silent("south", [], 1_000)
    assert nodes.pass_time(LIMIT_MS - 1) == []
    assert nodes.pass_time(LIMIT_MS) == ["north"]
    assert nodes.nodes == {"south"}


def test_a_process_starts_where_the_fewest_are_that_answer() -> None:
    """On no node that is to be avoided; on that of the coordinator where all others are."""
    busy = ["north", "south", "south", "east", "east", "east"]
    assert node_elsewhere({"north"}, busy, "here") == "south"
    assert node_elsewhere({"north", "south", "east"}, busy, "here") == "here"
