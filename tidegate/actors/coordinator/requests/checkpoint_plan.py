"""The plan of a checkpoint: which tasks to trigger, which to wait for, and which have finished.

`CheckpointKeeper` makes one for each checkpoint. Rules, those of Flink's `DefaultCheckpointPlanCalculator`:

- Every task that has not finished is waited for, and is told how the checkpoint ends.
- The coordinator triggers a task that no barrier can reach any more: a source, or one whose upstream tasks have all
  finished. Over an all-to-all edge these are all tasks of the upstream vertex, over a pointwise edge a single one.
- There is no plan while a task neither runs nor has finished.

The cost is linear in tasks and edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.actors.coordinator.job.job_spec import JobEdgeInfo, JobSpec
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import VertexId


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Which tasks take part, and how. Each field is in the order of the job."""

    trigger: tuple[TaskId, ...]
    wait: tuple[TaskId, ...]
    finished: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There can be no checkpoint now: this task neither runs nor has finished."""

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
        # Without a known edge the upstream tasks are not known either: it waits for their barriers.
        return bool(edges.get(task.vertex)) and all(
            TaskId(edge.upstream, task.subtask) in finished
            if edge.pointwise
            else not unfinished_vertices[edge.upstream]
            for edge in edges[task.vertex]
        )

    return CheckpointPlan(tuple(task for task in wait if has_no_upstream(task)), wait, over)


def _first_missing(tasks: tuple[TaskId, ...], running: Mapping[TaskId, None]) -> TaskId | None:
    return next((task for task in tasks if task not in running), None)
