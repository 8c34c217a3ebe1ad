"""How many spare processes a job keeps, and where: by the room that there is, and never all on one node."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.drivers.job_context import Standbys
from tidegate.actors.ray.placement import (
    AUTO_MAX,
    Place,
    best_follower,
    next_bundle,
    standby_delay_ms,
    standbys_kept,
)


@pytest.mark.parametrize(
    ("free_slots", "tasks", "kept"),
    [(0, 4, 1), (1, 4, 1), (2, 4, 2), (9, 3, 3), (9, 1, 1), (100, 100, AUTO_MAX)],
)
def test_auto_is_one_for_each_free_slot(free_slots: int, tasks: int, kept: int) -> None:
    """One at least, no more than tasks, no more than a few."""
    assert standbys_kept("auto", free_slots, tasks) == kept


@pytest.mark.parametrize("wanted", [0, 1, 7])
def test_a_number_holds_whatever_room_there_is(wanted: int) -> None:
    """Whoever names it knows why."""
    assert standbys_kept(wanted, 0, 2) == wanted


@pytest.mark.parametrize("wanted", [1, "warm"])
def test_what_nobody_has_asked_for_begins_later(wanted: Standbys) -> None:
    """A short job does not pay for it."""
    assert standby_delay_ms("auto") > 2 * standby_delay_ms(wanted)


def test_a_task_that_is_followed_has_a_process_to_itself() -> None:
    """Beside those that any task may get. A number holds, whatever it is to be enough for."""
    assert standbys_kept("warm", 2, 4, followed=2) == 4
    assert standbys_kept("warm", 0, 2, followed=2) == 3
    assert standbys_kept("warm", 0, 2, followed=0) == 1
    assert standbys_kept(1, 5, 4, followed=2) == 1


@pytest.mark.parametrize(
    ("standbys", "best"),
    [
        ([(0, "north"), (1, "south")], 1),
        ([(1, "south"), (0, "north"), (2, "west")], 0),
        ([(0, "north"), (1, "north")], 1),
        ([(0, "north"), (0, "north")], 0),
    ],
)
def test_a_task_is_followed_elsewhere(standbys: list[tuple[int, str]], best: int) -> None:
    """On another node, or at least in another bundle; the first where there are several."""
    assert best_follower(Place(0, "north"), [Place(*one) for one in standbys]) == best
    assert best_follower(None, [Place(*one) for one in standbys]) == 0


def spread(nodes: dict[int, str], tasks: list[int], standbys: int, started: bool) -> list[int]:
    """Bundles of so many spare processes, one after the other; `started`: their nodes are known by the next one."""
    working = [Place(bundle, nodes[bundle]) for bundle in tasks]
    waiting: list[Place] = []
    for _ in range(standbys):
        bundle = next_bundle(list(nodes), working, waiting)
        waiting.append(Place(bundle, nodes[bundle] if started else None))
    return [place.bundle for place in waiting]


def test_spare_processes_begin_beside_tasks_on_each_node() -> None:
    """In place of these they go on with the local copies there."""
    nodes = {0: "north", 1: "north", 2: "south"}
    for started in (False, True):
        assert spread(nodes, [1, 2], 2, started) == [1, 2]


def test_of_two_bundles_of_a_node_the_empty_one_is_next() -> None:
    """Its node is as full as the other one."""
    assert spread({0: "north", 1: "north"}, [0], 3, started=True) == [0, 1, 0]


def test_a_bundle_that_nobody_has_started_in_is_a_node_of_its_own() -> None:
    """Only Ray knows where it is."""
    assert next_bundle([0, 1], [], [Place(0, "north")]) == 1
    assert next_bundle([0, 1, 2], [Place(1, "north"), Place(2, "north")], [Place(1, "north")]) == 0


@given(
    st.dictionaries(st.integers(0, 9), st.sampled_from("abcd"), min_size=1),
    st.integers(0, 12),
)
def test_no_node_has_two_more_than_another(nodes: dict[int, str], standbys: int) -> None:
    """Where tasks have shown which bundle is on which node; and so with the bundles of a node."""
    chosen = spread(nodes, list(nodes), standbys, started=False)
    on_node = Counter(nodes[bundle] for bundle in chosen)
    counts = [on_node[node] for node in set(nodes.values())]
    assert max(counts) - min(counts) <= 1
    for node in set(nodes.values()):
        in_bundle = [chosen.count(bundle) for bundle in nodes if nodes[bundle] == node]
        assert max(in_bundle) - min(in_bundle) <= 1
