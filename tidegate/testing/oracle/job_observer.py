"""Observes one simulated job from outside, forwards observations to the oracles, and counts the effects that the run
exercised.

The simulated ports call it for each instruction, message and answer. Rules:

- It counts only effects that happened. `in_flight_restored` counts when a checkpoint with in-flight data was restored,
  not when unaligned checkpoints were enabled.
- A violation raises `InvariantViolated` at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as task_do
from tidegate.actors.task.events import TaskTimer
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.operators.combined_rows import is_combined
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import Alignment, BarrierOptions
from tidegate.protocol.task_reports import StateOrigin
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.causes import CausesOracle
from tidegate.testing.oracle.coordinator_records import check_limits
from tidegate.testing.oracle.copies import NodeCopiesOracle
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.files_at_rest import Damager
from tidegate.testing.oracle.job_oracle import Oracle
from tidegate.testing.oracle.restart_oracles import FailoverOracle, RestartWatch, TakeoverOracle

_ATTEMPT_IS_OVER = (CheckpointFailureReason.JOB_FAILOVER, CheckpointFailureReason.COORDINATOR_LOST)


class Watch:
    """Observes one simulated job and passes its events to the oracles.

    `restored` is the checkpoint from which the job was started, or None.
    """

    def __init__(self, oracle: Oracle, coverage: Coverage, restored: CheckpointMetadata | None = None) -> None:
        self.oracle = oracle
        self.coverage = coverage
        self.causes = CausesOracle()
        self.failover = FailoverOracle(oracle.spec, oracle.graph, coverage)
        self.takeovers = TakeoverOracle(oracle.spec, coverage)
        self.node_copies = NodeCopiesOracle(oracle.files, oracle.spec.job_id)
        self.answers: dict[str, do.CompleteRequest] = {}
        self.damager: Damager | None = None
        self.restarts = RestartWatch(oracle.spec.restart, lambda: coverage.saw("restart_put_off"))
        self._restored = restored
        self._options: dict[int, BarrierOptions] = {}
        self._bases: dict[int, int | None] = {}
        self._open: set[int] = set()
        self._lost: set[int] = set()
        """Checkpoints that were pending when a coordinator took over, which aborts them. Storage decides about one of
        them.
        """
        self._aborted: set[int] = set()
        self._acknowledged: set[tuple[int, str]] = set()
        self._asked: dict[str, SnapshotKind] = {}
        self.cut_short: dict[TaskId, bool] = {}
        """True for a task whose data was ended by a stop in its last attempt, False if its sources had ended."""

    # --- tasks ----------------------------------------------------------------------------------------------------

    def task_does(self, machine: TaskMachine, instruction: task_do.TaskInstruction) -> None:
        """Records and checks an instruction of a task's state machine."""
        match instruction:
            case task_do.SendFrame():
                self.oracle.sent(instruction)
                if any(isinstance(e, pa.RecordBatch) and is_combined(e.schema) for e in instruction.elements):
                    self.coverage.saw("rows_combined")
            case task_do.PersistSnapshot():
                self.oracle.snapshot_taken(machine, instruction)
                self._builds(machine, instruction)
            case task_do.PersistChannelState():
                self.oracle.channels_stored(machine, instruction)
            case task_do.CommitPrepared(rows=rows):
                self.oracle.commits.ordered(rows)
            case task_do.DiscardState():
                self.coverage.saw("state_discarded")
            case task_do.ReportReady(origin=StateOrigin.MEMORY):
                self.coverage.saw("state_kept")
            case task_do.ReportReady(origin=StateOrigin.LOCAL_COPY):
                self.coverage.saw("copy_restored")
            case task_do.SetTaskTimer(timer=TaskTimer.SOURCE):
                self.coverage.saw("source_paused")
            case task_do.ReadSource(split=split, others=others):
                for tried in (split, *(other for other, _ in others)):
                    self.oracle.alignment.reads(machine, tried.split_id)
                if others:
                    self.coverage.saw("splits_tried_together")
            case task_do.ReportWatermark(waits=True):
                self.coverage.saw("source_held")
            case task_do.ReportEndOfData():
                self.cut_short[machine.descriptor.task] = instruction.stop is not None
            case task_do.ReportFinished():
                self.oracle.finished(machine.attempt, machine.descriptor.task)
                self.coverage.saw("task_finished")
            case task_do.Acknowledge():
                self._acknowledges(machine, instruction)

    def _builds(self, machine: TaskMachine, snapshot: task_do.PersistSnapshot) -> None:
        number = int(snapshot.checkpoint_id)
        if snapshot.base is None or not self.oracle.is_current(machine):
            return
        if number in self._aborted or number in self._lost:
            # The task was not notified yet that this checkpoint is aborted. Its base may have been deleted.
            return
        told = self._bases.get(number)
        base = snapshot.base.checkpoint_id
        if base != told:
            raise InvariantViolated(
                5,
                f"{machine.descriptor.task} bases checkpoint {number} on {base}, but the coordinator has named {told}",
            )
        self.oracle.files.built_on(number, snapshot.base)

    def _acknowledges(self, machine: TaskMachine, instruction: task_do.Acknowledge) -> None:
        self.coverage.saw("snapshot_acknowledged")
        self.oracle.acknowledged(machine, int(instruction.checkpoint_id))
        if instruction.state.handle is None and not instruction.state.finished:
            self.coverage.saw("stateless_task")
        options = self._options.get(instruction.checkpoint_id, BarrierOptions())
        metrics = instruction.metrics
        if metrics.unaligned and options.timeoutable:
            self.coverage.saw("alignment_timeout")
        aligned = options.alignment is not Alignment.AT_LEAST_ONCE and not metrics.unaligned
        if aligned and metrics.alignment_ms > 0 and len(machine.descriptor.inputs) > 1:
            self.coverage.saw("channel_blocked")

    # --- coordinator ----------------------------------------------------------------------------------------------

    def asked(self, request: co.CheckpointRequested) -> None:
        """Records a request of a user for a checkpoint or savepoint."""
        self._asked[request.request] = request.kind
        if self._open:
            self.coverage.saw("request_held_back")

    def answered(self, answer: do.CompleteRequest) -> None:
        """Checks the answer to a request. A new coordinator may repeat an answer, but not change it."""
        before = self.answers.setdefault(answer.request, answer)
        both = before.checkpoint_id is not None and answer.checkpoint_id is not None
        if both and (before.checkpoint_id, before.path) != (answer.checkpoint_id, answer.path):
            raise InvariantViolated(7, f"request {answer.request} got two different answers: {before} and {answer}")
        self.oracle.records.answered(answer)
        stops = self._asked.get(answer.request, SnapshotKind.SAVEPOINT).stops
        if stops and answer.reason in _ATTEMPT_IS_OVER:
            raise InvariantViolated(
                7, f"the stop request {answer.request} was dropped with its attempt, although the job continues"
            )
        if answer.error is not None:
            self.coverage.saw("request_held_back")
        elif answer.path is not None:
            self.coverage.saw("savepoint_or_retention")
            if stops:
                self.coverage.saw("stop_with_savepoint")

    def told(self, event: ev.TaskEvent) -> None:
        """Records and checks an event that the coordinator sends to a task."""
        if isinstance(event, ev.CheckpointTriggered):
            number = int(event.checkpoint_id)
            if number in self._open:
                return
            pending = [self._options[open_].kind for open_ in sorted(self._open - self._lost)]
            if check_limits(self.oracle.spec.checkpoints, number, event.options.kind, pending):
                self.coverage.saw("savepoint_ahead")
            self._open.add(number)
            self._options[number] = event.options
            self._bases[number] = event.base
            if event.options.kind is SnapshotKind.CHECKPOINT and not self._asked.keys() - self.answers.keys():
                self.coverage.saw("periodic_checkpoint")
            for old in [n for n in self._options if n < number - 50]:
                del self._options[old], self._bases[old]
        elif isinstance(event, ev.CoordinatorTookOver):
            # Pending checkpoints are lost with their coordinator. Another coordinator may have been lost since.
            self.oracle.files.attempt_is_over()
            self._lost = set(self._open)
        elif isinstance(event, ev.CheckpointAborted):
            number = int(event.checkpoint_id)
            if number not in self._aborted:
                self._aborted.add(number)
                self._aborted = {n for n in self._aborted if n > number - 50}
                self._open.discard(number)
                self.oracle.aborted(number)
                self.oracle.files.given_up(number)
                self.coverage.saw("checkpoint_aborted")
        elif isinstance(event, ev.CheckpointCompleted):
            self._completed(int(event.checkpoint_id))

    def _completed(self, number: int) -> None:
        if number not in self._open:
            return
        self._open = {n for n in self._open if n > number}
        self._acknowledged = {(n, task) for n, task in self._acknowledged if n > number}
        metadata = self.oracle.files.present.get(number)
        if metadata is None:
            raise InvariantViolated(4, f"tasks are notified of checkpoint {number} as completed, but it is not")
        if self.oracle.completed > 1 and any(s.committables for s in metadata.subtasks):
            self.coverage.saw("checkpoint_subsumed")
        if metadata.hooks:
            self.coverage.saw("master_hook")
        if self.damager is not None:
            self.damager.completed(number)

    def reported(self, event: co.CoordinatorEvent) -> None:
        """Records an event that arrives at the coordinator."""
        match event:
            case co.CheckpointAcknowledged():
                key = (int(event.checkpoint_id), str(event.task))
                if event.checkpoint_id not in self._open or key in self._acknowledged:
                    self.coverage.saw("late_acknowledgement")
                else:
                    self._acknowledged.add(key)
            case co.CheckpointDeclined() if event.checkpoint_id in self._open:
                self.coverage.saw("checkpoint_failed")
            case co.TimerFired() if event.timer.startswith("timeout:"):
                if int(event.timer.partition(":")[2]) in self._open:
                    self.coverage.saw("checkpoint_failed")

    # --- attempts and the end -------------------------------------------------------------------------------------

    def cancelled(self) -> None:
        """Records that the tasks of the attempt are stopped."""
        self.oracle.files.attempt_is_over()

    def deployed(self, attempt: int, restore: RestorePoint | None, tasks: Sequence[TaskId], by: int) -> None:
        """Checks the start of an attempt. `by` is the generation of the coordinator that ordered it."""
        spec = self.oracle.spec
        self.failover.deployed(attempt, tasks, self.oracle.completed, by)
        self.takeovers.deployed(tasks, by)
        from_itself = restore is not None and restore.job_id == spec.job_id
        self.oracle.deployed(attempt, None if restore is None else int(restore.checkpoint_id), from_itself, tasks)
        self._open.clear()
        self._acknowledged.clear()
        if restore is None:
            return
        if from_itself:
            self.oracle.commits.deployed(int(restore.checkpoint_id))
        number = int(restore.checkpoint_id)
        metadata = self.oracle.files.present.get(number) if from_itself else self._restored
        if metadata is None:
            return
        ignored = spec.checkpoints.ignore_in_flight_of
        if any(s.in_flight is not None for s in metadata.subtasks) and number != ignored:
            self.coverage.saw("in_flight_restored")
        if any(len(s.layers) > 1 for s in metadata.subtasks):
            self.coverage.saw("layers_restored")
        finished = sum(s.finished for s in metadata.subtasks)
        if 0 < finished < len(metadata.subtasks):
            self.coverage.saw("finished_tasks_restored")

    @property
    def unanswered(self) -> list[str]:
        """Returns the names of the requests without an answer, sorted."""
        return sorted(self._asked.keys() - self.answers.keys())

    def ended(self, state: CoordinatorState) -> None:
        """Checks the statistics at the end of the job."""
        # A job that gave up does not wait for checkpoints whose metadata is being written.
        undecided = len(state.pending) if state.gave_up else 0
        # The checkpoint of a savepoint is complete before its copy is whole, and stays so if the copy fails.
        undecided += self.oracle.records.savepoints_not_given()
        if not 0 <= self.oracle.completed - state.completed_checkpoints <= undecided:
            raise InvariantViolated(
                4,
                f"the coordinator counts {state.completed_checkpoints} completed checkpoints, but "
                f"{self.oracle.completed} were completed",
            )
        self.oracle.records.ended(state)
        self.oracle.commits.ended(state.status.value)
        if not state.gave_up:
            self.oracle.savepoints.ended(self.oracle.files.numbers)
        self.coverage.saw("statistics_agree")
        if state.ending_status is not None and state.ending_status.value != "finished":
            self.coverage.saw("savepoint_or_retention")
