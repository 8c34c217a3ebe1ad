"""The plan of a checkpoint: which tasks to trigger, to wait for and to commit to, and which have finished.

Made anew for each checkpoint. Rules, those of Flink's `DefaultCheckpointPlanCalculator`:

- Every task that has not finished is waited for, and is told how the checkpoint ends.
- A task is triggered by the coordinator when nobody upstream can send it a barrier any more: it is a source, or all
  of its upstream tasks have finished. Over an edge from all to all that is a matter of the whole upstream vertex, over
  a pointwise one of a single upstream task.
- There is no plan while a task neither runs nor has finished.

Tasks and edges are looked at once each: the cost is linear in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.actors.coordinator.job.job_spec import JobEdgeInfo, JobSpec
from tidegate.actors.protocol.identity import TaskId
from tidegate.storage.ids import VertexId


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Tasks in the order of the job."""

    trigger: tuple[TaskId, ...]
    wait: tuple[TaskId, ...]
    finished: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class NoPlan:
    """This task neither runs nor has finished."""

    missing: TaskId


def make_plan(
    spec: JobSpec, running: Mapping[TaskId, None], finished: Mapping[TaskId, None]
) -> CheckpointPlan | NoPlan:
    """The plan of a checkpoint that is triggered now. A task that has finished may be among the running ones too."""
    if not finished:
        missing = _first_missing(spec.tasks, running)
        return CheckpointPlan(spec.sources, spec.tasks, ()) if missing is None else NoPlan(missing)
    wait = tuple(task for task in spec.tasks if task not in finished)
    missing = _first_missing(wait, running)
    if missing is not None:
        return NoPlan(missing)
    over = tuple(task for task in spec.tasks if task in finished)
    unfinished_vertices = Counter(task.vertex for task in wait)
    sources = frozenset(task.vertex for task in spec.sources)
    edges: dict[VertexId, list[JobEdgeInfo]] = {}
    for edge in spec.edges:
        edges.setdefault(edge.downstream, []).append(edge)

    def has_no_upstream(task: TaskId) -> bool:
        if task.vertex in sources:
            return True
        # A task that is no source and has no known edge hears of a barrier from somewhere: never from here.
        return bool(edges.get(task.vertex)) and all(
            TaskId(edge.upstream, task.subtask) in finished
            if edge.pointwise
            else not unfinished_vertices[edge.upstream]
            for edge in edges[task.vertex]
        )

    return CheckpointPlan(tuple(task for task in wait if has_no_upstream(task)), wait, over)


def _first_missing(tasks: tuple[TaskId, ...], running: Mapping[TaskId, None]) -> TaskId | None:
    return next((task for task in tasks if task not in running), None)
