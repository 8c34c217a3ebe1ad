"""Ray in the executors of a Spark cluster: the programs of RayDP run there unchanged, and losses are survived or told.

A program with a Spark cluster of its own does all of it once (`on_spark_program.py`); the tests look at what it told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from same_program import bounded, expected_totals, expected_values, streamed
from waiting import until

import tidegate as tg
from tidegate.actors.runtimes.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

HERE = Path(__file__).parent
WAIT_S = 270
"""For one step of the program: a test that takes 300 s ends the run."""
MARK = "MARK_OF_A_TEST"


class Story:
    """The program, and what it has told so far. A test waits for what it looks at, while the program goes on."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._told: dict[str, Any] = {}
        self._over = False
        self._new = threading.Condition()
        self._errors = folder / "errors"
        path = os.pathsep.join(map(str, (HERE, HERE.parent / "support", HERE.parent.parent / "examples")))
        name, _, value = self._mark.partition("=")
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "on_spark_program.py"), str(folder)],
                env={**os.environ, name: value, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def told(self, *keys: str) -> list[Any]:
        """What the program tells of these. AssertionError if it ends before that, or takes too long."""
        with self._new:
            self._new.wait_for(lambda: self._over or all(key in self._told for key in keys), WAIT_S)
            missing = [key for key in keys if key not in self._told]
            assert not missing, f"{missing} after {self._told}:\n{self._errors.read_text()[-5_000:]}"
            return [self._told[key] for key in keys]

    def check_nothing_is_left(self) -> None:
        """The program comes to its end, and so does all that it has started: Spark's Java ends a little after it."""
        assert self._process.wait(WAIT_S) == 0, self._errors.read_text()[-5_000:]
        until(
            "the end of what it has started", lambda: not processes_with(self._mark), lambda: processes_with(self._mark)
        )

    def end(self) -> None:
        """End what of it still runs."""
        for pid, _ in processes_with(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._new:
                self._told |= json.loads(line) if line.startswith("{") else {}
                self._new.notify_all()
        with self._new:
            self._over = True
            self._new.notify_all()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The program, which has begun."""
    story = Story(tmp_path_factory.mktemp("on-spark"))
    yield story
    story.end()


def processes_with(variable: str) -> list[tuple[int, str]]:
    """Ids and command lines of the processes that have a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(folder.name), line))
        except OSError:
            continue  # It has ended meanwhile, or is not this user's.
    return found


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
