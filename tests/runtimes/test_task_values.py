"""The metrics of a task, as its host's totals make them; without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes.task_metrics import (
    SubtaskMetrics,
    TaskMeter,
    TaskTotals,
    gauges_at_rest,
    gauges_of,
    request_values,
    snapshot_gauges,
    state_values,
    task_tags,
    totals_of,
)
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits, OutputGate
from tidegate.actors.task.task_machine import WatermarkValve
from tidegate.connectors.memory_source import MemorySource
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, Watermark
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.state.common.backend import StateSize
from tidegate.storage.files.file_system import RequestCounts
from tidegate.storage.ids import AttemptNumber, OperatorUid, SubtaskIndex, VertexId

CHANNEL = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))
TASK = TaskId(VertexId("work"), SubtaskIndex(0))


class Worker:
    """A machine and the world of a task: it works for 3 ms at an event, and sends for 5 ms."""

    elapsed_ms = 0
    outputs = SimpleNamespace(over_limit=False)
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


def test_work_and_waiting_make_up_the_time() -> None:
    """What a task does with an event, until all that follows is handed on, is busy time; who may not take input
    waits for its receivers, and everybody else has nothing to do."""
    worker: Any = Worker()
    host = TaskDriver(worker, worker, worker)
    for held_up in (False, True):
        host.handle(ev.FrameArrived(0, AttemptNumber(0), CHANNEL, 0, ()))
        worker.outputs.over_limit = held_up
        worker.elapsed_ms += 1_000
    host.look(worker.elapsed_ms)
    host.look(worker.elapsed_ms)
    times = host.times
    assert (times.busy_ms, times.idle_ms, times.back_pressured_ms) == (16, 1_000, 1_000)
    assert times.busy_ms + times.idle_ms + times.back_pressured_ms == worker.elapsed_ms


def test_all_subtasks_of_a_vertex_have_its_name() -> None:
    """So they can be added up, whichever processes run them; the subtask tells them apart."""
    source = MemorySource.of(pa.record_batch({"k": [1, 2]}), 1)
    graph = translate([StreamNode(OperatorUid("source"), "source", 2, source.schema, source=source)])
    context: Any = SimpleNamespace(job_name="flow", graph=graph)
    assert [task_tags(context, task) for task in graph.tasks()] == [
        {"job": "flow", "vertex": "source", "subtask": "0"},
        {"job": "flow", "vertex": "source", "subtask": "1"},
    ]


def read(*looks: TaskTotals) -> SubtaskMetrics:
    """What is told at the last of some looks at a task."""
    meter = TaskMeter(TASK, 3, 0)
    return [meter.read(totals, wall_ms=50_000) for totals in looks][-1]


def test_rates_are_those_of_the_time_since_a_look_before() -> None:
    """However far apart they are; totals are those of the attempt."""
    first = TaskTotals(1_000, 10, 20, 100, 200, busy_ms=400, back_pressured_ms=500, idle_ms=100)
    later = TaskTotals(3_000, 30, 60, 500, 1_000, busy_ms=1_400, back_pressured_ms=1_100, idle_ms=500)
    told = read(first, later)
    assert (told.subtask, told.attempt, told.at_ms) == (0, 3, 50_000)
    assert (told.records_in, told.records_out, told.bytes_in, told.bytes_out) == (30, 60, 500, 1_000)
    assert (told.records_in_per_second, told.records_out_per_second) == (10, 20)
    assert (told.bytes_in_per_second, told.bytes_out_per_second) == (200, 400)
    shares = told.busy_ms_per_second, told.back_pressured_ms_per_second, told.idle_ms_per_second
    assert shares == (500, 300, 200)


def test_who_looks_often_gets_the_rates_of_a_second() -> None:
    """Those of a few milliseconds would jump; the first look has no more to go by."""
    assert read(TaskTotals(10, rows_in=5)).records_in_per_second == 500
    assert read(TaskTotals(1_000), TaskTotals(1_400, 400), TaskTotals(1_500, 410)).records_in_per_second == 820
    assert read(TaskTotals(0, rows_in=5)).records_in_per_second == 5_000, "no time has passed"


def test_pressure_and_queue_are_those_of_now() -> None:
    """What was before does not count."""
    pressed = TaskTotals(1_000, queued_bytes=70, back_pressured=True)
    for looks, queued, pressure in (((pressed,), 70, 1), ((pressed, TaskTotals(2_000)), 0, 0)):
        told = gauges_of(read(*looks))
        assert (told[m.QUEUED], told[m.BACK_PRESSURED]) == (queued, pressure)


def test_a_watermark_is_told_from_the_first_one_on() -> None:
    """Before that there is none, rather than one of 292 million years ago."""
    valve = WatermarkValve([CHANNEL])
    assert m.INPUT_WATERMARK not in gauges_of(read(TaskTotals(1, input_watermark_ms=valve.reached_ms)))
    valve.watermark(CHANNEL, Watermark(-5))
    told = gauges_of(read(TaskTotals(1, input_watermark_ms=valve.reached_ms)))
    assert (told[m.INPUT_WATERMARK], told[m.INPUT_WATERMARK_LAG]) == (-5, 50_005)


def test_nothing_is_behind_the_last_watermark() -> None:
    """A stream that has ended lags by nothing, rather than being ahead by 292 million years."""
    gate = OutputGate([], BufferLimits())
    assert gate.watermark_ms is None
    gate.broadcast(Watermark(40_000))
    assert gauges_of(read(TaskTotals(1, output_watermark_ms=gate.watermark_ms)))[m.OUTPUT_WATERMARK_LAG] == 10_000
    gate.broadcast(Watermark(MAX_WATERMARK_MS))
    assert gauges_of(read(TaskTotals(1, output_watermark_ms=gate.watermark_ms)))[m.OUTPUT_WATERMARK_LAG] == 0


def test_a_process_that_has_given_a_task_up_shows_it_at_rest() -> None:
    """Its series stay where they are: a rate or a lag in them would be there for ever."""
    told = read(TaskTotals(1_000, 1, 2, 3, 4, 400, 500, 100, 70, True, 40_000, 30_000))
    at_rest = gauges_at_rest(told)
    assert set(at_rest) == set(gauges_of(told))
    assert {metric for metric, value in at_rest.items() if value} == {m.INPUT_WATERMARK, m.OUTPUT_WATERMARK}
    assert totals_of(told.at_rest) == totals_of(told) == {
        m.RECORDS_IN: 1, m.RECORDS_OUT: 2, m.BYTES_IN: 3, m.BYTES_OUT: 4,
    }  # fmt: skip


def test_of_keyed_state_only_what_its_backend_knows_is_told() -> None:
    """A number that is not there would be 0 for those who look."""
    assert state_values(StateSize(7, timers=2)) == {m.STATE_ROWS: 7, m.STATE_TIMERS: 2}
    assert state_values(StateSize(7, size_bytes=9)) == {m.STATE_ROWS: 7, m.STATE_SIZE: 9}


def test_requests_of_a_process_are_counted_with_those_that_were_repeated() -> None:
    """Repeated ones to S3 are requests as well; other storage has none that are counted."""
    counts = RequestCounts()
    counts.s3_request(again=False)
    counts.s3_request(again=True)
    counts.tried_again()
    assert request_values(counts) == {m.S3_REQUESTS: 2, m.STORAGE_RETRIES: 2}


def test_the_parts_of_a_snapshot_are_told_apart() -> None:
    """Each has a metric of its own."""
    measured = SnapshotMetrics(1, 2, 3, 4, state_bytes=100, incremental_bytes=10, in_flight_bytes=5)
    assert snapshot_gauges(measured) == {
        m.START_DELAY: 1, m.ALIGNMENT: 2, m.SYNC: 3, m.ASYNC: 4, m.SNAPSHOT_FULL_SIZE: 105, m.SNAPSHOT_SIZE: 15,
        m.SNAPSHOT_IN_FLIGHT: 5,
    }  # fmt: skip
