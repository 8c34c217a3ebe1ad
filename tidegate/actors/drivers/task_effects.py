"""Does the I/O that a task asks for: reads its source, reads and writes its state, stages its sink files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pyarrow as pa

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.drivers.async_calls import AsyncCalls
from tidegate.actors.drivers.deletions import delete_files
from tidegate.actors.drivers.held_sources import HeldSources
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.sink_writers import SinkWriters
from tidegate.actors.drivers.snapshot_writer import write_segment, write_snapshot
from tidegate.actors.drivers.split_reads import SplitReads
from tidegate.actors.drivers.state_stores import StateStores
from tidegate.actors.drivers.work_folders import prepare_work
from tidegate.actors.drivers.write_pace import paced
from tidegate.actors.restore.restore_task import restore_task
from tidegate.actors.restore.state_follower import StateFollower
from tidegate.actors.task.checkpoints.snapshots import Written
from tidegate.actors.task.incremental.lineage import Lineage
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.copies.node_folder import OpenNodeFolder, PrivateFolder
from tidegate.storage.errors import DAMAGE, StorageError, may_be_awaited
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.subtasks.in_flight import ChannelEnd, InFlightRows, write_in_flight

log = logging.getLogger(__name__)


class TaskEffects:
    """Carries out the instructions of one task that touch files.

    Methods may run on any thread, reads of the source one at a time. `close` may come while a read is under way.
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
        """State is restored by up to `readers` threads; with one by the thread that asks for it.

        `kept` is what the attempt before has handed over, in the same process; `follower` has held the state of a task
        that ran elsewhere. `open_folder` opens the node's folder for local copies.
        `why_late` describes what a call of `map_async` may have waited for in vain, or returns None.
        """
        self._follower = follower
        self._readers = readers
        self.kept = kept
        self._context = context
        self._descriptor = descriptor
        self._open_store = open_store
        self._now_ms = now_ms
        self._over = threading.Event()
        """Set once the task is over: what pauses returns, and what is written from then on is deleted."""
        held = HeldSources(open_store, context.handed_on, context.job_id, now_ms)
        self._reads = SplitReads(descriptor.source, held, self._over, now_ms)
        copies = context.options.local_copies
        self._copies = None if copies is None else open_folder(copies)
        self._stores = StateStores(context, descriptor.task, open_store, now_ms(), self._copies)
        functions = {s.uid: s.calls for s in descriptor.operators if s.calls is not None}
        self.calls = AsyncCalls(functions, why_late)
        self.sinks = SinkWriters(context.job_id, context.job_name, descriptor)
        self._tables = {spec.uid: spec.table for spec in descriptor.operators if spec.table is not None}

    def restore(self, restore: RestorePoint | None) -> ev.TaskRestored | ev.DamageFound:
        """Read what the operators of this task had in a checkpoint, and what was in flight towards it.

        A checkpoint that is damaged is no fault of the task. What earlier attempts have left on this node's disk is
        deleted before.
        """
        work = self._context.options.backend.directory
        if work is not None:
            prepare_work(work, self._context.job_id, self._descriptor.task, self._descriptor.attempt)
        if restore is None:
            self.kept = {}
            return ev.TaskRestored(self._now_ms(), ())
        if self._follower is not None:
            self.kept, self._follower = self._follower.take(restore), None
        store = self._open_store(restore.root)
        task = self._descriptor.task
        backend, own = self._descriptor.backend, restore.job_id == self._context.job_id and not restore.savepoint
        # Files of a native savepoint are copies, like those of the job's own checkpoints. A changelog begins with rows.
        fits = own or (restore.savepoint and not backend.changelog)
        folder = backend.directory if backend.kind == "rocksdb" and fits else None
        known = {uid: kept.kept(restore.checkpoint_id) for uid, kept in self.kept.items()} if own else {}
        usable = {uid: tables for uid, tables in known.items() if tables is not None}
        # What leads elsewhere goes before anything is read: there is no room for both.
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
        part, lineage = restored.part, None
        if part is not None and own:
            # The files of another job's checkpoint are not this job's to keep.
            lineage = Lineage.of(restore.checkpoint_id, part)
        kept = {uid: kept for uid, kept in self.kept.items() if uid in restored.kept}
        read = restored.tables, restored.finished, restored.in_flight
        return ev.TaskRestored(self._now_ms(), *read, lineage, kept, restored.origin)

    def read_source(self, instruction: do.ReadSource, patient: bool = True) -> ev.SourceBatchRead | None:
        """Read one batch; nothing once the task is closed. `patient`: it may take time to wait for rows."""
        return self._reads.read(instruction, patient)

    def persist(self, instruction: do.PersistSnapshot, sync_ms: int) -> ev.SnapshotPersisted | ev.SnapshotFailed | None:
        """The asynchronous part of a snapshot: a few checksummed files, or inlined when small.

        What is written when the task is over meanwhile is deleted at once: the sweep may have been here already.
        """
        checkpoint_id = instruction.checkpoint_id
        store = paced(self._stores.to_write(checkpoint_id), self._context.options.paused_ms_max, self._over)
        try:
            written = write_snapshot(store, self._context, self._descriptor.task, instruction)
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
        """Write the in-flight elements of a snapshot: a file of their own, or inlined when small.

        What is written when the task is over meanwhile is deleted at once, as by `persist`.
        """
        task, graph = self._descriptor.task, self._context.graph
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
        """Write a segment of the changelog, or a base. What comes too late is deleted, as by `persist`."""
        store, descriptor = self._stores.to_write(None), self._descriptor
        number, whole = instruction.number, instruction.whole
        try:
            handle = write_segment(store, self._context, descriptor.task, descriptor.attempt, instruction)
        except StorageError as error:
            # A checkpoint tells of it only if it needs what was to be written, which may be none.
            log.warning("a part of the changelog of %s was not written: %s", descriptor.task, error)
            return ev.SegmentFailed(self._now_ms(), number, whole, str(error), away=may_be_awaited(error))
        if self._over.is_set():
            delete_files(store, Written(handle).files(None))
            return None
        return ev.SegmentPersisted(self._now_ms(), number, whole, handle)

    @property
    def storage_outage_ms(self) -> int:
        """For how long storage is waited for."""
        return self._context.storage_outage_ms

    @property
    def keeps_copies(self) -> bool:
        """Whether `checkpoint_over` wants to be told."""
        return self._stores.keeps_copies

    def checkpoint_over(self, event: ev.CheckpointCompleted | ev.CheckpointAborted) -> None:
        """A checkpoint is complete, or was given up: local copies that nobody needs any more go."""
        if isinstance(event, ev.CheckpointCompleted):
            self._stores.completed(event.checkpoint_id)
        else:
            self._stores.aborted(event.checkpoint_id)

    def stage(self, instruction: do.StageFile) -> ev.FileStaged | None:
        """Write one data file of a sink; nobody sees it before it is committed."""
        if instruction.uid in self.sinks:
            prepared = self.sinks.stage(instruction)
            if prepared is None:
                return None
            return ev.FileStaged(self._now_ms(), instruction.uid, instruction.index, prepared)
        # What reads and writes Parquet is loaded by the tasks that have a table.
        from tidegate.storage.tables.table_files import data_dir, data_file_name, write_data_file

        d = self._descriptor
        folder = f"{data_dir(self._context.job_id, d.attempt)}/{instruction.folder}".rstrip("/")
        path = f"{folder}/{data_file_name(d.task.subtask, instruction.index, instruction.uid)}"
        store = self._open_store(self._tables[instruction.uid])
        file = write_data_file(store, path, instruction.batches)
        if self._over.is_set():
            delete_files(store, (path,))
            return None
        return ev.FileStaged(self._now_ms(), instruction.uid, instruction.index, file)

    def discard(self, instruction: do.DiscardState) -> None:
        """Delete files of state that no checkpoint will refer to."""
        delete_files(self._open_store(self._context.root), instruction.paths)

    def hurry(self) -> None:
        """The task is over: nothing pauses or waits for functions any more, so threads come back. From any thread."""
        self._over.set()
        self.calls.close()

    def close(self) -> None:
        """Release the source's files. May be called again."""
        self._over.set()
        if not self._reads.close():
            return
        if self._follower is not None:
            self._follower.close()
        self.sinks.close()
        self.calls.close()
