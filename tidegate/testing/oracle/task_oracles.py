"""Checks the splits that tasks read, the frames that they exchange within a process, and the event time that they
restore.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tidegate.actors.coordinator.job_spec import AssignedSource, JobSpec
from tidegate.actors.graph.job_graph import JobGraph, vertex_labels
from tidegate.actors.graph.slot_plan import slot_plan
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.split_positions import FrozenPositions
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.operators.watermarks.late_rows import GroupMoments
from tidegate.operators.windows.session_windows import END, START, SessionWindows
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind
from tidegate.storage.ids import AttemptNumber, OperatorUid
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage


class SplitsOracle:
    """Checks that each split of a source is in exactly one place, if the coordinator assigns the splits.

    It does not use the state of the coordinator, but reads the snapshots of tasks and the pool in each completed
    checkpoint. For each such source:

        splits in the snapshots of its subtasks + splits in the pool == all splits of the source, each once

    A subtask that had finished before has no snapshot. It has read the splits of its last snapshot.
    """

    def __init__(self, spec: JobSpec, coverage: Coverage) -> None:
        self._sources: dict[TaskId, AssignedSource] = {
            task: source for task in spec.sources if (source := spec.assigned_source(task.vertex)) is not None
        }
        self._coverage = coverage
        self._cuts: dict[int, dict[TaskId, dict[str, bool]]] = {}
        """The splits in the snapshot of each task, by checkpoint and task. True: the split is read to its end."""
        self._last: dict[TaskId, dict[str, bool]] = {}
        """The splits in the last snapshot of each task in its attempt, as in `_cuts`."""
        self._given: dict[TaskId, set[str]] = {}
        """The splits that were assigned to each task in its attempt."""
        self._back: set[tuple[TaskId, str]] = set()
        """The splits that were assigned to tasks which have failed since then."""

    def deployed(self, tasks: Iterable[TaskId]) -> None:
        """Records the start of an attempt."""
        for task in tasks:
            self._last.pop(task, None)
            self._back |= {(task, split_id) for split_id in self._given.pop(task, ())}
        self._cuts.clear()

    def assigned(self, task: TaskId, event: ev.SplitsAssigned) -> None:
        """Checks the splits that the coordinator assigns to a task."""
        given = self._given.setdefault(task, set())
        beside = [other for other in self._sources if other.vertex == task.vertex and other != task]
        for split in event.splits:
            others = [other for other in beside if split.split_id in self._given.get(other, ())]
            if others:
                raise InvariantViolated(9, f"split {split.split_id} is assigned to {task}, but {others[0]} has it")
            if split.split_id not in given:
                given.add(split.split_id)
                self._coverage.saw("split_assigned")
                if any((other, split.split_id) in self._back for other in (task, *beside)):
                    self._coverage.saw("split_assigned_again")

    def snapshot_taken(self, machine: TaskMachine, snapshot: do.PersistSnapshot) -> None:
        """Records the splits in a snapshot of a task of the newest attempt."""
        task = machine.descriptor.task
        source = self._sources.get(task)
        if source is None:
            return
        held = {
            position.split.split_id: position.at_end
            for operator in snapshot.snapshots
            if operator.uid == source.uid
            for state in operator.states
            if isinstance(state, FrozenPositions)
            for position in state.positions
        }
        self._last[task] = held
        self._cuts.setdefault(int(snapshot.checkpoint_id), {})[task] = held

    def completes(self, metadata: CheckpointMetadata, finished: set[TaskId]) -> None:
        """Checks the splits of a completed checkpoint. `finished` are the tasks that it records as finished."""
        cut = self._cuts.get(int(metadata.checkpoint_id), {})
        for source in set(self._sources.values()):
            tasks = [task for task, of in self._sources.items() if of is source]
            pool = {split.split_id for of in metadata.pools if of.uid == source.uid for split in of.splits}
            if finished.issuperset(tasks):
                # Tasks restored as finished have no splits. A stop with a drain leaves the other splits unread.
                if pool and metadata.kind is not SnapshotKind.TERMINATE:
                    raise InvariantViolated(7, f"source {source.uid} has finished, but split {min(pool)} was not read")
                continue
            self._check(int(metadata.checkpoint_id), source, tasks, cut, pool)
        self._cuts = {number: of for number, of in self._cuts.items() if number > metadata.checkpoint_id}

    def _check(
        self,
        number: int,
        source: AssignedSource,
        tasks: list[TaskId],
        cut: dict[TaskId, dict[str, bool]],
        pool: set[str],
    ) -> None:
        running = [cut[task] for task in tasks if task in cut]
        places = Counter(split_id for held in (*running, dict.fromkeys(pool, False)) for split_id in held)
        for split_id in (split_id for task in tasks if task not in cut for split_id in self._last.get(task, {})):
            if places[split_id]:
                raise InvariantViolated(
                    9, f"checkpoint {number}: split {split_id} was read to its end, but is assigned or read again"
                )
            places[split_id] += 1
        lost = {split.split_id for split in source.splits} - places.keys()
        twice = [split_id for split_id, count in places.items() if count > 1]
        if lost:
            raise InvariantViolated(
                3, f"checkpoint {number}: split {min(lost)} is neither in a snapshot nor among the unassigned splits"
            )
        if twice:
            raise InvariantViolated(3, f"checkpoint {number}: split {min(twice)} is stored twice")
        if pool and running:
            self._coverage.saw("split_in_pool")


class AlignmentOracle:
    """Checks that no task reads a split that is too far ahead of its watermark group.

    The limit follows from the group watermark that the task received last in its attempt. The position of a split in
    event time follows from the rows that the task has processed.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._heard: dict[tuple[TaskId, AttemptNumber], int] = {}
        """The group watermark that each task received last, by task and attempt."""

    def heard(self, machine: TaskMachine, event: ev.WatermarkAnnounced) -> None:
        """Records the group watermark that a task receives."""
        if event.attempt == machine.attempt:
            self._heard[machine.descriptor.task, machine.attempt] = event.watermark_ms

    def reads(self, machine: TaskMachine, split_id: str) -> None:
        """Checks that the split that a task reads is within the limit of its group."""
        task = machine.descriptor.task
        source = self._spec.aligned_source(task)
        if source is None or machine.source is None:
            return
        ahead_ms = _watermark_ms(machine, split_id)
        heard_ms = self._heard.get((task, machine.attempt))
        limit_ms = MIN_WATERMARK_MS if heard_ms is None else heard_ms + source.max_drift_ms
        if ahead_ms > limit_ms:
            raise InvariantViolated(
                10,
                f"{task} reads split {split_id!r} at event time {ahead_ms} ms; its watermark group allows up to "
                f"{limit_ms} ms",
            )


def _watermark_ms(machine: TaskMachine, split_id: str) -> int:
    assert machine.source is not None
    in_turn = machine.chain.splits.in_turn and not machine.chain.splits.in_first_part
    split = machine.source.split_ids.index(split_id) if in_turn else None
    aligned = machine.chain.aligned_generator
    assert aligned is not None
    return aligned[1].split_watermark_ms(split)


class _Frame(NamedTuple):
    """A frame that was sent between subtasks of one process and has not arrived yet."""

    attempt: AttemptNumber
    channel: ChannelId
    first_sequence: int

    def __str__(self) -> str:
        return f"frame {self.first_sequence} of {self.channel} in attempt {self.attempt}"


class LocalQueuesOracle:
    """Checks the frames that subtasks of one process send to each other (invariant 1). Rules:

    - A frame arrives once, in order, in the process and in the attempt in which it was sent.
    - It arrives before a subtask of that process takes its next turn, unless its receiver has ended.
    - When a process ends, the frames in its queue are lost.
    """

    def __init__(self, graph: JobGraph) -> None:
        workers = slot_plan(graph, vertex_labels(graph)).workers
        channels = (channel for edge in graph.edges for channel in graph.channels(edge))
        self._receivers = {
            channel: graph.receiver(channel)
            for channel in channels
            if workers[graph.sender(channel)] == workers[graph.receiver(channel)]
        }
        """The receiver of each channel between subtasks of one worker."""
        self._sent: dict[str, deque[_Frame]] = {}

    def sent(self, process: str, frame: do.SendFrame) -> bool:
        """Records a sent frame. Returns whether it stays within its process."""
        if frame.channel not in self._receivers:
            return False
        self._sent.setdefault(process, deque()).append(_Frame(frame.attempt, frame.channel, frame.first_sequence))
        return True

    def arrived(self, process: str, event: ev.FrameArrived) -> None:
        """Checks a frame that arrives. Frames of other attempts that were sent before it no longer arrive."""
        if event.channel not in self._receivers:
            return
        frame = _Frame(event.attempt, event.channel, event.first_sequence)
        sent = self._sent.get(process, deque())
        if frame not in sent:
            raise InvariantViolated(1, f"{frame} arrives in {process} without being sent, or for a second time")
        while (before := sent.popleft()) != frame:
            if before.attempt == frame.attempt and before.channel == frame.channel:
                raise InvariantViolated(1, f"{frame} arrives in {process} before {before}, which was sent earlier")

    def turn(self, process: str, running: Mapping[TaskId, AttemptNumber]) -> None:
        """Checks that all frames have arrived before a turn.

        `running` has the subtasks of the process with their attempts.
        """
        sent = self._sent.get(process)
        if not sent:
            return
        for frame in sent:
            if running.get(self._receivers[frame.channel]) == frame.attempt:
                raise InvariantViolated(1, f"{process} takes a turn before {frame} has arrived")
        sent.clear()

    def ended(self, process: str) -> bool:
        """Records the end of a process. Returns whether frames were in its queue."""
        return bool(self._sent.pop(process, None))


_CHECKPOINTS_MAX = 200

Moments = dict[tuple[OperatorUid, int], int]
"""Event time by operator and key group, in ms."""


class MomentsOracle:
    """Checks that a restore gives operators the same event time as in the snapshot.

    Windows, joins and state with a time to live store it for each key group. If it moved back, a late row would be
    accepted. The output does not always show that, because which row is late can depend on the order of channels. So
    event time is recorded when a snapshot is taken, and compared when a task is restored.
    """

    def __init__(self) -> None:
        self._of: dict[int, Moments] = {}

    def snapshot_taken(self, checkpoint_id: int, machine: TaskMachine) -> None:
        """Records the event time of a task after the synchronous part of its snapshot."""
        if machine._operators_finished:
            return
        self._of.setdefault(checkpoint_id, {}).update(_moments(machine))
        while len(self._of) > _CHECKPOINTS_MAX:
            del self._of[min(self._of)]

    def after_event(self, machine: TaskMachine, event: ev.TaskEvent) -> None:
        """Compares the event time of a task that was restored from a checkpoint of this job with the recorded one."""
        if not isinstance(event, ev.TaskRestored) or event.finished or event.checkpoint_id is None:
            return
        then = self._of.get(event.checkpoint_id, {})
        for (uid, group), moment_ms in _moments(machine):
            if moment_ms != then.get((uid, group), moment_ms):
                raise InvariantViolated(
                    9,
                    f"{machine.descriptor.task} restores event time {moment_ms} ms for key group {group} of {uid!r}, "
                    f"but checkpoint {event.checkpoint_id} was taken at {then[uid, group]} ms",
                )


def _moments(machine: TaskMachine) -> Iterator[tuple[tuple[OperatorUid, int], int]]:
    for link in machine.chain.links:
        operator = link.operator
        if not getattr(operator, "drops_late_rows", True):
            continue  # A join that does not drop late rows keeps no event time.
        for found in vars(operator).values():
            if isinstance(found, GroupMoments):
                for groups, moment_ms in found.runs():
                    yield from (((operator.context.uid, group), moment_ms) for group in groups)


_ROWS_MAX = 1_000

Session = tuple[str, int, int]
"""The key of a session, its start and its end in ms."""


class RestoredSessions:
    """Counts sessions that were restored and then extended by later rows.

    The rows of the output show whether such sessions are correct. A task is watched as long as a session is open with
    which it was restored.
    """

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._open: weakref.WeakKeyDictionary[TaskMachine, set[Session]] = weakref.WeakKeyDictionary()

    def after_event(self, machine: TaskMachine, event: ev.TaskEvent) -> None:
        """Records the open sessions after a restore, and counts the extended ones after a turn."""
        if isinstance(event, ev.TaskRestored):
            restored = set(_sessions(machine))
            if restored:
                self._open[machine] = restored
        elif isinstance(event, ev.TurnGranted) and machine in self._open:
            now = set(_sessions(machine))
            before = self._open[machine]
            gone = before - now
            if any(_holds(session, old) for old in gone for session in now - before):
                self._coverage.saw("restored_session_grew")
            if before == gone:
                del self._open[machine]
            else:
                self._open[machine] = before - gone


def _holds(session: Session, old: Session) -> bool:
    return session[0] == old[0] and session[1] <= old[1] and session[2] >= old[2]


def _sessions(machine: TaskMachine) -> Iterator[Session]:
    for link in machine.chain.links:
        operator = link.operator
        if not isinstance(operator, SessionWindows) or operator._opened is None or not operator._opened.exists:
            continue
        state = operator._opened
        number = 0
        some = True
        while some:
            some = False
            for stored, slots in state.table.scan_namespace(number, _ROWS_MAX):
                some = True
                keys = map(str, state.user_keys(stored).to_pylist())
                starts, ends = (state.extra(name).raw(slots).tolist() for name in (START, END))
                yield from zip(keys, starts, ends, strict=True)
            number += 1
