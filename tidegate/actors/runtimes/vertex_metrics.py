"""`VertexMetrics`: what the tasks of a running job have reported of themselves last, in numbers; for pages and scripts.

A task reports about once a second, and not again while nothing changes. Rates are those of the time since its report
before. Totals begin with the attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.operators.user_metrics import UserMetric
from tidegate.protocol.identity import TaskId
from tidegate.state.common.state_size import StateSize


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """One subtask in one attempt. `at_ms`: when it was reported, since the epoch.

    Of each second it was busy, back-pressured or idle; together they make the second. Watermarks are None before there
    was one.
    """

    subtask: int
    attempt: int
    at_ms: int
    records_in: int = 0
    records_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    records_in_per_second: float = 0.0
    records_out_per_second: float = 0.0
    bytes_in_per_second: float = 0.0
    bytes_out_per_second: float = 0.0
    busy_ms_per_second: float = 0.0
    back_pressured_ms_per_second: float = 0.0
    idle_ms_per_second: float = 0.0
    is_back_pressured: bool = False
    queued_bytes: int = 0
    """Output that waits for credit."""
    input_watermark_ms: int | None = None
    output_watermark_ms: int | None = None
    states: tuple[tuple[str, StateSize], ...] = ()
    """Names of operators with keyed state, and about how much each has."""
    user: tuple[UserMetric, ...] = ()
    """What the functions of the user count of themselves."""
    alignment_drift_ms: int | None = None
    """How far a source is ahead of the slowest member of its watermark group; None where that is not known."""
    waits_for: str | None = None
    """What storage it waits for, since when, and the newest error; None if it waits for none."""

    @property
    def at_rest(self) -> SubtaskMetrics:
        """The same once it does nothing any more: what it was doing is over, and what it has done stays."""
        return replace(
            self,
            records_in_per_second=0.0,
            records_out_per_second=0.0,
            bytes_in_per_second=0.0,
            bytes_out_per_second=0.0,
            busy_ms_per_second=0.0,
            back_pressured_ms_per_second=0.0,
            idle_ms_per_second=0.0,
            is_back_pressured=False,
            queued_bytes=0,
            alignment_drift_ms=None if self.alignment_drift_ms is None else 0,
            waits_for=None,
        )


@dataclass(frozen=True, slots=True)
class VertexMetrics:
    """One vertex of the graph: those of its subtasks that have reported in their present attempt, in their order."""

    vertex: str
    name: str
    parallelism: int
    subtasks: tuple[SubtaskMetrics, ...] = ()

    @property
    def records_in(self) -> int:
        """Rows that came in, of all subtasks."""
        return sum(each.records_in for each in self.subtasks)

    @property
    def records_out(self) -> int:
        """Rows that were sent, of all subtasks."""
        return sum(each.records_out for each in self.subtasks)

    @property
    def records_in_per_second(self) -> float:
        """Rows that came in, of all subtasks."""
        return sum(each.records_in_per_second for each in self.subtasks)

    @property
    def records_out_per_second(self) -> float:
        """Rows that were sent, of all subtasks."""
        return sum(each.records_out_per_second for each in self.subtasks)

    @property
    def busy_ms_per_second(self) -> float:
        """Of the subtask that is busiest."""
        return max((each.busy_ms_per_second for each in self.subtasks), default=0.0)

    @property
    def back_pressured_ms_per_second(self) -> float:
        """Of the subtask that is held up most."""
        return max((each.back_pressured_ms_per_second for each in self.subtasks), default=0.0)

    @property
    def input_watermark_ms(self) -> int | None:
        """Of the subtask that is furthest behind; None before all have one."""
        return _least([each.input_watermark_ms for each in self.subtasks], self.parallelism)

    @property
    def output_watermark_ms(self) -> int | None:
        """Of the subtask that is furthest behind; None before all have one."""
        return _least([each.output_watermark_ms for each in self.subtasks], self.parallelism)


def vertices_of(
    graph: JobGraph, told: Mapping[TaskId, SubtaskMetrics], attempts: Mapping[TaskId, int]
) -> tuple[VertexMetrics, ...]:
    """All vertices in the order of the graph. What a task told in another attempt than its present one is left out."""
    return tuple(
        VertexMetrics(
            str(vertex.vertex),
            vertex.name,
            vertex.parallelism,
            tuple(
                metrics
                for task in graph.tasks()
                if task.vertex == vertex.vertex
                and (metrics := told.get(task)) is not None
                and metrics.attempt == attempts.get(task)
            ),
        )
        for vertex in graph.vertices
    )


def waits_of(vertices: Iterable[VertexMetrics]) -> str | None:
    """Returns what storage the first task waits for that waits, or None if no task does."""
    return next((each.waits_for for vertex in vertices for each in vertex.subtasks if each.waits_for), None)


def _least(watermarks_ms: list[int | None], expected: int) -> int | None:
    known = [each for each in watermarks_ms if each is not None]
    return min(known) if known and len(known) == expected else None
