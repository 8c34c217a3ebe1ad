"""Checks from outside that every split of a source is in one place, where the coordinator assigns splits.

It does not believe the coordinator: it looks at what tasks put into their snapshots, and at the pool of the checkpoint
that is then completed. For each such source:

    splits in the snapshots of its subtasks + splits in the pool == all splits of the source, and none twice

A subtask that had finished before has no snapshot any more: it has read what it had in its last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tidegate.actors.coordinator.job_spec import AssignedSource, JobSpec
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.split_positions import FrozenPositions
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.violation import InvariantViolated


class SplitsOracle:
    """Watches the assigned sources of one job."""

    def __init__(self, spec: JobSpec, coverage: Coverage) -> None:
        self._sources: dict[TaskId, AssignedSource] = {
            task: source for task in spec.sources if (source := spec.assigned_source(task.vertex)) is not None
        }
        self._coverage = coverage
        self._cuts: dict[int, dict[TaskId, dict[str, bool]]] = {}
        """For each checkpoint and task the splits of its snapshot, and whether they are read to the end."""
        self._last: dict[TaskId, dict[str, bool]] = {}
        """The same of the last snapshot of each task in its attempt."""
        self._given: dict[TaskId, set[str]] = {}
        """What each task was given in its attempt."""
        self._back: set[tuple[TaskId, str]] = set()
        """What tasks were given that have failed since."""

    def deployed(self, tasks: Iterable[TaskId]) -> None:
        """An attempt of these tasks begins."""
        for task in tasks:
            self._last.pop(task, None)
            self._back |= {(task, split_id) for split_id in self._given.pop(task, ())}
        self._cuts.clear()

    def assigned(self, task: TaskId, event: ev.SplitsAssigned) -> None:
        """The coordinator answers a task."""
        given = self._given.setdefault(task, set())
        beside = [other for other in self._sources if other.vertex == task.vertex and other != task]
        for split in event.splits:
            others = [other for other in beside if split.split_id in self._given.get(other, ())]
            if others:
                raise InvariantViolated(9, f"split {split.split_id} is given to {task}, and {others[0]} has it")
            if split.split_id not in given:
                given.add(split.split_id)
                self._coverage.saw("split_assigned")
                if any((other, split.split_id) in self._back for other in (task, *beside)):
                    self._coverage.saw("split_assigned_again")

    def snapshot_taken(self, machine: TaskMachine, snapshot: do.PersistSnapshot) -> None:
        """A task of the newest attempt has taken a snapshot."""
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
        """A checkpoint becomes complete. `finished`: tasks whose part is that of a finished one."""
        cut = self._cuts.get(int(metadata.checkpoint_id), {})
        for source in set(self._sources.values()):
            tasks = [task for task, of in self._sources.items() if of is source]
            pool = {split.split_id for of in metadata.pools if of.uid == source.uid for split in of.splits}
            if finished.issuperset(tasks):
                # Restored as finished they know no split. A stop with a drain leaves the rest unread on purpose.
                if pool and metadata.kind is not SnapshotKind.TERMINATE:
                    raise InvariantViolated(7, f"{source.uid} has finished, and nobody has read {min(pool)}")
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
                raise InvariantViolated(9, f"checkpoint {number}: {split_id} was read to the end, and is read again")
            places[split_id] += 1
        lost = {split.split_id for split in source.splits} - places.keys()
        twice = [split_id for split_id, count in places.items() if count > 1]
        if lost:
            raise InvariantViolated(3, f"checkpoint {number}: split {min(lost)} is in no snapshot and not in the pool")
        if twice:
            raise InvariantViolated(3, f"checkpoint {number}: split {min(twice)} is in two places")
        if pool and running:
            self._coverage.saw("split_in_pool")
