"""Identifiers as types of their own (`JobId`, `CheckpointId`, …), so that a type checker keeps them apart."""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
"""Directory-safe id of one run of a job: `<name>-<8 hex digits>`."""

VertexId = NewType("VertexId", str)
"""Id of a vertex of the job graph (a chain of operators): the uid of its first operator."""

OperatorUid = NewType("OperatorUid", str)
"""Stable name of an operator; state in a checkpoint is matched by it."""

SubtaskIndex = NewType("SubtaskIndex", int)
"""0-based index of a parallel instance."""

CheckpointId = NewType("CheckpointId", int)
"""Number of a checkpoint, 1-based, increasing, never used twice within a job."""

AttemptNumber = NewType("AttemptNumber", int)
"""Number of an execution attempt of a job, 0-based; a restart increases it."""

EventId = NewType("EventId", int)
"""Number of an event in the event log of a job, 0-based, without holes; a takeover goes on with it."""

Generation = NewType("Generation", int)
"""Number of a coordinator incarnation, 1-based; a takeover increases it."""


def name_in(job_id: JobId) -> str:
    """What a job's id has of its name: the id without the digits at its end; an id without such digits whole."""
    return job_id.rpartition("-")[0] or job_id
