"""The metrics of a task, as its host's totals make them; without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.protocol.identity import ChannelId
from tidegate.actors.protocol.snapshot_metrics import SnapshotMetrics
from tidegate.actors.protocol.stream_elements import Watermark
from tidegate.actors.runtimes.metrics import registry as m
from tidegate.actors.runtimes.metrics.task_values import TaskTotals, gauges_of, snapshot_gauges, task_tags
from tidegate.actors.sources.memory_source import MemorySource
from tidegate.actors.task.channels.watermark_valve import WatermarkValve
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.storage.ids import AttemptNumber, OperatorUid, SubtaskIndex

CHANNEL = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))


class Worker:
    """A machine and the world of a task: it works for 3 ms at an event, and sends for 5 ms."""

    elapsed_ms = 0
    fence = SimpleNamespace(refuses=lambda event: False)
    descriptor = SimpleNamespace(task=None)

    def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        """What the machine does."""
        self.elapsed_ms += 3
        return [do.GrantCredit(AttemptNumber(0), CHANNEL, 10, 10)]

    def grant_credit(self, grant: do.GrantCredit) -> None:
        """What the task sends."""
        self.elapsed_ms += 5

    def monotonic_ms(self) -> int:
        """The clock that nobody sets."""
        return self.elapsed_ms


def test_the_time_of_work_counts_and_that_between_does_not() -> None:
    """What a task does with an event, until all that follows is handed on, is busy time."""
    worker: Any = Worker()
    host = TaskHost(worker, worker, worker)
    for _ in range(2):
        host.handle(ev.FrameArrived(0, AttemptNumber(0), CHANNEL, 0, ()))
        worker.elapsed_ms += 1_000
    assert host.busy_ms == 16


def test_all_subtasks_of_a_vertex_have_its_name() -> None:
    """So they can be added up, whichever processes run them; the subtask tells them apart."""
    source = MemorySource.of(pa.record_batch({"k": [1, 2]}), 1)
    graph = translate([StreamNode(OperatorUid("source"), "source", 2, source.schema, source=source)])
    context: Any = SimpleNamespace(job_name="flow", graph=graph)
    assert [task_tags(context, task) for task in graph.tasks()] == [
        {"job": "flow", "vertex": "source", "subtask": "0"},
        {"job": "flow", "vertex": "source", "subtask": "1"},
    ]


def test_busy_time_is_that_of_the_time_between_two_looks() -> None:
    """However far apart they are, and never more than there is in a second."""
    before = TaskTotals(at_ms=1_000, busy_ms=100)
    assert gauges_of(before, TaskTotals(3_000, busy_ms=600))[m.BUSY_TIME] == 250
    assert gauges_of(before, TaskTotals(2_000, busy_ms=5_100))[m.BUSY_TIME] == 1_000
    assert m.BUSY_TIME not in gauges_of(before, TaskTotals(1_000, busy_ms=100))


def test_pressure_and_queue_are_those_of_now() -> None:
    """What was before does not count."""
    pressed = TaskTotals(1_000, queued_bytes=70, back_pressured=True)
    free = TaskTotals(2_000)
    for before, now, queued, pressure in ((free, pressed, 70, 1), (pressed, free, 0, 0)):
        told = gauges_of(before, now)
        assert (told[m.QUEUED], told[m.BACK_PRESSURED]) == (queued, pressure)


def test_a_watermark_is_told_from_the_first_one_on() -> None:
    """Before that there is none, rather than one of 292 million years ago."""
    valve = WatermarkValve([CHANNEL])
    start = TaskTotals(0)
    assert m.INPUT_WATERMARK not in gauges_of(start, TaskTotals(1, watermark_ms=valve.reached_ms))
    valve.watermark(CHANNEL, Watermark(-5))
    assert gauges_of(start, TaskTotals(1, watermark_ms=valve.reached_ms))[m.INPUT_WATERMARK] == -5


def test_the_parts_of_a_snapshot_are_told_apart() -> None:
    """Each has a metric of its own."""
    measured = SnapshotMetrics(start_delay_ms=1, alignment_ms=2, sync_ms=3, async_ms=4)
    assert snapshot_gauges(measured) == {m.START_DELAY: 1, m.ALIGNMENT: 2, m.SYNC: 3, m.ASYNC: 4}
