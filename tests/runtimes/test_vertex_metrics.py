"""What the tasks of a job report of themselves, gathered by vertex."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray_fakes import FIRST, ROWS, SINK, SOURCE, source_to_sink, task_processes

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.ray.coordinator_status import TaskReports
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, VertexMetrics, vertices_of
from tidegate.protocol.stream_elements import EndOfData, EndOfPartition, element_size_bytes
from tidegate.storage.ids import AttemptNumber

SECOND = AttemptNumber(1)


def test_a_vertex_adds_up_what_adds_up() -> None:
    """Rows of all subtasks together; of busy time and pressure the worst, because that is what holds the job up."""
    one = SubtaskMetrics(0, 0, 7, 10, 20, 0, 0, 1.5, 2.5, 0, 0, 300, 100, 600, False, 0, 50, 40)
    two = SubtaskMetrics(1, 0, 7, 1, 2, 0, 0, 0.5, 0.25, 0, 0, 200, 700, 100, True, 9, 60, 30)
    vertex = VertexMetrics("v", "work", 2, (one, two))
    assert (vertex.records_in, vertex.records_out) == (11, 22)
    assert (vertex.records_in_per_second, vertex.records_out_per_second) == (2.0, 2.75)
    assert (vertex.busy_ms_per_second, vertex.back_pressured_ms_per_second) == (300, 700)
    assert (vertex.input_watermark_ms, vertex.output_watermark_ms) == (50, 30)


def test_a_vertex_has_no_watermark_before_each_subtask_has_one() -> None:
    """The one that has told of none is the one that is furthest behind."""
    ahead = SubtaskMetrics(0, 0, 7, input_watermark_ms=50)
    assert VertexMetrics("v", "work", 2, (ahead,)).input_watermark_ms is None
    assert VertexMetrics("v", "work", 2, (ahead, SubtaskMetrics(1, 0, 7))).input_watermark_ms is None
    silent = VertexMetrics("v", "work", 2)
    assert (silent.records_in, silent.busy_ms_per_second, silent.input_watermark_ms) == (0, 0.0, None)


def test_what_was_told_in_another_attempt_does_not_count() -> None:
    """A report may be late; the vertices are there in any case, in the order of the graph."""
    _, graph = source_to_sink()
    reports, state = TaskReports(graph), CoordinatorState()
    state.attempt = SECOND
    reports.store(FIRST, SOURCE, 5, SubtaskMetrics(0, FIRST, 7, records_in=5))
    reports.store(SECOND, SINK, 3, SubtaskMetrics(0, SECOND, 8, records_in=3))
    reports.store(SECOND, SINK, 4, None)
    assert reports.rows_in(state) == {"sink": 4}
    host: Any = SimpleNamespace(machine=SimpleNamespace(state=state))
    source, sink = reports.vertices(host)
    assert (source.vertex, source.name, source.parallelism, source.subtasks) == ("source", "source", 1, ())
    assert [each.records_in for each in sink.subtasks] == [3]
    assert reports.vertices(None) == vertices_of(graph, {}, {}) == (source, VertexMetrics("sink", "sink", 1))


def test_a_task_on_ray_tells_its_coordinator_how_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it took in, in rows and bytes, and at the end that it does nothing any more."""
    with task_processes(monkeypatch) as make:
        sink = make(SINK).start()
        sink.receive(0, ROWS)
        sink.receive(1, EndOfData(drain=True), EndOfPartition())
        sink.await_report(co.TaskReachedEndOfData)
        sink.take_checkpoint()
        sink.await_report(co.TaskFinished)
        counted, told = sink.coordinator.counted.calls, []
        while not counted.empty():
            told.append(counted.get()[1][3])
    last = [each for each in told if each is not None][-1]
    assert (last.subtask, last.attempt, last.records_in) == (0, FIRST, ROWS.num_rows)
    assert last.bytes_in == element_size_bytes(ROWS)
    assert last == last.at_rest
