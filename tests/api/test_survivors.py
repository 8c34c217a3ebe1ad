"""When a task has failed, those that it takes along go back to the checkpoint from memory, and read no keyed state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from local_jobs import GatedSource, config, local, opening
from waiting import until

import tidegate as tg
from tidegate.actors.coordinator.events import TaskReady
from tidegate.protocol.task_reports import StateOrigin
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.state import subtask_state

ROWS, GATE, LAST_GATE, KEYS = 2_000, 1_000, 1_500, 5
_failures: list[int] = []
"""Rows at which a function fails, an attempt each."""


class Running(tg.ProcessFunction):
    """Counts the rows of each key and of all, and waits for a timer; fails where it is told to."""

    def open(self, context: tg.ProcessContext) -> None:
        self._count = context.state(tg.ValueState("count", int))
        self._seen = context.state(tg.ListState("seen", int))
        self._all = context.list_state(tg.ListState("all", int))
        self._fails_at = _failures[:1]

    def process(self, row: Any, context: tg.ProcessContext) -> Iterable[dict[str, Any]]:
        if row["x"] in self._fails_at:
            _failures.remove(row["x"])
            raise RuntimeError("as told")
        self._count.update((self._count.value() or 0) + 1)
        self._seen.add(row["x"])
        self._all.add(row["x"])
        context.timer_service.register_event_time_timer(0)
        yield {"k": row["k"], "count": self._count.value(), "seen": len(self._seen.get())}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterable[dict[str, Any]]:
        yield {"k": context.current_key["k"], "count": -self._count.value(), "seen": len(set(self._all.get()))}


SCHEMA = pa.schema({"k": pa.int64(), "count": pa.int64(), "seen": pa.int64()})


def _subtask_of(key: int) -> int:
    (group,) = (hash_columns(pa.record_batch({"k": pa.array([key])}), ("k",)) % np.uint64(128)).tolist()
    return int(group) * 2 // 128


def _rows_of_each_subtask(first: int) -> tuple[int, int]:
    """Two rows from `first` on whose keys belong to subtask 0, and to subtask 1."""
    zero, one = (next(x for x in range(first, first + KEYS) if _subtask_of(x % KEYS) == wanted) for wanted in (0, 1))
    return zero, one


def _run(root: Path, *earlier: int, **settings: Any) -> tuple[list[TaskReady], pa.Table, pa.Table]:
    """A job that fails as it is told to; its tasks as they were ready, in the order of attempts, and its results.

    There is a checkpoint at `GATE`, and at the gates before it that are named.
    """
    source, failures = GatedSource(ROWS, gates=(*earlier, GATE, LAST_GATE)), len(_failures)
    with local() as env, opening(source):
        rows = env.from_source(source).key_by("k")
        totals = rows.aggregate(n=tg.count(), most=tg.max("x"), emit="final").collect()
        running = rows.process(Running(), schema=SCHEMA).collect()
        job = env.execute(
            "survivors", checkpoints=config(root, **settings), restart=tg.RestartStrategy.fixed_delay(3, "1ms")
        )
        for gate in (*earlier, GATE):
            source.await_gate(gate)
            job.trigger_checkpoint()
            source.open_gate(gate)
        # A task whose input has ended leaves nothing behind: it ends in the last attempt.
        until("the last attempt", lambda: job.progress().attempt == failures)
        source.open_all()
        assert job.wait("4min") == "finished"
        ready = [event for event in job.events() if isinstance(event, TaskReady)]
    assert _failures == []
    return ready, totals.to_arrow(), running.to_arrow()


def _check(totals: pa.Table, running: pa.Table) -> None:
    """All is as if nothing had failed."""
    each = ROWS // KEYS
    assert sorted(map(tuple, (row.values() for row in totals.to_pylist()))) == [
        (k, each, ROWS - KEYS + k) for k in range(KEYS)
    ]
    of_subtask = [sum(each for k in range(KEYS) if _subtask_of(k) == subtask) for subtask in (0, 1)]
    expected = [(k, count, count) for k in range(KEYS) for count in range(1, each + 1)]
    expected += [(k, -each, of_subtask[_subtask_of(k)]) for k in range(KEYS)]
    assert sorted(map(tuple, (row.values() for row in running.to_pylist()))) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True])
def test_survivors_read_no_keyed_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incremental: bool) -> None:
    """A task of each subtask fails, one after the other, before there is another checkpoint. Only the one that has
    failed reads keyed state; the first of them, which has read, is a survivor the second time."""
    _failures[:] = [_rows_of_each_subtask(GATE + 200)[0], _rows_of_each_subtask(GATE + 400)[1]]
    read: list[str] = []
    module: Any = subtask_state
    read_state = module.read_state

    def noted(*arguments: Any, **options: Any) -> Any:
        tables = read_state(*arguments, **options)
        read.extend(table.state for table in tables)
        return tables

    monkeypatch.setattr(module, "read_state", noted)

    ready, totals, running = _run(tmp_path, incremental=incremental)

    _check(totals, running)
    keyed = {event.task for event in ready if event.origin is StateOrigin.MEMORY}
    assert len(keyed) == 4, "two operators with two subtasks each"
    assert {event.origin for event in ready if event.attempt == 0} == {None}
    failed = []
    for attempt in (1, 2):
        origins = {event.task: event.origin for event in ready if event.attempt == attempt and event.task in keyed}
        assert sorted(origin.value for origin in origins.values() if origin) == ["checkpoint storage", *["memory"] * 3]
        failed += [task for task, origin in origins.items() if origin is StateOrigin.STORAGE]
    assert (failed[0].vertex, failed[0].subtask, failed[1].subtask) == (failed[1].vertex, 0, 1)
    assert (read.count("count"), read.count("aggregate")) == (2, 0), "each of both that failed has read its own"
    assert read.count("all") == 4, "what does not belong to a key is read, which is little"


@pytest.mark.parametrize(
    "settings",
    [{"rewind_memory": 0}, {"rewind_memory": 100}, {"changelog": True}],
    ids=["none", "too little", "changelog"],
)
def test_what_is_not_kept_is_read(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Without the memory for it, survivors restore like the task that has failed: from a local copy if there is one.

    What a task would have to keep must not depend on how many rows it has had since the checkpoint when another one
    fails. So there are two checkpoints before it: what came after each was too much, and after the third it keeps none.
    """
    _failures[:] = [_rows_of_each_subtask(GATE + 300)[0]]
    copies = {"local_copies": True, "local_directory": tmp_path / "copies", "inline_threshold": 0}

    ready, totals, running = _run(
        tmp_path / "checkpoints", GATE - 400, GATE - 200, incremental=True, **copies, **settings
    )

    _check(totals, running)
    origins = [event.origin for event in ready if event.attempt > 0]
    assert origins.count(StateOrigin.LOCAL_COPY) >= 4
    assert StateOrigin.MEMORY not in origins
