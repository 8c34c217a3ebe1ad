"""`CoordinatorContext`: the objects that the parts of the coordinator machine share: state, instructions, and verdicts.

A verdict is the effect of an event on the job as a whole. A part leaves it while it handles the event, and the machine
carries it out before it returns. Verdicts are not state.
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
    """The objects that the parts of one machine share."""

    def __init__(self, state: CoordinatorState, instruct: Callable[[CoordinatorInstruction], None]) -> None:
        self.state = state
        self.instruct = instruct
        self.attempt_failure: str | None = None
        """The attempt has to fail with this reason."""
        self.stop_failure: str | None = None
        """The savepoint of a stop has failed. The tasks have ended their data, so the attempt has to start anew."""
        self.passed_over: str | None = None
        """The checkpoint that the attempt starts from is damaged: the one before it is next."""
        self.restore_failure: str | None = None
        """No checkpoint is left that the job could start from: it has to end."""
        self.storage_failure: str | None = None
        """Storage did not answer for too long, or a newer job is in charge of it. The job has to end, and keeps
        everything."""
        self.nothing_follows = False
        """The event concerns one task (an acknowledgement, but not the last one): no step has become possible."""
        self.untaken: dict[VertexId, UntakenSplits] = {}
        """Unassigned splits of sources whose splits are assigned. They follow from the state."""
        self.end: JobStatus | None = None
        """A completed checkpoint ends the job in this status."""

    @property
    def spec(self) -> JobSpec:
        """The job. Raises ProtocolError before there is one."""
        if self.state.spec is None:
            raise ProtocolError("no job was submitted")
        return self.state.spec

    def retry_later(self, timer: str, at_ms: int, failures: int) -> None:
        """Sets the timer of a retry, after this many failures in a row."""
        self.instruct(SetTimer(timer, at_ms + pause_ms(self.spec.storage_retry_ms, failures)))

    @property
    def settings(self) -> CheckpointSettings:
        """Returns how checkpoints are taken."""
        return self.spec.checkpoints
