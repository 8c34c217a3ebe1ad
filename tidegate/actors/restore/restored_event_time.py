"""Whether event time goes on after a restore where the checkpoint was, so that the watermarks in it hold.

A watermark of a checkpoint says that what follows it at one place is later, or late. What follows is as it was if the
steps before are those of the checkpoint, and as parallel. Otherwise rows of a split that was behind may come to a
place that was further, and be in time: such a watermark would make them late. It may be a step far before: one that
was as parallel as the source had the rows of one split alone, and has those of all when the source is not any more.
"""

from __future__ import annotations

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.ids import OperatorUid, VertexId


def event_time_goes_on(metadata: CheckpointMetadata, graph: JobGraph, vertex: VertexId) -> bool:
    """Whether all operators of a vertex, and of those before it, are in the checkpoint with the same parallelism."""
    before, found = [vertex], set[VertexId]()
    while before:
        found.add(reached := before.pop())
        before += [edge.upstream for edge in graph.edges if edge.downstream == reached and edge.upstream not in found]
    return all(
        old_parallelism(metadata, uid) == graph.vertex(each).parallelism
        for each in found
        for uid in graph.vertex(each).uids
    )


def old_parallelism(metadata: CheckpointMetadata, uid: OperatorUid) -> int:
    """Parallelism of an operator in the checkpoint, whatever it was chained to. 0 if it is new."""
    return next((info.parallelism for info in metadata.operators if info.uid == uid), 0)
