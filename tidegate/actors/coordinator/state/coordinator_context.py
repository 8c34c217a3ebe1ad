"""`CoordinatorContext`: what the parts of the coordinator machine share: state, instructions, and verdicts.

Verdicts are what an event brings about for the whole job: set while it is handled, and taken by the machine before it
is over. They are no state.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.coordinator.job.job_spec import CheckpointSettings, JobSpec
from tidegate.actors.coordinator.job.phases import JobStatus
from tidegate.actors.coordinator.messages.instructions import CoordinatorInstruction
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.storage.errors import ProtocolError


class CoordinatorContext:
    """One for each machine."""

    def __init__(self, state: CoordinatorState, instruct: Callable[[CoordinatorInstruction], None]) -> None:
        self.state = state
        self.instruct = instruct
        self.attempt_failure: str | None = None
        """The attempt has to fail with this reason."""
        self.stop_failure: str | None = None
        """The savepoint of a stop has failed: the tasks have ended their data, so the attempt has to start anew."""
        self.passed_over: str | None = None
        """The checkpoint that the attempt starts from is damaged: the one before it is next."""
        self.restore_failure: str | None = None
        """No checkpoint is left that the job could start from: it has to end."""
        self.storage_failure: str | None = None
        """Storage did not answer for too long, or a newer job is in charge of it: the job has to end, and keeps all."""
        self.nothing_follows = False
        """The event is one of very many that each change nothing but a number: no step has become possible."""
        self.end: JobStatus | None = None
        """A completed checkpoint ends the job so."""

    @property
    def spec(self) -> JobSpec:
        """The job. ProtocolError before there is one."""
        if self.state.spec is None:
            raise ProtocolError("no job was submitted")
        return self.state.spec

    @property
    def settings(self) -> CheckpointSettings:
        """How checkpoints are taken."""
        return self.spec.checkpoints
