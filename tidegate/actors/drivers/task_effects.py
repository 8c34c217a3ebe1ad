"""The I/O of a task: reads its source, reads and writes its state, and writes and commits its sink rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pyarrow as pa

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.async_calls import AsyncCalls
from tidegate.actors.drivers.committing_sinks import TaskCommitters, committing_context
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.outages import delete_files
from tidegate.actors.drivers.source_reads import HeldSources, SplitReads
from tidegate.actors.drivers.user_sinks import SinkWriters
from tidegate.actors.drivers.work_folders import prepare_work
from tidegate.actors.drivers.write_pace import paced
from tidegate.actors.restore.restore_task import RestoredTask, restore_task
from tidegate.actors.restore.state_follower import StateFollower
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.incremental_base import LAYERS_MAX, Chain, IncrementalBase
from tidegate.actors.task.snapshots import Written
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.connectors.source import SourceSplit
from tidegate.protocol.identity import TaskId
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.checkpoints.memory_limit import MemoryStorage
from tidegate.storage.checkpoints.metadata import NativeState, PreparedPart, PreparedRows, StateHandle
from tidegate.storage.errors import DAMAGE, StorageError, may_be_awaited
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid
from tidegate.storage.state.backend_files import write_native
from tidegate.storage.state.in_flight import ChannelEnd, InFlightRows, write_in_flight
from tidegate.storage.state.local_copies import (
    LocalCopies,
    NodeFolder,
    OpenNodeFolder,
    PrivateFolder,
    remove_stale_copies,
)
from tidegate.storage.state.state_file import write_state

log = logging.getLogger(__name__)


class TaskEffects:
    """Carries out the instructions of one task that do I/O, and returns each result as an event.

    Methods may run on any thread, but reads of the source one at a time. `close` may be called during a read.
    """

    def __init__(
        self,
        context: JobContext,
        descriptor: TaskDescriptor,
        open_store: OpenStore,
        now_ms: Callable[[], int],
        readers: int = 1,
        kept: Mapping[OperatorUid, KeyedBackend] = MappingProxyType({}),
        follower: StateFollower | None = None,
        open_folder: OpenNodeFolder = PrivateFolder,
        why_late: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Creates the effects. Up to `readers` threads restore state. With one reader, the calling thread restores it.

        `kept` has the state backends that the previous attempt left in this process. `follower` has a copy of the state
        of a task that ran in another process, or is None. `open_folder` opens the node's folder for local copies.
        `why_late` returns text about the likely cause of a late `map_async` call, or None.
        """
        self._follower = follower
        self._readers = readers
        self.kept = kept
        self._context = context
        self.descriptor = descriptor
        self._open_store = open_store
        self._now_ms = now_ms
        self._over = threading.Event()
        """Set once the task has ended. Pauses then return, and files that are written afterwards are deleted."""
        held = HeldSources(open_store, context.handed_on, context.job_id, now_ms)
        self._reads = SplitReads(descriptor.source, held, self._over, now_ms)
        copies = context.options.local_copies
        self._copies = None if copies is None else open_folder(copies)
        self._stores = StateStores(context, descriptor.task, open_store, now_ms(), self._copies)
        functions = {s.uid: s.calls for s in descriptor.operators if s.calls is not None}
        self.calls = AsyncCalls(functions, why_late)
        committing = [
            (spec.committing, committing_context(context, descriptor, spec, open_store, self._over))
            for spec in descriptor.operators
            if spec.committing is not None
        ]
        self.sinks = SinkWriters(context.job_id, context.job_name, descriptor, committing)
        self._committers = TaskCommitters(committing, context.storage_outage_ms)
        self._tables = {spec.uid: spec.table for spec in descriptor.operators if spec.table is not None}

    def restore(self, restore: RestorePoint | None) -> ev.TaskRestored | ev.DamageFound:
        """Reads the state of the task's operators from a checkpoint, and its in-flight rows. Deletes files of earlier
        attempts on this node.

        With `restore` None the task starts without state. A damaged checkpoint is returned as DamageFound, and not as a
        failure.
        """
        work = self._context.options.backend.directory
        if work is not None:
            prepare_work(work, self._context.job_id, self.descriptor.task, self.descriptor.attempt)
        if restore is None:
            self.kept = {}
            return ev.TaskRestored(self._now_ms(), ())
        if self._follower is not None:
            self.kept = self._follower.take(restore)
            self._follower = None
        store = self._open_store(restore.root)
        task = self.descriptor.task
        backend = self.descriptor.backend
        own = restore.job_id == self._context.job_id and not restore.savepoint
        # Files of a native savepoint are copies, like the files of the job's own checkpoints. A changelog begins with
        # rows.
        fits = own or (restore.savepoint and not backend.changelog)
        folder = backend.directory if backend.kind == "rocksdb" and fits else None
        known = {uid: kept.kept(restore.checkpoint_id) for uid, kept in self.kept.items()} if own else {}
        usable = {uid: tables for uid, tables in known.items() if tables is not None}
        # State that leads elsewhere is dropped before anything is read: there is not enough memory for both.
        self.kept = {uid: kept for uid, kept in self.kept.items() if uid in usable}
        try:
            context = self._context
            restored = restore_task(
                store,
                restore,
                context.graph,
                task,
                self._copies,
                folder,
                readers=self._readers,
                kept=usable,
                spool_folder=backend.directory if backend.kind == "rocksdb" else None,
            )
        except DAMAGE as error:
            return ev.DamageFound(self._now_ms(), restore.checkpoint_id, f"{task}: {error}")
        part = restored.part
        lineage = None
        if part is not None and own:
            # The files of another job's checkpoint are not this job's to keep.
            lineage = IncrementalBase.of(restore.checkpoint_id, part)
        kept = {uid: kept for uid, kept in self.kept.items() if uid in restored.kept}
        return ev.TaskRestored(
            self._now_ms(),
            restored.tables,
            finished=restored.finished,
            in_flight=restored.in_flight,
            lineage=lineage,
            kept=kept,
            origin=restored.origin,
            prepared=restored.prepared if restore.root == self._context.root else _with_urls(restored, restore.root),
        )

    def read_source(self, instruction: do.ReadSource, patient: bool = True) -> ev.SourceBatchRead | None:
        """Reads one batch of the source. Returns None once the task is closed. A `patient` read may wait for
        rows.
        """
        return self._reads.read(instruction, patient)

    def notify_source(self, splits: Sequence[SourceSplit]) -> None:
        """Notifies the source reader of a completed checkpoint with these splits, before its next read. Never waits."""
        self._reads.checkpoint_completed(splits)

    def persist(self, instruction: do.PersistSnapshot, sync_ms: int) -> ev.SnapshotPersisted | ev.SnapshotFailed | None:
        """Writes the asynchronous part of a snapshot as a few files with checksums, or inlines it if it is small.

        Returns None if the task has ended. Files that are written after that are deleted at once, because the sweep may
        have run already. `sync_ms` is the duration of the synchronous part.
        """
        checkpoint_id = instruction.checkpoint_id
        store = paced(self._stores.to_write(checkpoint_id), self._context.options.paused_ms_max, self._over)
        try:
            written = write_snapshot(store, self._context, self.descriptor.task, instruction)
        except StorageError as error:
            return ev.SnapshotFailed(self._now_ms(), checkpoint_id, str(error), away=may_be_awaited(error))
        if self._over.is_set():
            delete_files(store, written.files(instruction.base))
            return None
        base = frozenset[str]() if instruction.base is None else instruction.base.paths
        self._stores.wrote(checkpoint_id, base | written.files(instruction.base).keys(), instruction.chain)
        return ev.SnapshotPersisted(
            self._now_ms(), checkpoint_id, written.handle, sync_ms, written.layer, written.native
        )

    def persist_channel_state(
        self, instruction: do.PersistChannelState
    ) -> ev.ChannelStatePersisted | ev.SnapshotFailed | None:
        """Writes the in-flight rows of a snapshot to a separate file, or inlines them if they are small.

        Returns None if the task has ended. Files that are written after that are deleted at once.
        """
        task = self.descriptor.task
        graph = self._context.graph
        rows = [
            InFlightRows.of(
                ChannelEnd(
                    graph.edge_name(graph.edges[held.channel.edge]),
                    held.direction.value,
                    held.channel.upstream,
                    held.channel.downstream,
                ),
                (e if isinstance(e, pa.RecordBatch) else e.timestamp_ms for e in held.elements),
            )
            for held in instruction.channels
        ]
        store = self._stores.to_write(instruction.checkpoint_id)
        try:
            handle = write_in_flight(
                store,
                self._context.layout.channels_file(instruction.checkpoint_id, task.vertex, task.subtask),
                rows,
                inline_bytes_max=self._context.options.inline_bytes_max,
            )
        except StorageError as error:
            return ev.SnapshotFailed(
                self._now_ms(), instruction.checkpoint_id, str(error), channels=True, away=may_be_awaited(error)
            )
        files = Written(handle).files(None)
        if self._over.is_set():
            delete_files(store, files)
            return None
        self._stores.wrote(instruction.checkpoint_id, frozenset(files))
        return ev.ChannelStatePersisted(self._now_ms(), instruction.checkpoint_id, handle)

    def persist_segment(self, instruction: do.PersistSegment) -> ev.SegmentPersisted | ev.SegmentFailed | None:
        """Writes a segment of the changelog, or a changelog base. Returns None, and deletes the file, if the task
        has ended.
        """
        store = self._stores.to_write(None)
        descriptor = self.descriptor
        number = instruction.number
        whole = instruction.whole
        try:
            handle = write_segment(store, self._context, descriptor.task, descriptor.attempt, instruction)
        except StorageError as error:
            # A checkpoint reports it only if it needs this segment.
            log.warning("a part of the changelog of %s was not written: %s", descriptor.task, error)
            return ev.SegmentFailed(self._now_ms(), number, whole, str(error), away=may_be_awaited(error))
        if self._over.is_set():
            delete_files(store, Written(handle).files(None))
            return None
        return ev.SegmentPersisted(self._now_ms(), number, whole, handle)

    @property
    def storage_outage_ms(self) -> int:
        """Returns the time, in ms, for which a storage outage is tolerated."""
        return self._context.storage_outage_ms

    @property
    def keeps_copies(self) -> bool:
        """Returns whether `checkpoint_over` has to be called, because there are local copies."""
        return self._stores.keeps_copies

    def checkpoint_over(self, event: ev.CheckpointCompleted | ev.CheckpointAborted) -> None:
        """Deletes local copies that are no longer needed, after a checkpoint was completed or aborted."""
        if isinstance(event, ev.CheckpointCompleted):
            self._stores.completed(event.checkpoint_id)
        else:
            self._stores.aborted(event.checkpoint_id)

    def stage(self, instruction: do.StageFile) -> ev.FileStaged | None:
        """Writes rows of a sink: a data file of a table, or a call of a user's sink. The rows are not visible before
        their commit.

        Returns None once the task is closed.
        """
        if instruction.uid in self.sinks:
            prepared = self.sinks.stage(instruction)
            if prepared is None:
                return None
            return ev.FileStaged(self._now_ms(), instruction.uid, instruction.index, prepared.file, prepared.parts)
        # What reads and writes Parquet is loaded by the tasks that have a table.
        from tidegate.storage.tables.table_files import data_dir, data_file_name, write_data_file

        d = self.descriptor
        folder = f"{data_dir(self._context.job_id, d.attempt)}/{instruction.folder}".rstrip("/")
        path = f"{folder}/{data_file_name(d.task.subtask, instruction.index, instruction.uid)}"
        store = self._open_store(self._tables[instruction.uid])
        file = write_data_file(store, path, instruction.batches)
        if self._over.is_set():
            delete_files(store, (path,))
            return None
        return ev.FileStaged(self._now_ms(), instruction.uid, instruction.index, file)

    def commit(self, instruction: do.CommitPrepared) -> ev.RowsCommitted | None:
        """Commits prepared rows of a sink. Returns None once the task is closed. Raises CommitFailedError."""
        done = self._committers.commit(instruction.uid, instruction.rows)
        return ev.RowsCommitted(self._now_ms(), instruction.uid, instruction.rows) if done else None

    def discard(self, instruction: do.DiscardState) -> None:
        """Deletes files of state that no checkpoint will refer to."""
        delete_files(self._open_store(self._context.root), instruction.paths)

    def hurry(self) -> None:
        """Ends pauses and `map_async` calls, because the task has ended, so that its I/O threads return.

        May be called from any thread.
        """
        self._over.set()
        self.calls.close()

    def close(self) -> None:
        """Closes the source, the sinks and the calls of the task. May be called again."""
        self._over.set()
        if not self._reads.close():
            return
        if self._follower is not None:
            self._follower.close()
        self.sinks.close()
        self._committers.close()
        self.calls.close()


def _with_urls(restored: RestoredTask, root: str) -> tuple[PreparedRows, ...]:
    """Returns the prepared rows of a checkpoint in another storage, with the paths of their files as URLs below
    `root`.
    """

    def of_part(part: PreparedPart) -> PreparedPart:
        return replace(part, files=tuple(join_url(root, path) for path in part.files))

    return tuple(replace(rows, parts=tuple(map(of_part, rows.parts))) for rows in restored.prepared)


COPIES_BYTES_MAX = 64 * 1024**3
"""Limit in bytes of all local copies of a task."""
STALE_MS = 7 * 24 * 3600 * 1000
"""Time in ms after which a node deletes the local copies of a job that has not written any since.

The node was not part of the cluster when that job ended.
"""
REMEMBERED_MAX = 64
"""Limit of checkpoints for which `StateStores` remembers the needed files. Older ones were aborted long ago."""


class StateStores:
    """The stores to which one task writes its state: checkpoint storage and, if the job uses them, local copies.

    With local copies each file is also written to the disk of the node, and a restart reads from there if the copy is
    intact. If storage is the coordinator's memory, the size of a state is limited.
    """

    def __init__(
        self, context: JobContext, task: TaskId, open_store: OpenStore, now_ms: int, folder: NodeFolder | None
    ) -> None:
        """Opens the stores. `folder` is the folder of this node for local copies, or None for no copies."""
        self._context = context
        self._open_store = open_store
        self._lock = threading.Lock()
        if folder is not None:
            remove_stale_copies(folder, now_ms - STALE_MS)
        self._needed: dict[CheckpointId, tuple[frozenset[str], Chain | None]] = {}
        self._completed = CheckpointId(1)
        self._copies = (
            None
            if folder is None
            else LocalCopies(folder, context.job_id, task.vertex, task.subtask, size_bytes_max=COPIES_BYTES_MAX)
        )

    @property
    def keeps_copies(self) -> bool:
        """Returns whether there are local copies, so that the outcome of each checkpoint has to be reported."""
        return self._copies is not None

    def to_write(self, checkpoint_id: CheckpointId | None) -> Store:
        """Returns the store for the files of one checkpoint, or with None for the files of the changelog."""
        store = self._open_store(self._context.root)
        limit = self._context.options.state_bytes_max
        if limit is not None:
            store = MemoryStorage(store, limit)
        if self._copies is None:
            return store
        # Copies of the changelog count as copies of the last checkpoint: the next one names the copies that it needs.
        return self._copies.store_for(store, self._completed if checkpoint_id is None else checkpoint_id)

    def wrote(self, checkpoint_id: CheckpointId, needed: frozenset[str], chain: Chain | None = None) -> None:
        """Records which files and changelog layers a durable part of a checkpoint needs, so that their local copies are
        not deleted.
        """
        if self._copies is not None:
            with self._lock:
                before, chain_before = self._needed.get(checkpoint_id, (frozenset(), None))
                self._needed[checkpoint_id] = before | needed, chain or chain_before
                while len(self._needed) > REMEMBERED_MAX:
                    del self._needed[min(self._needed)]

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """Deletes the local copies that a completed checkpoint does not need."""
        if self._copies is None:
            return
        with self._lock:
            known = self._needed.get(checkpoint_id)
            self._needed = {n: needed for n, needed in self._needed.items() if n > checkpoint_id}
            self._completed = max(self._completed, checkpoint_id)
        if known is not None:
            needed, chain = known
            layers = () if chain is None else chain.handles
            self._copies.confirmed(checkpoint_id, needed | {h.path for h in layers if h.path is not None})

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        """Deletes the local copies of an aborted checkpoint."""
        if self._copies is not None:
            with self._lock:
                self._needed.pop(checkpoint_id, None)
                with_changelog = checkpoint_id == self._completed
            if not with_changelog:
                # Before any checkpoint is complete, copies of the changelog are stored with its first checkpoint, which
                # may fail.
                self._copies.aborted(checkpoint_id)


def write_snapshot(store: Store, context: JobContext, task: TaskId, snapshot: do.PersistSnapshot) -> Written:
    """Writes the asynchronous part of a snapshot: every frozen state is written once to a file that never changes.

    Rules: states that belong to this checkpoint alone go into one file. Changes of keyed state (layers) go into another
    file, to which later checkpoints refer. Files of state backends go into folders. If the snapshot fails, its files
    are deleted as far as possible, but never a file of its base.

    Returns the subtask's part of the checkpoint. Raises StorageError.
    """
    layout = context.layout
    options = context.options
    number = snapshot.checkpoint_id
    known = {} if snapshot.base is None else {state.uid: state for state in snapshot.base.native}
    inline_threshold = options.inline_bytes_max
    handle: StateHandle | None = None
    layer: StateHandle | None = None
    native: list[NativeState] = []

    write = partial(write_state, store, compression=options.backend.compression)
    try:
        exclusive = [(s.uid, state) for s in snapshot.snapshots for state in s.states]
        handle = write(
            layout.state_file(number, task.vertex, task.subtask), exclusive, inline_bytes_max=inline_threshold
        )
        put = [(s.uid, state) for s in snapshot.snapshots for state in s.layer]
        # All layers of a stack together are no more in the metadata than one file may be.
        layer_path = layout.layer_file(number, task.vertex, task.subtask)
        layer = write(layer_path, put, inline_bytes_max=inline_threshold // LAYERS_MAX)
        for s in snapshot.snapshots:
            if s.native is not None:
                folder = layout.native_dir(number, task.vertex, task.subtask, s.uid)
                native.append(write_native(store, folder, s.native, known.get(s.uid)))
    except StorageError:
        delete_files(store, Written(handle, layer, tuple(native)).files(snapshot.base))
        raise
    finally:
        for s in snapshot.snapshots:
            if s.native is not None:
                s.native.release()
    return Written(handle, layer, tuple(native))


def write_segment(
    store: Store, context: JobContext, task: TaskId, attempt: AttemptNumber, segment: do.PersistSegment
) -> StateHandle | None:
    """Writes the frozen changes of a subtask to its changelog. Returns None if there are no changes. Raises
    StorageError.
    """
    path = context.layout.changelog_file(task.vertex, task.subtask, attempt, segment.number, segment.whole)
    put = [(s.uid, state) for s in segment.snapshots for state in (*s.states, *s.layer)]
    inline_threshold = context.options.inline_bytes_max // LAYERS_MAX
    return write_state(
        store, path, put, inline_bytes_max=inline_threshold, compression=context.options.backend.compression
    )
