"""A job whose node is lost takes idle slots of its reservation, and one whose node has no memory left names that.

A program with a Ray of its own does it once (`lost_nodes_program.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from story import Story

from tidegate.actors.ray.exit_probe import NODE_CHARACTERS


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The program, which has begun."""
    story = Story("lost_nodes_program.py", tmp_path_factory.mktemp("lost"), RAY_AUTH_MODE="disabled")
    yield story
    story.end()


@pytest.mark.slow
def test_the_tasks_of_a_lost_node_move_to_idle_slots_of_the_reservation(story: Story) -> None:
    """Its bundles have no node any more, and would wait for one. No row is lost or doubled."""
    assert story.told("on_both") == [True]
    assert story.told("moved", "losses", "rows_once") == ["finished", 0, True]


@pytest.mark.slow
def test_the_memory_monitor_of_ray_is_named_with_figures_and_what_to_do(story: Story) -> None:
    """In the failure of the job: the node, its memory, the threshold and the process."""
    failure, node = story.told("failure", "node")
    assert f"killed by Ray's memory monitor, because node {node[:NODE_CHARACTERS]} had " in failure
    assert "of memory in use, above the threshold of " in failure
    assert "; the largest process that it killed was eats/" in failure
    assert "raise RAY_memory_usage_threshold" in failure
    story.check_nothing_is_left()
