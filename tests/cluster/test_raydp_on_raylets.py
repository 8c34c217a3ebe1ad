"""RayDP on a Ray of several nodes that exists already: executors and tasks on all of them, and a second session there.

A program with a Ray of its own does it once (`raylets_program.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from same_program import expected_totals
from story import Story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The program, which has begun. Its user has a token, and the Ray that it joins asks for none."""
    variables = {"RAY_AUTH_TOKEN": "of another cluster", "RAY_AUTH_MODE": ""}
    story = Story("raylets_program.py", tmp_path_factory.mktemp("raylets"), **variables)
    yield story
    story.end()


@pytest.mark.slow
def test_executors_and_tasks_are_spread_over_the_nodes(story: Story) -> None:
    """An executor a node, tasks beside both; each row counts once."""
    executors, tasks, status, rows_once = story.told("executors", "tasks", "status", "rows_once")
    assert len(executors) == len(set(executors)) == 2
    assert set(tasks) == set(executors)
    assert (status, rows_once) == ("finished", True)


@pytest.mark.slow
def test_another_session_begins_where_one_has_ended(story: Story) -> None:
    """On the same Ray, which the first one has left; and nothing of either is left."""
    connected, again = story.told("connected", "again")
    assert connected is False
    assert [tuple(row) for row in again] == expected_totals()
    story.check_nothing_is_left()
