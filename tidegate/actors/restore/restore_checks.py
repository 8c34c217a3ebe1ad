"""Refuses a job whose graph does not fit the checkpoint that it starts from, when it is submitted.

Rules: state and in-flight elements have a place in the graph; a source is the one that the checkpoint knows; and what
had finished gets no more input (FLIP-147, Flink's `VertexFinishedStateChecker`).
"""

from __future__ import annotations

import enum

from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex
from tidegate.actors.graph.source_checks import splits_of
from tidegate.actors.protocol.partitioning import PartitioningKind
from tidegate.actors.restore.restore_in_flight import can_take_in_flight, edges_with_in_flight
from tidegate.actors.restore.restore_task import subtasks_of
from tidegate.actors.task.pipeline.source_cursor import positions_from_tables
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, VertexId
from tidegate.storage.subtasks.subtask_state import operators_with_state, read_subtask_state


def check_restorable(metadata: CheckpointMetadata, graph: JobGraph, *, ignore_in_flight: bool = False) -> None:
    """Raise ConfigurationError for a checkpoint whose content this graph has no place for, or may not go on from."""
    _check_state(metadata, graph)
    _check_finished(metadata, graph)
    if not ignore_in_flight:
        _check_in_flight(metadata, graph)


def check_restored_sources(store: Store, metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Refuse a source whose splits are not those that the checkpoint knows: it would skip rows, or read others.

    Of a subtask that had left, or was restored as finished, nothing is known but that its splits are read to the end.
    A source that is staged is read again from what was staged, so it is not compared.
    """
    known = {info.uid for info in metadata.operators}
    for vertex in graph.vertices:
        spec = vertex.source
        if spec is None or spec.uid not in known or hasattr(spec.source, "reopen"):
            continue
        subtasks = subtasks_of(metadata, spec.uid)
        tables = [table for subtask in subtasks for table in read_subtask_state(store, subtask, spec.uid)]
        before = {p.split.split_id: p.split for p in positions_from_tables(tables)}
        now = {split.split_id: split for split in splits_of(spec)}
        some_unknown = any(subtask.finished and spec.uid not in operators_with_state(subtask) for subtask in subtasks)
        compared = before.keys() if some_unknown else before.keys() | now.keys()
        changed = sorted(n for n in compared if before.get(n) != now.get(n))
        if changed:
            raise ConfigurationError(
                f"source {spec.uid!r} is not what it was at checkpoint {metadata.checkpoint_id} of {metadata.job_id}: "
                f"split {changed[0]!r} and {len(changed) - 1} more were added, removed or changed; give it the same "
                "input and the same number of splits, or start without restore"
            )


def _check_state(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    infos = {info.uid: info for info in graph.operator_infos()}
    stateful = {uid for subtask in metadata.subtasks for uid in operators_with_state(subtask)}
    for uid in sorted(stateful - set(infos)):
        raise ConfigurationError(
            f"checkpoint {metadata.checkpoint_id} of {metadata.job_id} has state of operator {uid!r}, and the job has "
            f"no operator of that uid (it has {', '.join(sorted(infos))}); give the operator its old uid="
        )
    for old in metadata.operators:
        new = infos.get(old.uid)
        if new is not None and new.max_parallelism != old.max_parallelism:
            raise ConfigurationError(
                f"operator {old.uid!r} has max_parallelism {old.max_parallelism} in checkpoint "
                f"{metadata.checkpoint_id} and {new.max_parallelism} in the job; it cannot change"
            )


def _check_in_flight(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    edges = {graph.edge_name(edge): edge for edge in graph.edges}
    for name in sorted(edges_with_in_flight(metadata)):
        edge = edges.get(name)
        if edge is not None and can_take_in_flight(metadata, graph, edge):
            continue
        now = "no such edge" if edge is None else f"a {edge.partitioning.kind.value} edge there, which takes none"
        raise ConfigurationError(
            f"checkpoint {metadata.checkpoint_id} of {metadata.job_id} has in-flight rows on the edge {name!r}, and "
            f"the job has {now}; restore from a savepoint, which is aligned and has no in-flight rows, or give them up "
            f"with CheckpointConfig(ignore_in_flight_of={metadata.checkpoint_id})"
        )


class _Finished(enum.Enum):
    """How much of a vertex had finished; a new operator has not."""

    NONE = "not finished"
    PARTLY = "partly finished"
    FULLY = "finished"


def _check_finished(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    found = {vertex.vertex: _finished(metadata, vertex) for vertex in graph.vertices}
    for edge in graph.edges:
        upstream, downstream = found[edge.upstream], found[edge.downstream]
        if not _may_feed(upstream, downstream, edge):
            raise ConfigurationError(
                f"{_name(graph, edge.downstream)} had {downstream.value} at checkpoint {metadata.checkpoint_id} of "
                f"{metadata.job_id}, and {_name(graph, edge.upstream)}, which is {upstream.value} there or new, would "
                "give it more rows; leave out the new operator, or restore from a checkpoint before the end"
            )


def _may_feed(upstream: _Finished, downstream: _Finished, edge: JobEdge) -> bool:
    if downstream is _Finished.NONE or upstream is _Finished.FULLY:
        return True
    # Subtask i of a forward edge depends on subtask i alone, so some on both sides may have finished. A forward edge
    # is rebalanced where the parallelism has changed since: what is left goes to what is left of the operator.
    was_pointwise = edge.partitioning.kind in (PartitioningKind.FORWARD, PartitioningKind.REBALANCE)
    return downstream is _Finished.PARTLY and was_pointwise and upstream is _Finished.PARTLY


def _finished(metadata: CheckpointMetadata, vertex: JobVertex) -> _Finished:
    """The one condition of all operators of a vertex. ConfigurationError if they have several."""
    known = {info.uid for info in metadata.operators}
    sources = () if vertex.source is None else (vertex.source,)
    found: dict[_Finished, OperatorUid] = {}
    for spec in (*sources, *vertex.operators):
        flags = {subtask.finished for subtask in subtasks_of(metadata, spec.uid)} if spec.uid in known else {False}
        condition = _Finished.PARTLY if len(flags) > 1 else _Finished.FULLY if flags == {True} else _Finished.NONE
        found.setdefault(condition, spec.uid)
    if len(found) > 1:
        listed = " and ".join(f"{uid!r} ({condition.value})" for condition, uid in found.items())
        raise ConfigurationError(
            f"operators that run in one task must have finished alike at checkpoint {metadata.checkpoint_id} of "
            f"{metadata.job_id}, and these had not: {listed}; leave out the new one, or restore from a checkpoint "
            "before the end"
        )
    return next(iter(found), _Finished.NONE)


def _name(graph: JobGraph, vertex: VertexId) -> str:
    return f"operator {graph.vertex(vertex).name!r}"
