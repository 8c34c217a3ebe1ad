"""`CoordinatorContext`: the state, the instructions and the verdicts that the parts of the coordinator machine share.

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
    """The objects that the parts of one coordinator machine share: the state, the output for instructions, and the
    verdicts.
    """

    def __init__(self, state: CoordinatorState, instruct: Callable[[CoordinatorInstruction], None]) -> None:
        self.state = state
        self.instruct = instruct
        self.attempt_failure: str | None = None
        """Verdict: the reason why the attempt has to fail, or None."""
        self.stop_failure: str | None = None
        """Verdict: the reason why the savepoint of a stop failed, or None. The tasks have ended their data, so the
        attempt restarts.
        """
        self.passed_over: str | None = None
        """Verdict: the damage of the checkpoint that the attempt restores, or None. The attempt then uses the previous
        checkpoint.
        """
        self.restore_failure: str | None = None
        """Verdict: the reason why no checkpoint can be restored and the job has to end, or None."""
        self.storage_failure: str | None = None
        """Verdict: the reason why the job has to end and keep all its files, or None.

        Either storage did not answer for too long, or a newer job controls the output tables.
        """
        self.nothing_follows = False
        """True if the handled event cannot cause another step, such as an acknowledgement that is not the last one."""
        self.untaken: dict[VertexId, UntakenSplits] = {}
        """Cache, by vertex: the splits of a source that are not assigned to a task yet. It is computed from the state.
        """
        self.end: JobStatus | None = None
        """The status in which a completed checkpoint ends the job, or None."""

    @property
    def spec(self) -> JobSpec:
        """Returns the description of the submitted job. Raises ProtocolError if no job was submitted yet."""
        if self.state.spec is None:
            raise ProtocolError(
                "the coordinator was used before a job was submitted to it; this is a bug in tidegate, please report it"
            )
        return self.state.spec

    def retry_later(self, timer: str, at_ms: int, failures: int) -> None:
        """Sets a retry timer. `timer` is its name, `at_ms` the present time. The pause grows with the number of
        consecutive failures.
        """
        self.instruct(SetTimer(timer, at_ms + pause_ms(self.spec.storage_retry_ms, failures)))

    @property
    def settings(self) -> CheckpointSettings:
        """Returns the checkpoint settings of the job."""
        return self.spec.checkpoints
