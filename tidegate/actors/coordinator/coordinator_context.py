"""`CoordinatorContext`: the objects that the parts of the coordinator machine share: state, instructions, and verdicts.

A verdict is a decision about the whole job that follows from an event, such as "the attempt fails". A part records it
here while it handles the event, and the machine carries it out before it returns. Verdicts are not part of the state.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.instructions import CoordinatorInstruction, SetTimer
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobSpec, pause_ms
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.coordinator.source_coordinator import UntakenSplits
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import VertexId


class CoordinatorContext:
    """The objects that the parts of one coordinator machine share."""

    def __init__(self, state: CoordinatorState, instruct: Callable[[CoordinatorInstruction], None]) -> None:
        self.state = state
        self.instruct = instruct
        self.attempt_failure: str | None = None
        """The reason why the attempt has to fail, or None."""
        self.stop_failure: str | None = None
        """The reason why the savepoint of a stop has failed, or None. The tasks have ended their data, so the attempt
        has to start anew.
        """
        self.passed_over: str | None = None
        """The damage of the checkpoint from which the attempt starts, or None. The checkpoint before it is used
        next.
        """
        self.restore_failure: str | None = None
        """The reason why no checkpoint can be restored, or None. The job has to end."""
        self.storage_failure: str | None = None
        """The reason why the job has to end and keep all its files, or None: storage did not answer for too long, or a
        newer job controls it.
        """
        self.nothing_follows = False
        """True if the event concerns a single task, such as an acknowledgement that is not the last one. No further
        step is possible then.
        """
        self.untaken: dict[VertexId, UntakenSplits] = {}
        """The unassigned splits of sources with assigned splits. They are a cache that follows from the state."""
        self.end: JobStatus | None = None
        """The status in which a completed checkpoint ends the job, or None."""

    @property
    def spec(self) -> JobSpec:
        """Returns the description of the job. Raises ProtocolError before the job is submitted."""
        if self.state.spec is None:
            raise ProtocolError("no job was submitted")
        return self.state.spec

    def retry_later(self, timer: str, at_ms: int, failures: int) -> None:
        """Sets the timer of a retry. The pause grows with the number of failures in a row."""
        self.instruct(SetTimer(timer, at_ms + pause_ms(self.spec.storage_retry_ms, failures)))

    @property
    def settings(self) -> CheckpointSettings:
        """Returns the checkpoint settings of the job."""
        return self.spec.checkpoints
