"""The order in which the loop of a local job does things: what came in goes before every turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from local_jobs import config

import tidegate as tg
from tidegate.actors.local.local_runtime import LocalJob, LocalSubtask
from tidegate.storage.ids import AttemptNumber


class Host:
    """A subtask that always has something to do; a message follows from each turn."""

    finished = False
    machine = SimpleNamespace(runnable=True)

    def __init__(self, name: str, did: list[str], job: LocalJob) -> None:
        self._name, self._did, self._job = name, did, job

    def turn(self) -> bool:
        """Do a turn."""
        self._did.append(self._name)
        self._job.messages.append(lambda: self._did.append(f"message of {self._name}"))
        return True


def test_a_message_waits_for_no_more_than_one_turn(tmp_path: Path) -> None:
    """However many subtasks are busy: a barrier, or what the coordinator decides, is not behind a round of them.

    Workers take turns, and so do the subtasks of each.
    """
    with tg.StreamEnvironment.local(2) as env:
        env.from_batches(pa.table({"x": [1]})).rebalance().map(lambda row: row, schema={"x": int}).collect()
        job = LocalJob(env.plan("turns", checkpoints=config(tmp_path)), env.open_store)
    did: list[str] = []
    tasks = job.context.graph.tasks()
    for task in tasks:
        worker = job.worker_of(task)
        subtask = LocalSubtask(job, worker, task, AttemptNumber(0), tasks)
        host: Any = Host(f"{task.vertex} {task.subtask}", did, job)
        subtask.begin(host, SimpleNamespace(enter=lambda: None))  # type: ignore[arg-type]
        worker.add(subtask)
    for _ in range(5):
        job._step()
    order = ["from_batches-0 0", "from_batches-0 1", "map-1 0", "map-1 1", "from_batches-0 0"]
    assert did == [line for name in order for line in (name, f"message of {name}")][:-1]
