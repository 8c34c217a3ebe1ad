"""Commits what sinks of the user's have prepared for the checkpoint from which a job is restored.

The job before may have died after a checkpoint was complete, and before it was committed. Nobody can ask a sink whether
that was so. So all that the restored checkpoint and those before it cover is committed again, which changes nothing
where it was committed. `submission.py` calls it, after every check and before the job starts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidegate.actors.drivers.own_sinks import OwnSinks
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, Committable, is_own_sink
from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)


def check_sinks(graph: JobGraph, covering: Sequence[CheckpointMetadata], allow_non_restored: bool) -> None:
    """Raise ConfigurationError if the checkpoints have something for a sink that the program does not have."""
    places = {c.table for metadata in covering for c in _prepared(metadata)} - graph.sinks.keys()
    for place in sorted(places):
        uid = place.partition(":")[2]
        said = f"the restored checkpoint covers rows that the sink with uid {uid!r} may not have committed"
        if not allow_non_restored:
            raise ConfigurationError(
                f"{said}, and the program has no such sink: give it back, with this uid, or leave what was not "
                "committed behind with allow_non_restored_state=True"
            )
        log.warning("%s: they are left behind, because the program has no such sink", said)


def commit_left_over(graph: JobGraph, covering: Sequence[CheckpointMetadata], limit_ms: int) -> None:
    """Commit what checkpoints cover, the oldest first. SinkFailedError, also if a call is not back after `limit_ms`."""
    sinks = OwnSinks(graph.sinks, limit_ms)
    for metadata in covering:
        sinks.commit(metadata.job_id, metadata.checkpoint_id, (c for c in _prepared(metadata) if c.table in sinks))


def _prepared(metadata: CheckpointMetadata) -> list[Committable]:
    return [c for subtask in metadata.subtasks for c in subtask.committables if is_own_sink(c.table)]
