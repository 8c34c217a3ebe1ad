"""Finds out whether a pipeline writes other rows although nothing goes wrong.

Faults change when rows arrive and how they are batched. A pipeline whose output depends on that writes other rows under
faults, and no invariant of tidegate is broken. So a difference is judged by runs without faults, of other schedules:
other delays, other sizes of batches. If their rows differ as well, the difference is the pipeline's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph, JobVertex, OperatorSpec
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.testing.runtime.run import JobRun, JobSetting, Protocol, Simulation, counted
from tidegate.testing.world.faults import Faults

SCHEDULES = (
    (8, "0ms..1s"),
    (1, "0ms..5ms"),
    (3, "0ms..2s"),
    (8, "0ms..100ms"),
    (2, "0ms..1s"),
    (5, "0ms..10s"),
)
"""Rows that a source gives at a time, and how long messages take, of each run."""
_ROWS_SHOWN_MAX = 3

_RowsByEdge = dict[int, Counter[str]]


def order_dependence(setting: JobSetting) -> str | None:
    """How the output of a pipeline differs between runs without faults, with the step that makes it; None if not.

    A run that violates an invariant or does not finish is left out: that is no matter of order.
    """
    first = _run(setting, 0, None)
    if first is None:
        return None
    for number, schedule in enumerate(SCHEDULES, 1):
        other = _run(setting, number, schedule)
        if other is not None and (text := _difference(first, other)) is not None:
            return text
    return None


def _run(setting: JobSetting, number: int, schedule: tuple[int, str] | None) -> tuple[JobRun, _RowsByEdge] | None:
    rows: defaultdict[int, Counter[str]] = defaultdict(Counter)

    class Recording(TaskMachine):
        """A task whose rows are counted as they leave it."""

        def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
            instructions = super().handle(event)
            for instruction in instructions:
                if isinstance(instruction, do.SendFrame):
                    for element in instruction.elements:
                        if isinstance(element, pa.RecordBatch):
                            rows[instruction.channel.edge] += counted([tuple(row.values()) for row in _rows(element)])
            return instructions

    faults = Faults()
    if schedule is not None:
        rows_max, delay = schedule
        faults = Faults(delay=delay)
        setting = replace(setting, options=replace(setting.options, source_rows_max=rows_max))
    run = Simulation(number, faults, Protocol(task_machine=Recording)).run(setting)
    return (run, rows) if run.violation is None and run.status == "finished" and run.rows is not None else None


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch. Columns are numbered: two may have one name."""
    names = [str(number) for number in range(batch.num_columns)]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(batch.columns, names).to_pylist()
    return rows


def _difference(first: tuple[JobRun, _RowsByEdge], other: tuple[JobRun, _RowsByEdge]) -> str | None:
    (run1, edges1), (run2, edges2) = first, other
    assert run1.rows is not None
    assert run2.rows is not None
    for table, rows in run1.rows.items():
        only1, only2 = rows - run2.rows[table], run2.rows[table] - rows
        if not only1 and not only2:
            continue
        graph = run1.job.context.graph
        differing = {edge.index for edge in graph.edges if edges1.get(edge.index) != edges2.get(edge.index)}
        step = _first_step(graph, _writer(graph, table), differing)
        return (
            f"{table} differs between two runs without any fault: {_shown(only1)} in one, {_shown(only2)} in the "
            f"other. The rows that go into {_names(step)} are the same, and those that come out are not: its result "
            "depends on the order of its rows, on how they are batched, or on something outside of the pipeline"
        )
    return None


def _first_step(graph: JobGraph, vertex: JobVertex, differing: set[int]) -> JobVertex:
    """The vertex from which a difference comes: it goes in by no edge. `differing`: indices of edges."""
    seen = {vertex.vertex}
    while True:
        before = [
            edge.upstream
            for edge in graph.edges
            if edge.downstream == vertex.vertex and edge.index in differing and edge.upstream not in seen
        ]
        if not before:
            return vertex
        seen.add(before[0])
        vertex = graph.vertex(before[0])


def _writer(graph: JobGraph, table: str) -> JobVertex:
    return next(vertex for vertex in graph.vertices if any(spec.table == table for spec in vertex.operators))


def _names(vertex: JobVertex) -> str:
    return ", ".join(f"{name!r} (uid {uid!r})" for name, uid in _steps(vertex))


def _steps(vertex: JobVertex) -> Iterator[tuple[str, str]]:
    sinks: list[OperatorSpec] = [spec for spec in vertex.operators if spec.table is not None]
    steps = [spec for spec in vertex.operators if spec not in sinks] or sinks
    if vertex.source is not None:
        yield vertex.source.name, vertex.source.uid
    for spec in steps:
        yield spec.name, spec.uid


def _shown(rows: Counter[str]) -> str:
    if not rows:
        return "no row more"
    shown = ", ".join(sorted(rows)[:_ROWS_SHOWN_MAX])
    return f"{rows.total()} rows only, such as {shown}"
