"""The order in which the loop of a local job does things: what came in goes before every turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from local_jobs import config

import tidegate as tg
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.local.local_job import LocalJob
from tidegate.storage.ids import SubtaskIndex, VertexId


class Host:
    """A task that always has something to do, and tells somebody of it."""

    def __init__(self, name: str, did: list[str], job: LocalJob) -> None:
        self._name, self._did, self._job = name, did, job

    def turn(self) -> bool:
        """Do a turn; a message follows from it."""
        self._did.append(self._name)
        self._job.messages.append(lambda: self._did.append(f"message of {self._name}"))
        return True

    def close(self) -> None:
        """There is nothing to close."""


def test_a_message_waits_for_no_more_than_one_turn(tmp_path: Path) -> None:
    """However many tasks are busy: a barrier, or what the coordinator decides, is not behind a round of them."""
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(pa.table({"x": [1]})).collect()
        job: Any = LocalJob(env.plan("turns", checkpoints=config(tmp_path)), env.open_store)
    did: list[str] = []
    for name in ("a", "b", "c"):
        job._tasks[TaskId(VertexId(name), SubtaskIndex(0))] = Host(name, did, job)
    for _ in range(4):
        job._step()
    expected = ["a", "message of a", "b", "message of b", "c", "message of c", "a"]
    assert did == expected
