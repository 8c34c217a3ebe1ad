"""Chooses the sources whose splits the coordinator assigns while the job runs. `submission.py` calls this.

Rules:

- A source needs more splits than subtasks, and more than one subtask: otherwise nothing can be shared out better.
- A restored source has the splits of its checkpoint. Those in the pool of the checkpoint are assigned, even to a single
  subtask; the subtasks have the others. There is no pool in checkpoints of older versions: then nothing is assigned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.actors.coordinator.job.job_spec import AssignedSource
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task.pipeline.split_positions import SplitPosition
from tidegate.connectors.source import is_assignable
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, StoredSplit
from tidegate.storage.ids import OperatorUid


def assigned_sources(
    graph: JobGraph,
    splits: Mapping[OperatorUid, Sequence[SplitPosition]],
    metadata: CheckpointMetadata | None,
) -> tuple[AssignedSource, ...]:
    """Those of a graph, restored from this checkpoint or savepoint. `splits`: what each source says now."""
    restored = set() if metadata is None else {info.uid for info in metadata.operators}
    found = []
    for vertex in graph.vertices:
        if vertex.source is None:
            continue
        uid = vertex.source.uid
        now = [StoredSplit(p.split.split_id, p.split.payload, p.split.rows) for p in splits[uid]]
        if metadata is not None and uid in restored:
            pool = {split.split_id: split for split in metadata.pool_of(uid)}
            # What is read is what the checkpoint says. A file that is gone since is noticed when it is read.
            gone = pool.keys() - {split.split_id for split in now}
            now = [pool.get(split.split_id, split) for split in now] + [pool[split_id] for split_id in sorted(gone)]
            unread = tuple(number for number, split in enumerate(now) if split.split_id in pool)
        else:
            shares = is_assignable(vertex.source.source) and len(now) > vertex.parallelism > 1
            unread = tuple(range(len(now))) if shares else ()
        if unread:
            found.append(AssignedSource(uid, vertex.vertex, tuple(now), unread))
    return tuple(found)
