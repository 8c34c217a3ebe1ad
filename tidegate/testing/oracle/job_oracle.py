"""Checks the invariants of `docs/architecture.md` for a simulated job, without using the state of its coordinator.

It records the frames that channels carry, the elements that tasks take from them, the positions of snapshots in them,
and every change of a file.

The cut of an exactly-once checkpoint (invariant 3), for each channel, in rows of the attempt that took the checkpoint:

    put by the sender before its snapshot == taken by the receiver before its own + stored as in flight

Restored in-flight rows that the receiver has not taken yet are in flight again. If the sender had finished, the cut is
at the end of the channel. An at-least-once checkpoint may have taken more rows than were put before the barrier, but
never fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import Element
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.commits import CommitsOracle
from tidegate.testing.oracle.coordinator_records import RecordsOracle, check_held
from tidegate.testing.oracle.copies import SavepointFoldersOracle
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.files_at_rest import FilesOracle, acknowledged_tasks
from tidegate.testing.oracle.output_tables import Covered, MergedFiles, TablesOracle
from tidegate.testing.oracle.task_oracles import (
    AlignmentOracle,
    LocalQueuesOracle,
    MomentsOracle,
    RestoredSessions,
    SplitsOracle,
)
from tidegate.testing.world.disk import SimulatedDisk

COMPLETED_WAITING_MAX = 8
"""How many completed checkpoints may still exist in addition to the retained ones. Commits and deletions take time."""
PROBES_LATE = 3
"""A task that waits for credit must have requested it within `probe_ms` times this number."""

UNNEEDED_FOLDERS_MAX = 4 * COMPLETED_WAITING_MAX
"""How many folders of shared files may exist without a reference from a checkpoint.

Layers that are merged become unreferenced together.
"""


@dataclass(slots=True)
class _Cut:
    """The positions in each channel at which one checkpoint separates rows, from the snapshots that tasks have taken so
    far.
    """

    attempt: int
    taken: dict[TaskId, dict[ChannelId, int]] = field(default_factory=dict)
    put: dict[ChannelId, int] = field(default_factory=dict)
    waiting: dict[ChannelId, int] = field(default_factory=dict)
    """Restored in-flight rows that the receiver had not taken."""
    in_flight: dict[ChannelId, int] = field(default_factory=dict)
    recovered: dict[ChannelId, int] = field(default_factory=dict)
    acknowledged: set[TaskId] = field(default_factory=set)


class Oracle:
    """Checks one job during a simulation. A violated invariant raises InvariantViolated."""

    def __init__(
        self,
        disk: SimulatedDisk,
        spec: JobSpec,
        graph: JobGraph,
        coverage: Coverage | None = None,
        inherited: Covered | None = None,
        merged: MergedFiles | None = None,
        histories: Mapping[str, int] | None = None,
        restored: CheckpointMetadata | None = None,
    ) -> None:
        self.coverage = coverage if coverage is not None else Coverage()
        merged = MergedFiles(disk, self.coverage) if merged is None else merged
        self.tables = TablesOracle(disk, spec.job_id, merged, inherited, histories)
        if spec.restore is not None:
            self.tables.restored(spec.restore.job_id, spec.restore.checkpoint_id)
        self.files = FilesOracle(disk, spec.root, spec.job_id, self._completes, self.tables)
        self.records = RecordsOracle(disk, spec)
        self.commits = CommitsOracle(self.coverage, restored)
        self.savepoints = SavepointFoldersOracle(disk, spec.job_id, self.coverage)
        self.splits = SplitsOracle(spec, self.coverage)
        self.alignment = AlignmentOracle(spec)
        self.moments = MomentsOracle()
        self.sessions = RestoredSessions(self.coverage)
        self.local_queues = LocalQueuesOracle(graph)
        self.spec = spec
        self.graph = graph
        self._tasks = frozenset(spec.tasks)
        self._exactly_once = spec.checkpoints.exactly_once
        self._inputs: dict[TaskId, list[ChannelId]] = {task: [] for task in spec.tasks}
        for edge in graph.edges:
            for channel in graph.channels(edge):
                self._inputs[graph.receiver(channel)].append(channel)
        self._sender = {channel: graph.sender(channel) for channels in self._inputs.values() for channel in channels}
        self.attempt = -1
        """Number of the newest attempt that was deployed."""
        self.attempts: dict[TaskId, int] = {}
        """Attempt of each task, because regions restart on their own."""
        self._sent: dict[ChannelId, int] = {}
        self._sent_rows: dict[ChannelId, int] = {}
        self._sent_controls: dict[ChannelId, deque[int]] = {}
        """Sequence numbers of elements that are not batches and may not have been taken."""
        self._taken: dict[ChannelId, int] = {}
        self._taken_rows: dict[ChannelId, int] = {}
        self._starving_since_ms: dict[ChannelId, int] = {}
        """Channels that wait for credit, and since when they have neither sent nor requested anything, in ms."""
        self._finished: set[TaskId] = set()
        self._cuts: dict[int, _Cut] = {}
        self.with_in_flight: set[int] = set()
        """Completed checkpoints with in-flight data."""
        self.with_finished: set[int] = set()
        """Completed checkpoints in which some tasks had finished and others had not."""

    @property
    def completed(self) -> int:
        """Returns the number of completed checkpoints."""
        return self.files.completed

    # --- life of an attempt ---------------------------------------------------------------------------------------

    def deployed(
        self, attempt: int, restored: int | None, from_itself: bool, tasks: Iterable[TaskId] | None = None
    ) -> None:
        """Checks the start of an attempt of these tasks. None means all tasks.

        It must be restored from the newest completed checkpoint of this job, if there is one. Damage is only found by
        reading, so a damaged checkpoint may be tried first, and then the newest undamaged one.
        """
        newest = self.files.newest_whole
        to_be_tried = {number for number in self.files.damaged if newest is not None and number > newest}
        if newest is not None and (restored not in {newest, *to_be_tried} or not from_itself):
            raise InvariantViolated(7, f"attempt {attempt} is restored from checkpoint {restored} instead of {newest}")
        if restored in self.files.passed_over:
            raise InvariantViolated(
                7, f"attempt {attempt} is restored from checkpoint {restored}, which an earlier restore has skipped"
            )
        if from_itself and restored is not None:
            self.files.passed_over |= {number for number in self.files.damaged if number > restored}
        if newest is None and restored is not None and from_itself:
            raise InvariantViolated(
                7, f"attempt {attempt} is restored from checkpoint {restored}, which is not complete"
            )
        self.attempt = attempt
        self.tables.deployed(restored if from_itself else None)
        again = self._tasks if tasks is None else frozenset(tasks)
        self.attempts |= dict.fromkeys(again, attempt)
        self.splits.deployed(again)
        for channel in (channel for task in again for channel in self._inputs[task]):
            known = (self._sent, self._sent_rows, self._sent_controls, self._taken, self._taken_rows)
            for positions in (*known, self._starving_since_ms):
                positions.pop(channel, None)
        self._finished -= again
        self._cuts.clear()

    def finished(self, attempt: int, task: TaskId) -> None:
        """Records that a task has reported its end."""
        if attempt == self.attempts.get(task):
            self._finished.add(task)

    def is_current(self, machine: TaskMachine) -> bool:
        """Returns whether a task belongs to its newest attempt.

        A task of an older attempt may continue to run for a while.
        """
        return machine.attempt == self.attempts.get(machine.descriptor.task)

    # --- channels -------------------------------------------------------------------------------------------------

    def sent(self, frame: do.SendFrame) -> None:
        """Checks a frame that leaves its sender: it must continue where the previous frame of the channel ended."""
        if frame.attempt != self.attempts.get(self._sender[frame.channel]):
            return
        self._starving_since_ms.pop(frame.channel, None)
        due = self._sent.get(frame.channel, 0)
        if frame.first_sequence != due:
            raise InvariantViolated(1, f"{frame.channel} sends element {frame.first_sequence} instead of {due}")
        self._sent[frame.channel] = due + len(frame.elements)
        controls = [due + i for i, element in enumerate(frame.elements) if not isinstance(element, pa.RecordBatch)]
        self._sent_controls.setdefault(frame.channel, deque()).extend(controls)
        self._sent_rows[frame.channel] = self._sent_rows.get(frame.channel, 0) + _rows(frame.elements)

    def before_turn(self, machine: TaskMachine) -> bool:
        """Returns whether an output of a task is certainly full, so that the task must not take more input in its next
        turn.
        """
        limit = machine.descriptor.limits.queue_bytes_max
        return any(
            sum(element.nbytes for element in output.queue if isinstance(element, pa.RecordBatch)) >= limit
            for output in machine.outputs.channels.values()
            if output.queued_bytes
        )

    def after_event(self, machine: TaskMachine, event: ev.TaskEvent, full: bool, now_ms: int) -> None:
        """Checks the queues of a task after its machine has handled an event."""
        if not self.is_current(machine):
            return
        self.moments.after_event(machine, event)
        self.sessions.after_event(machine, event)
        if machine.outputs.starving:
            self._check_starving(machine, now_ms)
        if isinstance(event, ev.FrameArrived):
            if event.attempt == machine.attempt:
                self._check_queue(machine, event.channel)
        elif isinstance(event, ev.TurnGranted):
            if self._check_taken(machine) and full:
                raise InvariantViolated(10, f"{machine.descriptor.task} takes input while an output queue is full")
        elif isinstance(event, ev.CheckpointAborted):
            check_held(machine, event)

    def _check_taken(self, machine: TaskMachine) -> bool:
        """Checks a turn and returns whether it took input.

        A turn takes one element of one channel, or several batches in a row, and processes all of their rows.
        """
        moved = rows = 0
        for (channel, taken), (_, rows_taken) in zip(
            machine.inputs.positions(), machine.inputs.row_positions(), strict=True
        ):
            rows += rows_taken - self._taken_rows.get(channel, 0)
            self._taken_rows[channel] = rows_taken
            before = self._taken.get(channel, 0)
            if taken == before:
                continue
            controls = self._sent_controls.get(channel, deque())
            while controls and controls[0] < before:
                controls.popleft()
            alone = taken == before + 1 or not controls or controls[0] >= taken
            if moved or taken < before or not alone or taken > self._sent.get(channel, 0):
                raise InvariantViolated(
                    1, f"{channel}: a turn moved the input from element {before} to {taken}, which one turn cannot take"
                )
            moved = taken - before
            self._taken[channel] = taken
        limits = machine.descriptor.limits
        if rows and rows != machine.chain.pace.rows:
            raise InvariantViolated(
                1, f"{machine.descriptor.task} took {rows} rows, but processed {machine.chain.pace.rows}"
            )
        if moved > 1 and rows > limits.merged_rows_max:
            raise InvariantViolated(
                10, f"{machine.descriptor.task} merged {rows} rows in a turn; the limit is {limits.merged_rows_max}"
            )
        if moved > 1:
            self.coverage.saw("batches_merged")
        return moved > 0

    def _check_starving(self, machine: TaskMachine, now_ms: int) -> None:
        for channel, output in machine.outputs.channels.items():
            if output.starved_at_bytes is None:
                self._starving_since_ms.pop(channel, None)
                continue
            waited_ms = now_ms - self._starving_since_ms.setdefault(channel, now_ms)
            if waited_ms > PROBES_LATE * machine.descriptor.limits.probe_ms:
                raise InvariantViolated(
                    7, f"{channel} has waited {waited_ms} ms for credit, but its task has not requested any"
                )

    def _check_queue(self, machine: TaskMachine, channel: ChannelId) -> None:
        credit_bytes = machine.descriptor.limits.credit_bytes
        queued = [e.nbytes for e in machine.inputs[channel].queue if isinstance(e, pa.RecordBatch)]
        if sum(queued) > credit_bytes + max(queued, default=0):
            raise InvariantViolated(10, f"{channel} queues {sum(queued)} bytes; its credit is {credit_bytes}")

    # --- cuts -----------------------------------------------------------------------------------------------------

    def snapshot_taken(self, machine: TaskMachine, snapshot: do.PersistSnapshot) -> None:
        """Checks the snapshot of a task after its synchronous part."""
        if not self.is_current(machine):
            return
        if any(number < snapshot.checkpoint_id for number in self._cuts):
            self.coverage.saw("concurrent_checkpoints")
        cut = self._cut(snapshot.checkpoint_id)
        task = machine.descriptor.task
        if task in cut.taken:
            raise InvariantViolated(3, f"{task} takes the snapshot of checkpoint {snapshot.checkpoint_id} twice")
        self.splits.snapshot_taken(machine, snapshot)
        self.moments.snapshot_taken(int(snapshot.checkpoint_id), machine)
        cut.taken[task] = dict(snapshot.input_positions)
        cut.put.update(snapshot.output_positions)
        for channel in self._inputs[task]:
            waiting = _rows(machine.inputs[channel].recovered)
            if waiting:
                cut.waiting[channel] = waiting

    def channels_stored(self, machine: TaskMachine, stored: do.PersistChannelState) -> None:
        """Records the in-flight rows that a task has stored with its snapshot."""
        if not self.is_current(machine):
            return
        cut = self._cut(stored.checkpoint_id)
        for part in stored.channels:
            again = _rows(part.elements[: part.recovered])
            new = _rows(part.elements[part.recovered :])
            cut.in_flight[part.channel] = cut.in_flight.get(part.channel, 0) + new
            cut.recovered[part.channel] = cut.recovered.get(part.channel, 0) + again

    def acknowledged(self, machine: TaskMachine, checkpoint_id: int) -> None:
        """Records that a task has acknowledged its part of a checkpoint."""
        if self.is_current(machine) and (cut := self._cuts.get(checkpoint_id)) is not None:
            cut.acknowledged.add(machine.descriptor.task)

    def aborted(self, checkpoint_id: int) -> None:
        """Records that the coordinator has aborted a checkpoint. Later work of tasks for it is ignored."""
        self._cuts.pop(checkpoint_id, None)

    def _cut(self, checkpoint_id: int) -> _Cut:
        return self._cuts.setdefault(checkpoint_id, _Cut(self.attempt))

    def _completes(self, metadata: CheckpointMetadata) -> None:
        number = int(metadata.checkpoint_id)
        if metadata.attempt < self.attempt:
            raise InvariantViolated(
                7, f"checkpoint {number} of attempt {metadata.attempt} completed after attempt {self.attempt} began"
            )
        acknowledged = acknowledged_tasks(metadata)
        if acknowledged.keys() != self._tasks:
            missing = sorted(str(t) for t in self._tasks - acknowledged.keys())
            raise InvariantViolated(4, f"checkpoint {number} completed without acknowledgements of {missing}")
        cut = self._cuts.get(number) or _Cut(self.attempt)
        unseen = [t for t in self._tasks - cut.taken.keys() if t not in self._finished or not acknowledged[t]]
        if unseen:
            raise InvariantViolated(4, f"checkpoint {number} completed without a snapshot of {min(unseen)}")
        silent = cut.taken.keys() - cut.acknowledged
        if silent:
            raise InvariantViolated(4, f"checkpoint {number} completed, but {min(silent)} has not acknowledged it")
        if len(cut.taken) < len(self._tasks):
            self.coverage.saw("finished_tasks_in_plan")
        self._check_cut(number, cut)
        self.records.completed(metadata)
        self.commits.completed(metadata)
        self.splits.completes(metadata, {task for task, over in acknowledged.items() if over})
        kept = len(self.files.present)
        if kept > self.spec.checkpoints.retained + COMPLETED_WAITING_MAX + COPIES_MAX:
            raise InvariantViolated(
                5, f"{kept} checkpoints exist, but only {self.spec.checkpoints.retained} are to be retained"
            )
        unneeded = self.files.unneeded_folders()
        if unneeded > UNNEEDED_FOLDERS_MAX:
            raise InvariantViolated(5, f"{unneeded} folders of shared files exist to which no checkpoint refers")
        finished = sum(acknowledged.values())
        if 0 < finished < len(acknowledged):
            self.with_finished.add(number)
        if any(subtask.in_flight is not None for subtask in metadata.subtasks):
            self.with_in_flight.add(number)
        if self.files.writers_of(metadata) - self.files.present.keys():
            self.coverage.saw("shared_files_kept")
        for older in [n for n in self._cuts if n <= number]:
            del self._cuts[older]
        for memory in (self.with_finished, self.with_in_flight):
            memory.intersection_update(self.files.present)

    def _check_cut(self, number: int, cut: _Cut) -> None:
        went_on = False
        for task, inputs in cut.taken.items():
            for channel, taken in inputs.items():
                put = cut.put.get(channel)
                if put is None:
                    put = self._sent_rows.get(channel, 0)
                covered = taken + cut.in_flight.get(channel, 0)
                went_on |= covered > put
                if covered != put and (self._exactly_once or covered < put):
                    raise InvariantViolated(
                        3,
                        f"checkpoint {number} does not fit together on {channel}: the sender's snapshot follows "
                        f"{put} rows, and {task} had taken {taken} and stored {covered - taken} as in flight",
                    )
                waiting = cut.waiting.get(channel, 0)
                again = cut.recovered.get(channel, 0)
                if waiting != again:
                    raise InvariantViolated(
                        3,
                        f"checkpoint {number}: {task} had {waiting} unprocessed restored rows of {channel}, but "
                        f"stored {again}",
                    )
        if went_on:
            self.coverage.saw("at_least_once")


def _rows(elements: Iterable[Element]) -> int:
    return sum(element.num_rows for element in elements if isinstance(element, pa.RecordBatch))
