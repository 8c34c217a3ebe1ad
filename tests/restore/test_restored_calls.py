"""Watermarks between the rows of calls that wait are restored where what comes before is as it was."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from restored_graphs import FORWARD, REBALANCE, checkpoint_of, complete, graph_of

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore.restore_task import restore_task
from tidegate.operators.functions.async_map import IN_FLIGHT, WATERMARKS, AsyncFunction
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.snapshot import FrozenTable
from tidegate.storage.state.state_file import write_state

ROWS = pa.record_batch({"x": pa.array(range(6), pa.int64())})
MARKS = pa.record_batch({"rows_before": [0, 4], "watermark_ms": [10, 20]})


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def graph(source: int, step: int, calls: int, asks: bool = True, new: str = "step") -> JobGraph:
    """A source, a step and an operator that calls a function, of these parallelisms."""
    made = graph_of(
        {"source": source, new: step, "calls": calls},
        ("source", new, FORWARD if source == step else REBALANCE),
        (new, "calls", FORWARD if step == calls else REBALANCE),
    )
    *others, last = made.vertices
    function = AsyncFunction(str, 1, 1) if asks else None
    operators = tuple(replace(spec, calls=function) for spec in last.operators)
    return replace(made, vertices=(*others, replace(last, operators=operators)))


@pytest.mark.parametrize(
    ("now", "there"),
    [
        (graph(2, 2, 2), True),
        (graph(2, 2, 3), False),
        (graph(2, 3, 2), False),
        (graph(3, 2, 2), False),
        (graph(2, 2, 2, new="other"), False),
        (graph(2, 2, 2, asks=False), True),
    ],
    ids=["as it was", "more calls", "a sender has changed", "one before it", "a new step", "a state of a user"],
)
def test_watermarks_are_left_out_where_a_slower_split_may_follow(
    store: FileSystemStore, now: JobGraph, there: bool
) -> None:
    """The rows all come back, dealt out anew if the calls have another parallelism."""
    uid = OperatorUid("calls")
    states = [
        (uid, FrozenTable(name, StateKind.LIST, lambda rows=rows: rows))
        for name, rows in ((IN_FLIGHT, ROWS), (WATERMARKS, MARKS))
    ]
    handles = {("calls", n): write_state(store, f"calls-{n}", states, inline_bytes_max=0) for n in range(2)}
    point = complete(store, checkpoint_of(graph(2, 2, 2), handles=handles))

    subtasks = [SubtaskIndex(n) for n in range(now.vertex(VertexId("calls")).parallelism)]
    tasks = [restore_task(store, point, now, TaskId(VertexId("calls"), subtask)) for subtask in subtasks]
    tables = [table for task in tasks for table in dict(task.tables)[uid]]

    assert sum(table.rows.num_rows for table in tables if table.state == IN_FLIGHT) == 12
    assert [table.rows for table in tables if table.state == WATERMARKS] == ([MARKS] * 2 if there else [])
