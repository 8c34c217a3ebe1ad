"""Ray in the executors of a Spark cluster: the programs of RayDP run there unchanged, and losses are survived or told.

A program with a Spark cluster of its own does all of it once (`on_spark_program.py`); the tests look at what it told.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from same_program import bounded, expected_totals, expected_values, streamed
from story import Story

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The program, which has begun."""
    story = Story("on_spark_program.py", tmp_path_factory.mktemp("on-spark"))
    yield story
    story.end()


@pytest.mark.slow
def test_a_program_of_raydp_comes_to_the_same_on_spark(story: Story) -> None:
    """A bounded DataFrame and a table, in two executors."""
    parallelism, totals = story.told("parallelism", "bounded")
    assert parallelism == 2
    assert [tuple(row) for row in totals] == expected_totals()


@pytest.mark.slow
def test_a_streaming_dataframe_comes_to_the_same_on_spark(story: Story) -> None:
    """With a DataFrame for each checkpoint behind it."""
    (streamed,) = story.told("streamed")
    assert streamed == expected_values()


@pytest.mark.slow
def test_tasks_live_in_executors_and_go_on_in_others(story: Story) -> None:
    """Two subtasks in two executors; when one of these is killed, the job restarts and ends with every row once."""
    lost, executors, status, rows_once = story.told("lost", "executors", "status", "rows_once")
    assert len(set(executors)) == 2
    assert lost in executors
    assert status == "finished"
    assert rows_once


@pytest.mark.slow
def test_a_job_ends_with_spark(story: Story) -> None:
    """It has no place any more, and says why and how to go on."""
    (ended,) = story.told("ended")
    assert "its tasks run in executors of Spark, and Spark is lost: the Spark session was stopped" in ended
    assert 'restore="latest"' in ended


@pytest.mark.slow
def test_nothing_is_left_running(story: Story) -> None:
    """Not of Ray, though Spark was gone when the environment was closed; and no folder of Ray's."""
    folder_left, connected = story.told("folder_left", "connected")
    assert (folder_left, connected) == (False, False)
    story.check_nothing_is_left()


@pytest.mark.slow
def test_every_node_has_the_token(story: Story) -> None:
    """That of the driver, which made one; afterwards the driver has none any more."""
    token, tokens, after = story.told("token", "tokens", "token_after")
    assert token
    assert tokens == [token] * 2
    assert after is None


@pytest.mark.slow
def test_the_same_program_on_raydp(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """The same code."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    options = tg.DataPlaneOptions(source_rows_max=500)
    with tg.StreamEnvironment(runtime, 2, options=options, session=cast(Any, Borrowed(raydp_session))) as env:
        assert bounded(env, tmp_path / "bounded") == expected_totals()
        assert streamed(env, tmp_path / "streamed") == expected_values()


class Borrowed:
    """The session of all tests, which an environment is not to stop."""

    def __init__(self, session: RayDPSession) -> None:
        self.spark = session.spark

    def stop(self) -> None:
        """It goes on."""
