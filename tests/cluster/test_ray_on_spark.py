"""Ray in the executors of a Spark cluster: the programs of RayDP run there unchanged, and losses are survived or told.

A program with a Spark cluster of its own does all of it once (`on_spark_program.py`); the tests look at what it told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from same_program import bounded, expected_totals, expected_values, streamed

import tidegate as tg
from tidegate.actors.runtimes.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

HERE = Path(__file__).parent
TIMEOUT_S = 280
MARK = "TIDEGATE_TEST_MARK"


@dataclass(frozen=True)
class Story:
    """What the program told, and the processes that it has left."""

    told: dict[str, Any]
    left: list[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The program, which has come to its end."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join(map(str, (HERE, HERE.parent / "support", HERE.parent.parent / "examples")))
    done = subprocess.run(
        [sys.executable, str(HERE / "on_spark_program.py"), str(tmp_path_factory.mktemp("on-spark"))],
        env={**os.environ, MARK: mark, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"after {lines}:\n{done.stderr[-5_000:]}"
    return Story({key: value for line in lines for key, value in line.items()}, processes_with(f"{MARK}={mark}"))


def processes_with(variable: str) -> list[str]:
    """Command lines of the processes that have a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # It has ended meanwhile, or is not this user's.
    return found


@pytest.mark.slow
def test_a_program_of_raydp_comes_to_the_same_on_spark(story: Story) -> None:
    """Bounded and streaming DataFrames, a table, and a DataFrame for each checkpoint, in two executors."""
    assert story.told["parallelism"] == 2
    assert [tuple(row) for row in story.told["bounded"]] == expected_totals()
    assert story.told["streamed"] == expected_values()


@pytest.mark.slow
def test_the_same_program_on_raydp(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """The same code."""
    bundles = tuple(raydp_session.bundle_of_slot(slot) for slot in range(raydp_session.slots))
    runtime = RayRuntime(SlotPlacement(raydp_session.placement_group, bundles), standbys=0)
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


@pytest.mark.slow
def test_every_node_has_the_token(story: Story) -> None:
    """That of the driver, which made one; afterwards the driver has none any more."""
    assert story.told["token"]
    assert story.told["tokens"] == [story.told["token"]] * 2
    assert story.told["token_after"] is None


@pytest.mark.slow
def test_tasks_live_in_executors_and_go_on_in_others(story: Story) -> None:
    """Two subtasks in two executors; when one of these is killed, the job restarts and ends with every row once."""
    assert len(set(story.told["executors"])) == 2
    assert story.told["lost"] in story.told["executors"]
    assert story.told["status"] == "finished"
    assert story.told["rows_once"]


@pytest.mark.slow
def test_a_job_ends_with_spark(story: Story) -> None:
    """It has no place any more, and says why and how to go on."""
    assert (
        "its tasks run in executors of Spark, and Spark is lost: the Spark session was stopped" in story.told["ended"]
    )
    assert 'restore="latest"' in story.told["ended"]


@pytest.mark.slow
def test_nothing_is_left_running(story: Story) -> None:
    """Not of Ray, though Spark was gone when the environment was closed; and no folder of Ray's."""
    assert story.left == []
    assert story.told["folder_left"] is False
    assert story.told["connected"] is False
