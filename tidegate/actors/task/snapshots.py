"""Tracks the snapshots of one task from the synchronous part to the end of the checkpoint, and the sink files they
cover.

`SubtaskCheckpoints` calls it. Rules:

- A cancelled snapshot is never acknowledged. Files that its asynchronous part still writes are deleted.
- A snapshot is acknowledged only when its state, its in-flight elements, *and* every sink file staged before its
  barrier are durable.
- A sink file stays pending until a checkpoint that covers it is complete. So the next checkpoint commits the files of
  an aborted one.
- Rows of sinks that commit in their tasks follow the rules of `SubtaskCommits` instead.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.incremental_base import Chain, ChangeLog, ChangelogLimits, IncrementalBase
from tidegate.actors.task.instructions import CommitPrepared, StageFile
from tidegate.actors.task.invariants import may_acknowledge
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.actors.task.task_commits import SubtaskCommits
from tidegate.operators.sinks.sink import StagedRows
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import (
    Committable,
    DataFile,
    NativeState,
    PreparedRows,
    SnapshotKind,
    StateHandle,
    StoredSplit,
)
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot


class StagedFiles:
    """The sink files of one sink in one subtask, by index. A file is being written, durable, or covered by a completed
    checkpoint.
    """

    def __init__(self) -> None:
        self.next_index = 0
        self._committed = 0
        self._durable: dict[int, DataFile] = {}

    @property
    def in_flight(self) -> int:
        """Returns the number of sink files that are being written."""
        return self.next_index - self._committed - len(self._durable)

    def start(self) -> int:
        """Returns the index of a new sink file, which is being written from now on."""
        self.next_index += 1
        return self.next_index - 1

    def durable(self, index: int, file: DataFile) -> None:
        """Records that a file is written durably. Repeated calls change nothing."""
        if index >= self.next_index:
            raise ProtocolError(
                f"sink file {index} was written, but only {self.next_index} files were ordered; this is a bug in "
                "tidegate, please report it"
            )
        if index >= self._committed:
            self._durable[index] = file

    def covered(self, end: int) -> tuple[int, tuple[DataFile, ...]] | None:
        """Returns the pending files with an index below `end`, and the index of the first of them. None while one
        is being written.
        """
        indices = range(self._committed, end)
        if any(index not in self._durable for index in indices):
            return None
        return self._committed, tuple(self._durable[index] for index in indices)

    def commit(self, end: int) -> None:
        """Removes the files with an index below `end` from the pending ones, because a completed checkpoint
        covers them.
        """
        for index in range(self._committed, end):
            del self._durable[index]
        self._committed = max(self._committed, end)


class SnapshotPart(enum.Enum):
    """The parts of a snapshot that are written separately."""

    STATE = "state"
    CHANNELS = "channels"
    CHANGELOG = "changelog"


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one part of a snapshot."""

    handle: StateHandle | None = None
    layer: StateHandle | None = None
    native: tuple[NativeState, ...] = ()

    def files(self, base: IncrementalBase | None) -> dict[str, int]:
        """Returns the size in bytes, by path, of each file that was written for the part.

        Files of a state backend that belong to `base` are not included.
        """
        known = frozenset[str]() if base is None else base.paths
        found = {h.path: h.size_bytes for h in (self.handle, self.layer) if h is not None and h.path is not None}
        return found | {f.path: f.size_bytes for state in self.native for f in state.files if f.path not in known}


@dataclass(slots=True)
class TaskSnapshot:
    """One snapshot of a task, from its barrier until its checkpoint is complete or aborted."""

    checkpoint_id: CheckpointId
    kind: SnapshotKind
    finished: bool
    unaligned: bool
    start_delay_ms: int
    alignment_ms: int
    started_at_ms: int
    ends: Mapping[OperatorUid, int]
    """For each sink, the number of files that were started before the barrier."""
    missing: set[SnapshotPart] = field(default_factory=lambda: {SnapshotPart.STATE})
    """Parts that are not durable yet."""
    writing: set[SnapshotPart] = field(default_factory=lambda: {SnapshotPart.STATE})
    """Parts that are being written."""
    written: dict[SnapshotPart, Written] = field(default_factory=dict)
    base: IncrementalBase | None = None
    """The base of an incremental snapshot, or None."""
    chain: Chain | None = None
    """The layers of the changelog to which the snapshot refers, or None."""
    chain_since: int = 0
    """The number of the newest changelog layer of the previous snapshot."""
    sync_ms: int = 0
    read_splits: tuple[StoredSplit, ...] = ()
    """The splits of a source that were read to their end."""
    acknowledged: bool = False
    cancelled: bool = False

    @property
    def lineage(self) -> IncrementalBase:
        """Returns the snapshot as a base for later snapshots. Its state must be written."""
        state = self.written[SnapshotPart.STATE]
        if self.chain is not None:
            return IncrementalBase(self.checkpoint_id, self.chain.handles)
        below = () if self.base is None else self.base.layers
        return IncrementalBase(
            self.checkpoint_id, below if state.layer is None else (*below, state.layer), state.native
        )

    @property
    def incremental_bytes(self) -> int:
        """Returns the bytes of state that were written for this snapshot, without in-flight elements."""
        state = self.written[SnapshotPart.STATE]
        inline = (h.size_bytes for h in (state.handle, state.layer) if h is not None and h.path is None)
        logged = () if self.chain is None else self.chain.layers
        segments = (layer.size_bytes for layer in logged if layer.number > self.chain_since)
        return sum(inline) + sum(state.files(self.base).values()) + sum(segments)


@dataclass(slots=True)
class SnapshotTracker:
    """The unfinished snapshots of a task, and the state of its sink files."""

    subtask: SubtaskIndex
    tables: Mapping[OperatorUid, str]
    commits: Mapping[OperatorUid, SubtaskCommits] = field(default_factory=dict)
    """The commits of each sink that commits in its tasks."""
    files: dict[OperatorUid, StagedFiles] = field(default_factory=dict)
    _snapshots: dict[CheckpointId, TaskSnapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files = {uid: StagedFiles() for uid in self.tables}

    @property
    def files_in_flight(self) -> int:
        """Returns the number of sink files that are being written."""
        files = sum(staged.in_flight for staged in self.files.values())
        return files + sum(commits.in_flight for commits in self.commits.values())

    @property
    def commits_behind(self) -> int:
        """Returns the largest number of outstanding commits of any sink that commits in its tasks."""
        return max((commits.behind for commits in self.commits.values()), default=0)

    @property
    def all_committed(self) -> bool:
        """Returns whether all prepared rows of sinks that commit in their tasks are committed."""
        return all(commits.confirmed for commits in self.commits.values())

    def stage(self, taken: Iterable[tuple[OperatorUid, StagedRows]], checkpoint_id: CheckpointId) -> list[StageFile]:
        """Returns the instructions to write these rows of sinks. `checkpoint_id`: the checkpoint for which rows
        are prepared.
        """
        return [self._staged(uid, rows, checkpoint_id if rows.prepare else None) for uid, rows in taken]

    def staged(self, event: ev.FileStaged) -> None:
        """Records that a sink file is durable, or that rows of a user's sink were written."""
        if event.uid in self.commits:
            self.commits[event.uid].written(event.index, event.parts)
        else:
            self.files[event.uid].durable(event.index, event.file)

    def next_commits(self) -> list[CommitPrepared]:
        """Returns the instructions for the sink commits that can start now."""
        found = (commits.next_commit() for commits in self.commits.values())
        return [commit for commit in found if commit is not None]

    def _staged(self, uid: OperatorUid, rows: StagedRows, checkpoint_id: CheckpointId | None) -> StageFile:
        committing = self.commits.get(uid)
        index = self.files[uid].start() if committing is None else committing.start(checkpoint_id)
        return StageFile(uid, index, rows.batches, rows.folder, rows.prepare, checkpoint_id)

    def ends(self) -> dict[OperatorUid, int]:
        """Returns, for each sink, the index of its next file, which is the number of files that were started so far."""
        files = {uid: staged.next_index for uid, staged in self.files.items()}
        return files | {uid: commits.next_index for uid, commits in self.commits.items()}

    def begin(self, snapshot: TaskSnapshot) -> None:
        """Starts to track a snapshot whose synchronous part is done."""
        assert snapshot.checkpoint_id not in self._snapshots, "a task takes each snapshot once"
        if snapshot.chain is not None:
            snapshot.missing.add(SnapshotPart.CHANGELOG)
            snapshot.writing.add(SnapshotPart.CHANGELOG)
        self._snapshots[snapshot.checkpoint_id] = snapshot

    def await_channels(self, checkpoint_id: CheckpointId) -> None:
        """Records that the snapshot also waits for its in-flight elements, which have not all arrived."""
        self._snapshots[checkpoint_id].missing.add(SnapshotPart.CHANNELS)

    def overtook(self, checkpoint_id: CheckpointId) -> None:
        """Records that the barrier has overtaken elements in an output queue after the snapshot was taken."""
        self._snapshots[checkpoint_id].unaligned = True

    def write_channels(self, checkpoint_id: CheckpointId, empty: bool) -> None:
        """Records that all in-flight elements have arrived. They are being written, or there were none (`empty`)."""
        snapshot = self._snapshots[checkpoint_id]
        assert SnapshotPart.CHANNELS in snapshot.missing and not snapshot.cancelled
        if empty:
            snapshot.missing.remove(SnapshotPart.CHANNELS)
        else:
            snapshot.writing.add(SnapshotPart.CHANNELS)

    def persisted(
        self, checkpoint_id: CheckpointId, part: SnapshotPart, written: Written, sync_ms: int = 0
    ) -> list[str]:
        """Records that a part of a snapshot is durable. Returns the files to delete if the snapshot was cancelled
        meanwhile.
        """
        snapshot = self._snapshots.get(checkpoint_id)
        if snapshot is None or part not in snapshot.writing:
            return []
        snapshot.writing.remove(part)
        if snapshot.cancelled:
            self._forget_if_over(snapshot)
            return list(written.files(snapshot.base))
        snapshot.missing.remove(part)
        snapshot.sync_ms = max(snapshot.sync_ms, sync_ms)
        snapshot.written[part] = written
        return []

    def changelog_answered(self) -> list[CheckpointId]:
        """Records that a layer of the changelog was written or has failed. Returns the checkpoints whose snapshots can
        no longer become durable.
        """
        failed = []
        for snapshot in self._snapshots.values():
            chain = snapshot.chain
            if chain is None or SnapshotPart.CHANGELOG not in snapshot.writing:
                continue
            if chain.durable and not snapshot.cancelled:
                snapshot.writing.remove(SnapshotPart.CHANGELOG)
                snapshot.missing.remove(SnapshotPart.CHANGELOG)
            elif chain.failed:
                failed.append(snapshot.checkpoint_id)
        return failed

    def failed(self, checkpoint_id: CheckpointId, part: SnapshotPart) -> tuple[bool, list[str]]:
        """Records that a part could not be written. Returns whether to decline the checkpoint, and the files to
        delete.
        """
        snapshot = self._snapshots.get(checkpoint_id)
        if snapshot is None or part not in snapshot.writing:
            return False, []
        snapshot.writing.remove(part)
        declines = not snapshot.cancelled
        return declines, self._cancel(snapshot)

    def abort(self, checkpoint_id: CheckpointId) -> list[str]:
        """Cancels a snapshot. Returns its durable files, which the caller has to delete."""
        snapshot = self._snapshots.get(checkpoint_id)
        return [] if snapshot is None else self._cancel(snapshot)

    def complete(self, checkpoint_id: CheckpointId) -> TaskSnapshot | None:
        """Records that a checkpoint has completed, so that its sink files are no longer pending. Returns its snapshot,
        or None if the notification is repeated.

        Raises ProtocolError if this task has not acknowledged it.
        """
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is None:
            return None
        if not snapshot.acknowledged:
            raise ProtocolError(
                f"checkpoint {checkpoint_id} completed without this task's acknowledgement; this is a bug in "
                "tidegate, please report it"
            )
        for uid, end in snapshot.ends.items():
            if uid in self.commits:
                self.commits[uid].complete(end)
            else:
                self.files[uid].commit(end)
        return snapshot

    def abort_before(self, checkpoint_id: CheckpointId) -> list[str]:
        """Cancels all older snapshots, because a newer checkpoint is complete. Returns the files to delete."""
        older = [n for n in self._snapshots if n < checkpoint_id]
        return [path for number in older for path in self.abort(number)]

    def to_acknowledge(self) -> list[tuple[TaskSnapshot, tuple[Committable, ...], tuple[PreparedRows, ...]]]:
        """Returns the snapshots that have become durable, and marks them as acknowledged.

        Each comes with the files that the coordinator commits, and with the prepared rows that the task commits.
        """
        ready = []
        for snapshot in self._snapshots.values():
            if snapshot.acknowledged or snapshot.cancelled:
                continue
            covered = {uid: files.covered(snapshot.ends[uid]) for uid, files in self.files.items()}
            prepared = {uid: commits.covered(snapshot.ends[uid]) for uid, commits in self.commits.items()}
            durable = all(found is not None for found in (*covered.values(), *prepared.values()))
            if not may_acknowledge(snapshot.missing, durable):
                continue
            snapshot.acknowledged = True
            committables = tuple(
                Committable(uid, self.subtask, self.tables[uid], found[0], found[1])
                for uid, found in covered.items()
                if found is not None and found[1]
            )
            rows = tuple(each for found in prepared.values() for each in found or ())
            ready.append((snapshot, committables, rows))
        return ready

    def _cancel(self, snapshot: TaskSnapshot) -> list[str]:
        parts = () if snapshot.acknowledged or snapshot.cancelled else snapshot.written.values()
        paths = [path for written in parts for path in written.files(snapshot.base)]
        snapshot.cancelled = True
        # The changelog is written anyway. This snapshot does not wait for it any more.
        snapshot.writing.discard(SnapshotPart.CHANGELOG)
        self._forget_if_over(snapshot)
        return paths

    def _forget_if_over(self, snapshot: TaskSnapshot) -> None:
        if not snapshot.writing:
            del self._snapshots[snapshot.checkpoint_id]


class ChangelogWriter:
    """The changelog of one task: freezes segments and bases, and returns the layers for snapshots.

    `SubtaskCheckpoints` calls it, and `ChangeLog` decides when to write a segment or base. `changes` freezes only the
    keyed state of the task's operators. `changed_bytes` returns how many bytes have changed.
    """

    def __init__(
        self,
        changes: Callable[[Cut], tuple[OperatorSnapshot, ...]],
        changed_bytes: Callable[[], int],
        instruct: Callable[[do.TaskInstruction], None],
        limits: ChangelogLimits,
    ) -> None:
        self._changes = changes
        self._changed_bytes = changed_bytes
        self._instruct = instruct
        self._limits = limits
        self._log = ChangeLog((), self._limits)
        self._last_snapshot = 0

    @staticmethod
    def of(
        options: StateBackendOptions, chain: OperatorChain, instruct: Callable[[do.TaskInstruction], None]
    ) -> ChangelogWriter | None:
        """Returns the changelog of a task with these operators, or None if the options disable it."""
        if not options.changelog:
            return None
        limits = ChangelogLimits.of(options.segment_bytes)
        return ChangelogWriter(chain.changes, lambda: chain.changed_bytes, instruct, limits)

    def restored(self, layers: tuple[StateHandle, ...]) -> None:
        """Sets the layers of the restored checkpoint. The changelog adds segments to these layers."""
        self._log = ChangeLog(layers, self._limits)

    def for_snapshot(self, cut: Cut) -> tuple[Cut, Chain | None, int]:
        """Writes the changes since the last segment, for a snapshot that is taken now.

        Returns three values: what the snapshot itself still has to contain, the layers to which it refers (None for a
        canonical savepoint), and the number of the newest layer of the previous snapshot. A canonical savepoint
        contains all state itself, and the changelog begins again with a base: if the savepoint is the only retained
        checkpoint, the old files of the changelog are deleted.
        """
        if cut.canonical:
            self._log.start_anew()
            return cut, None, self._last_snapshot
        self._write(self._log.seal())
        chain = self._log.take()
        since = self._last_snapshot
        self._last_snapshot = chain.layers[-1].number
        return Cut(cut.checkpoint_id, keyed=False), chain, since

    def go_on(self) -> None:
        """Writes a new base or a segment if one is due. The task calls it between two turns."""
        if self._log.wants_base():
            for cut in self._log.seal_with_base():
                self._write(cut)
        elif self._log.wants_segment(self._changed_bytes()):
            self._write(self._log.seal())

    def answered(self, event: ev.SegmentPersisted | ev.SegmentFailed) -> None:
        """Records that a segment or a base was written, or has failed, and deletes files that are no longer
        needed.
        """
        if isinstance(event, ev.SegmentPersisted):
            discarded = self._log.written(event.number, event.whole, event.handle)
        else:
            discarded = self._log.failed(event.number, event.whole)
        paths = tuple(handle.path for handle in discarded if handle.path is not None)
        if paths:
            self._instruct(do.DiscardState(paths))

    def _write(self, cut: Cut) -> None:
        self._instruct(do.PersistSegment(int(cut.checkpoint_id), cut.base is None, self._changes(cut)))
