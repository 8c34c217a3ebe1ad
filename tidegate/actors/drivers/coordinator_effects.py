"""Does the I/O that a coordinator asks for: metadata, savepoints, sink commits, deletion; and calls master hooks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.drivers.deletions import delete_files
from tidegate.actors.drivers.hook_calls import HookCalls, HookError
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.own_sinks import OwnSinks, SinkFailedError, SinkHangsError
from tidegate.actors.drivers.table_compactor import TableCompactor
from tidegate.actors.drivers.work_folders import remove_work
from tidegate.recovery.cleanup.end_of_job import sweep_checkpoints
from tidegate.recovery.savepoints import discard_savepoint, void_savepoint, write_savepoint
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, DataFile, TableHead, is_own_sink
from tidegate.storage.checkpoints.metadata_file import create_metadata, read_metadata
from tidegate.storage.checkpoints.permits import CompletionPermit, EndPermit
from tidegate.storage.copies.local_copies import remove_copies
from tidegate.storage.copies.node_folder import OpenNodeFolder, PrivateFolder
from tidegate.storage.errors import (
    DAMAGE,
    AlreadyExistsError,
    CorruptionError,
    FencedError,
    InvariantError,
    StorageError,
    TableError,
    TidegateError,
    may_be_awaited,
    may_pass,
)
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.table_files import delete_unreferenced
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

COPY_THREADS = COPIES_MAX + 1
"""Threads that copy and delete savepoints, one for each that may be under way: storage may be silent for long."""

_Decided = ev.MetadataWritten | ev.CheckpointVoided | ev.MetadataWriteFailed


class CoordinatorEffects:
    """Carries out the coordinator's instructions that touch files. Every method may run on any thread."""

    def __init__(
        self,
        context: JobContext,
        open_store: OpenStore,
        now_ms: Callable[[], int],
        open_folder: OpenNodeFolder = PrivateFolder,
    ) -> None:
        self._context = context
        self._open_store = open_store
        self._open_folder = open_folder
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._hooks = HookCalls(context.hooks)
        self._table_logs: dict[str, TableLog] = {}
        self._copies: dict[CheckpointId, threading.Event] = {}
        """Set for a copy that is to stop."""
        self._sinks = OwnSinks(context.graph.sinks, context.storage_outage_ms)
        self.compactor = TableCompactor(context, open_store, self._table_log, now_ms)

    def write_metadata(self, metadata: CheckpointMetadata, permit: CompletionPermit) -> _Decided:
        """Create `_metadata`, unless a tombstone is there, and tell which of the two is."""
        permit.check(metadata.checkpoint_id)
        return self._create(metadata)

    def void_checkpoint(self, tombstone: CheckpointMetadata) -> _Decided:
        """Create a tombstone, unless `_metadata` is there, and tell which of the two is."""
        if not tombstone.void:
            raise InvariantError("a checkpoint is completed by `write_metadata`, with a permit")
        return self._create(tombstone)

    def _create(self, metadata: CheckpointMetadata) -> _Decided:
        store = self._open_store(self._context.root)
        checkpoint_id = metadata.checkpoint_id
        try:
            try:
                create_metadata(store, metadata)
                found = metadata
            except AlreadyExistsError:
                found = read_metadata(store, metadata.job_id, checkpoint_id)
        except StorageError as error:
            return ev.MetadataWriteFailed(self._now_ms(), checkpoint_id, str(error))
        if found.void:
            return ev.CheckpointVoided(self._now_ms(), checkpoint_id)
        return ev.MetadataWritten(self._now_ms(), checkpoint_id)

    def copy_begins(self, checkpoint_id: CheckpointId) -> threading.Event:
        """A copy of a savepoint is ordered. Returns what `stop_copy` sets."""
        with self._lock:
            return self._copies.setdefault(checkpoint_id, threading.Event())

    def stop_copy(self, checkpoint_id: CheckpointId) -> None:
        """The copy of a savepoint is to stop as soon as its storage answers, and to leave nothing."""
        with self._lock:
            if (stops := self._copies.get(checkpoint_id)) is not None:
                stops.set()

    def write_savepoint(
        self, instruction: do.WriteSavepoint, stops: threading.Event
    ) -> ev.SavepointWritten | ev.SavepointWriteFailed:
        """Copy a savepoint into its own folder, `_metadata` last, unless `stops` is set."""
        checkpoint_id = instruction.metadata.checkpoint_id
        try:
            return self._write_savepoint(instruction, stops)
        finally:
            with self._lock:
                self._copies.pop(checkpoint_id, None)

    def _write_savepoint(
        self, instruction: do.WriteSavepoint, stops: threading.Event
    ) -> ev.SavepointWritten | ev.SavepointWriteFailed:
        metadata, checkpoint_id = instruction.metadata, instruction.metadata.checkpoint_id
        try:
            root, target = self._context.root, instruction.target
            if instruction.complete:
                # Not what the log has: there inlined state is without its bytes.
                metadata = read_metadata(self._open_store(root), metadata.job_id, checkpoint_id)
            if self._context.temporary:
                # Staged inputs and collected rows, which the savepoint refers to, stay with the job.
                self._open_store(root).write(self._context.layout.savepoint_mark(), ())
            path = write_savepoint(
                self._open_store, root, target, metadata, instruction.permit, stops.is_set, instruction.contested
            )
        except TidegateError as error:
            # Of a folder that refuses it the user hears at once: it is not one that the job writes to otherwise.
            permanent = not (isinstance(error, StorageError) and may_pass(error))
            return ev.SavepointWriteFailed(self._now_ms(), checkpoint_id, str(error), permanent)
        return ev.SavepointWritten(self._now_ms(), checkpoint_id, path)

    def discard_savepoint(self, instruction: do.DiscardSavepoint) -> ev.SavepointDiscarded | ev.SavepointDiscardFailed:
        """Delete the folder of a savepoint that failed after all. Where somebody may write to it a tombstone stays."""
        checkpoint_id, target = instruction.checkpoint_id, instruction.target
        job_id, permit = instruction.job_id, instruction.permit
        exported = False
        try:
            if instruction.voided:
                name, now_ms = self._context.job_name, self._now_ms()
                exported = void_savepoint(self._open_store, target, job_id, name, now_ms, permit)
            else:
                discard_savepoint(self._open_store, target, job_id, permit)
        except TidegateError as error:
            return ev.SavepointDiscardFailed(self._now_ms(), checkpoint_id, str(error))
        return ev.SavepointDiscarded(self._now_ms(), checkpoint_id, exported)

    def trigger_hooks(self, instruction: do.TriggerHooks) -> ev.HooksTriggered | ev.HookFailed:
        """Call every master hook, in the order in which they were given."""
        try:
            states = self._hooks.trigger(instruction.checkpoint_id, instruction.triggered_at_ms)
        except HookError as error:
            return ev.HookFailed(self._now_ms(), instruction.checkpoint_id, str(error))
        return ev.HooksTriggered(self._now_ms(), instruction.checkpoint_id, states)

    def take_tables_back(self, instruction: do.TakeTablesBack) -> ev.TablesTakenBack | ev.TablesNotTakenBack:
        """Every table goes on from what the checkpoint covers; repeating that changes nothing."""
        job_id, attempt = self._context.job_id, instruction.attempt
        try:
            self._expect(instruction.heads)
            restored = job_id, instruction.checkpoint_id
            logs = [self._table_log(table) for table in self._context.table_urls]
            heads = tuple(table_log.claim(job_id, restored_from=restored) for table_log in logs)
        except FencedError as error:
            return ev.TablesNotTakenBack(self._now_ms(), attempt, str(error), fenced=True)
        except (TableError, *DAMAGE) as error:
            return ev.TablesNotTakenBack(self._now_ms(), attempt, str(error), permanent=True)
        except TidegateError as error:
            return ev.TablesNotTakenBack(self._now_ms(), attempt, str(error), away_ms=_away_ms(error))
        return ev.TablesTakenBack(self._now_ms(), attempt, heads)

    def _expect(self, heads: Iterable[TableHead]) -> None:
        for head in heads:
            self._table_log(head.url).expect(self._context.job_id, head)

    def restore_hooks(
        self, instruction: do.RestoreHooks
    ) -> ev.HooksRestored | ev.HookRestoreFailed | ev.CheckpointDamaged:
        """Give every master hook what it had kept with the checkpoint."""
        restore = instruction.restore
        try:
            store = self._open_store(restore.root)
            metadata = read_metadata(store, restore.job_id, restore.checkpoint_id, savepoint=restore.savepoint)
            self._hooks.restore(restore.checkpoint_id, dict(metadata.hooks))
        except DAMAGE as error:
            return ev.CheckpointDamaged(self._now_ms(), instruction.attempt, restore.checkpoint_id, str(error))
        except (TidegateError, HookError) as error:
            return ev.HookRestoreFailed(self._now_ms(), instruction.attempt, str(error), _away_ms(error))
        return ev.HooksRestored(self._now_ms(), instruction.attempt)

    def close(self) -> None:
        """The job is over: a master hook that has not come back is not waited for."""
        self._hooks.close()
        self.compactor.stop()

    def commit_sinks(self, instruction: do.CommitSinks) -> ev.SinksCommitted | ev.SinkCommitFailed:
        """Commit the files of every table, and what sinks of the user's have prepared; each commit is idempotent."""
        files: dict[str, list[DataFile]] = {table: [] for table in instruction.tables}
        of_sinks = [c for c in instruction.committables if is_own_sink(c.table)]
        for committable in instruction.committables:
            if not is_own_sink(committable.table):
                files.setdefault(committable.table, []).extend(committable.files)
        heads = []
        try:
            self._expect(instruction.heads)
            for table, table_files in files.items():
                table_log = self._table_log(table)
                heads.append(table_log.commit(self._context.job_id, instruction.checkpoint_id, tuple(table_files)))
            self._sinks.commit(self._context.job_id, instruction.checkpoint_id, of_sinks)
        except FencedError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), fenced=True)
        except SinkHangsError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), permanent=True)
        except CorruptionError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), permanent=True)
        except (StorageError, SinkFailedError) as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error))
        except TidegateError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), permanent=True)
        return ev.SinksCommitted(self._now_ms(), instruction.checkpoint_id, tuple(heads))

    def _table_log(self, url: str) -> TableLog:
        """The log of a table; kept, because it remembers what it has read, and a log grows with every commit."""
        with self._lock:
            if url not in self._table_logs:
                self._table_logs[url] = TableLog(self._open_store(url), now_ms=self._now_ms)
            return self._table_logs[url]

    def discard_checkpoint(
        self, instruction: do.DiscardCheckpoint
    ) -> ev.CheckpointDiscarded | ev.CheckpointDiscardFailed:
        """Delete a checkpoint: `_metadata` first, so that nobody finds it half deleted. A tombstone stays."""
        store = self._open_store(self._context.root)
        layout = self._context.layout
        folder = layout.checkpoint_dir(instruction.checkpoint_id)
        metadata = layout.metadata(instruction.checkpoint_id)
        try:
            if instruction.voided:
                for name in store.list(folder):
                    if f"{folder}/{name}" != metadata:
                        store.delete(f"{folder}/{name}")
            else:
                store.delete(metadata)
                store.delete_tree(folder)
            if instruction.shared is None:
                store.delete_tree(layout.shared_checkpoint_dir(instruction.checkpoint_id))
            else:
                for path in instruction.shared:
                    store.delete(path)
        except StorageError as error:
            return ev.CheckpointDiscardFailed(self._now_ms(), instruction.checkpoint_id, str(error))
        return ev.CheckpointDiscarded(self._now_ms(), instruction.checkpoint_id)

    def discard_files(self, instruction: do.DiscardFiles) -> None:
        """Delete files of a refused acknowledgement; what fails is swept at the end."""
        delete_files(self._open_store(self._context.root), instruction.paths)

    def sweep(self, permit: EndPermit) -> None:
        """After the last task is gone: delete what no retained checkpoint and no commit refers to.

        Tables in which something is still to be committed are left alone: nobody knows of it but the checkpoints.
        Local copies, and folders of backends, on this node go too; copies on other nodes when a later job starts there.
        """
        if (work := self._context.options.backend.directory) is not None:
            remove_work(work, self._context.job_id)
        if self._context.options.local_copies is not None:
            remove_copies(self._open_folder(self._context.options.local_copies), self._context.job_id)
        try:
            sweep_checkpoints(self._open_store(self._context.root), self._context.layout, permit)
            self._expect(permit.heads)
            self.compactor.close()
            for table in self._context.table_urls if permit.tables_settled else ():
                if self._is_whole(table):
                    delete_unreferenced(self._open_store(table), self._context.job_id, None)
            if permit.tables_settled:
                self._sinks.abort(self._context.job_id)
        except StorageError as error:
            log.warning("the sweep of job %s did not finish, files are left behind: %s", self._context.job_id, error)

    def _is_whole(self, table: str) -> bool:
        """Whether the log of a table has all that was committed. If not, its files are all that is left of the rows."""
        try:
            self._table_log(table).head(self._context.job_id)
        except TableError as error:
            log.error("files of the table are not deleted: %s", error)
            return False
        return True


def _away_ms(error: Exception) -> int | None:
    """0 where storage does not answer or refuses, which counts from now on; None where waiting cannot help."""
    return 0 if isinstance(error, StorageError) and may_be_awaited(error) else None
