"""Identifiers as separate types (`JobId`, `CheckpointId`, …), so that a type checker does not confuse them."""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
"""Directory-safe id of one run of a job: `<name>-<8 hex digits>`."""

VertexId = NewType("VertexId", str)
"""Id of a vertex of the job graph (a chain of operators): the uid of its first operator."""

OperatorUid = NewType("OperatorUid", str)
"""Stable id of an operator. A restore matches the state in a checkpoint to operators by uid."""

SubtaskIndex = NewType("SubtaskIndex", int)
"""0-based index of a parallel instance (subtask) of an operator."""

CheckpointId = NewType("CheckpointId", int)
"""Number of a checkpoint, 1-based, increasing, never reused within a job."""

AttemptNumber = NewType("AttemptNumber", int)
"""Number of an execution attempt of a job, 0-based. A restart increases it."""

EventId = NewType("EventId", int)
"""Number of an event in the event log of a job, 0-based, without holes. A takeover continues the numbers."""

Generation = NewType("Generation", int)
"""Number of a coordinator of a job, 1-based. A takeover by a new coordinator increases it."""


def name_in(job_id: JobId) -> str:
    """Returns the name part of a job's id: the id without the hex digits at its end, if there are any."""
    return job_id.rpartition("-")[0] or job_id
