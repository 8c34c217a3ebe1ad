"""The I/O of a coordinator: writes metadata and savepoints, commits sinks, deletes files, and calls master hooks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.outages import delete_files
from tidegate.actors.drivers.threads import leave_if_forked
from tidegate.actors.drivers.user_sinks import SinkCommitters, SinkFailedError, SinkHangsError, SinkRefusedError
from tidegate.actors.drivers.work_folders import remove_work
from tidegate.connectors.source import MasterHook
from tidegate.protocol.failures import failure_text, log_failure
from tidegate.recovery.deletion import sweep_checkpoints
from tidegate.recovery.savepoints import discard_savepoint, void_savepoint, write_savepoint
from tidegate.storage.checkpoints.layout import parse_checkpoint_name
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    DataFile,
    TableHead,
    create_metadata,
    is_own_sink,
    read_metadata,
)
from tidegate.storage.checkpoints.permits import CompletionPermit, EndPermit
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
from tidegate.storage.state.local_copies import OpenNodeFolder, PrivateFolder, remove_copies
from tidegate.storage.tables.maintenance import RunningCompaction, RunningVacuum
from tidegate.storage.tables.table_files import delete_unreferenced
from tidegate.storage.tables.table_log import TableLog
from tidegate.storage.user_values import repr_text

log = logging.getLogger(__name__)
COPY_THREADS = COPIES_MAX + 1
"""Number of threads that copy and delete savepoints: one for each that may run, because storage may block a
thread for long.
"""
_Decided = ev.MetadataWritten | ev.CheckpointVoided | ev.MetadataWriteFailed


class CoordinatorEffects:
    """Carries out the coordinator's instructions that do I/O, and returns each result as an event. Runs on any
    thread.
    """

    def __init__(
        self,
        context: JobContext,
        open_store: OpenStore,
        now_ms: Callable[[], int],
        open_folder: OpenNodeFolder = PrivateFolder,
    ) -> None:
        self.context = context
        self.open_store = open_store
        self._open_folder = open_folder
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._hooks = HookCalls(context.hooks)
        self._table_logs: dict[str, TableLog] = {}
        self._copies: dict[CheckpointId, threading.Event] = {}
        """For each running copy, an event that is set to stop the copy."""
        self._sinks = SinkCommitters(context.graph.sinks, context.storage_outage_ms)
        self.compactor = TableCompactor(context, open_store, self._table_log, now_ms)

    def write_metadata(self, metadata: CheckpointMetadata, permit: CompletionPermit) -> _Decided:
        """Creates `_metadata`, unless there is a tombstone. Returns an event that reports which of the two exists."""
        permit.check(metadata.checkpoint_id)
        return self._create(metadata)

    def void_checkpoint(self, tombstone: CheckpointMetadata) -> _Decided:
        """Creates a tombstone, unless there is `_metadata`. Returns an event that reports which of the two exists."""
        if not tombstone.void:
            raise InvariantError(
                f"checkpoint {tombstone.checkpoint_id} is complete, so it cannot be marked as void; this is a bug in "
                "tidegate, please report it"
            )
        return self._create(tombstone)

    def _create(self, metadata: CheckpointMetadata) -> _Decided:
        store = self.open_store(self.context.root)
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
        """Registers the copy of a savepoint. Returns the event that `stop_copy` sets to stop the copy."""
        with self._lock:
            return self._copies.setdefault(checkpoint_id, threading.Event())

    def stop_copy(self, checkpoint_id: CheckpointId) -> None:
        """Requests that the copy of a savepoint stops as soon as its storage answers, and deletes what it has
        written.
        """
        with self._lock:
            if (stops := self._copies.get(checkpoint_id)) is not None:
                stops.set()

    def write_savepoint(
        self, instruction: do.WriteSavepoint, stops: threading.Event
    ) -> ev.SavepointWritten | ev.SavepointWriteFailed:
        """Copies a savepoint into the user's folder, with `_metadata` as the last file. Stops when `stops` is set."""
        checkpoint_id = instruction.metadata.checkpoint_id
        try:
            return self._write_savepoint(instruction, stops)
        finally:
            with self._lock:
                self._copies.pop(checkpoint_id, None)

    def _write_savepoint(
        self, instruction: do.WriteSavepoint, stops: threading.Event
    ) -> ev.SavepointWritten | ev.SavepointWriteFailed:
        metadata = instruction.metadata
        checkpoint_id = instruction.metadata.checkpoint_id
        try:
            root = self.context.root
            target = instruction.target
            if instruction.complete:
                # Not what the log has: there inlined state is without its bytes.
                metadata = read_metadata(self.open_store(root), metadata.job_id, checkpoint_id)
            if self.context.temporary:
                # Staged inputs and collected rows, which the savepoint refers to, stay with the job.
                self.open_store(root).write(self.context.layout.savepoint_mark(), ())
            path = write_savepoint(
                self.open_store, root, target, metadata, instruction.permit, stops.is_set, instruction.contested
            )
        except TidegateError as error:
            # A folder that refuses the copy is reported at once: the job does not write to it otherwise.
            permanent = not (isinstance(error, StorageError) and may_pass(error))
            return ev.SavepointWriteFailed(self._now_ms(), checkpoint_id, str(error), permanent)
        return ev.SavepointWritten(self._now_ms(), checkpoint_id, path)

    def discard_savepoint(self, instruction: do.DiscardSavepoint) -> ev.SavepointDiscarded | ev.SavepointDiscardFailed:
        """Deletes the folder of a failed savepoint. A tombstone stays if a replaced coordinator may still write
        to the folder.
        """
        checkpoint_id = instruction.checkpoint_id
        target = instruction.target
        job_id = instruction.job_id
        permit = instruction.permit
        exported = False
        try:
            if instruction.voided:
                name = self.context.job_name
                now_ms = self._now_ms()
                exported = void_savepoint(self.open_store, target, job_id, name, now_ms, permit)
            else:
                discard_savepoint(self.open_store, target, job_id, permit)
        except TidegateError as error:
            return ev.SavepointDiscardFailed(self._now_ms(), checkpoint_id, str(error))
        return ev.SavepointDiscarded(self._now_ms(), checkpoint_id, exported)

    def trigger_hooks(self, instruction: do.TriggerHooks) -> ev.HooksTriggered | ev.HookFailed:
        """Calls every master hook for a checkpoint, in the order in which the user listed the hooks."""
        try:
            states = self._hooks.trigger(instruction.checkpoint_id, instruction.triggered_at_ms)
        except HookError as error:
            return ev.HookFailed(self._now_ms(), instruction.checkpoint_id, str(error))
        return ev.HooksTriggered(self._now_ms(), instruction.checkpoint_id, states)

    def take_tables_back(self, instruction: do.TakeTablesBack) -> ev.TablesTakenBack | ev.TablesNotTakenBack:
        """Resets every output table to the rows that a checkpoint covers, by claiming the table again. May be
        repeated.
        """
        job_id = self.context.job_id
        attempt = instruction.attempt
        try:
            self._expect(instruction.heads)
            restored = job_id, instruction.checkpoint_id
            logs = [self._table_log(table) for table in self.context.table_urls]
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
            self._table_log(head.url).expect(self.context.job_id, head)

    def restore_hooks(
        self, instruction: do.RestoreHooks
    ) -> ev.HooksRestored | ev.HookRestoreFailed | ev.CheckpointDamaged:
        """Passes every master hook the state that it stored with the checkpoint."""
        restore = instruction.restore
        try:
            store = self.open_store(restore.root)
            metadata = read_metadata(store, restore.job_id, restore.checkpoint_id, savepoint=restore.savepoint)
            self._hooks.restore(restore.checkpoint_id, dict(metadata.hooks))
        except DAMAGE as error:
            return ev.CheckpointDamaged(self._now_ms(), instruction.attempt, restore.checkpoint_id, str(error))
        except (TidegateError, HookError) as error:
            return ev.HookRestoreFailed(self._now_ms(), instruction.attempt, str(error), _away_ms(error))
        return ev.HooksRestored(self._now_ms(), instruction.attempt)

    def close(self) -> None:
        """Releases threads at the end of the job. Does not wait for a master hook that does not return."""
        self._hooks.close()
        self.compactor.stop()

    def commit_sinks(self, instruction: do.CommitSinks) -> ev.SinksCommitted | ev.SinkCommitFailed:
        """Commits the files of every table, and the prepared rows of users' sinks, for a checkpoint. Each commit
        is idempotent.
        """
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
                heads.append(table_log.commit(self.context.job_id, instruction.checkpoint_id, tuple(table_files)))
            self._sinks.commit(self.context.job_id, instruction.checkpoint_id, of_sinks)
        except FencedError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), fenced=True)
        except (SinkHangsError, SinkRefusedError) as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), permanent=True)
        except CorruptionError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), permanent=True)
        except (StorageError, SinkFailedError) as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error))
        except TidegateError as error:
            return ev.SinkCommitFailed(self._now_ms(), instruction.checkpoint_id, str(error), permanent=True)
        return ev.SinksCommitted(self._now_ms(), instruction.checkpoint_id, tuple(heads))

    def _table_log(self, url: str) -> TableLog:
        """Returns the log of the table at a URL. The object is cached, because it caches the entries that it has
        read.
        """
        with self._lock:
            if url not in self._table_logs:
                self._table_logs[url] = TableLog(self.open_store(url), now_ms=self._now_ms)
            return self._table_logs[url]

    def discard_checkpoint(
        self, instruction: do.DiscardCheckpoint
    ) -> ev.CheckpointDiscarded | ev.CheckpointDiscardFailed:
        """Deletes the files of a checkpoint, `_metadata` first, so that no reader finds it half deleted. A
        tombstone stays.
        """
        store = self.open_store(self.context.root)
        layout = self.context.layout
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
        """Deletes the files of a refused acknowledgement. Files whose deletion fails are left to the sweep at the
        end of the job.
        """
        delete_files(self.open_store(self.context.root), instruction.paths)

    def sweep(self, permit: EndPermit) -> None:
        """Deletes, after the last task has ended, all files to which no retained checkpoint and no commit refers.

        Tables with outstanding commits are not touched, because only the checkpoints name their files. Local copies and
        folders of backends on this node are deleted too. Copies on other nodes are deleted when a later job starts
        there.
        """
        if (work := self.context.options.backend.directory) is not None:
            remove_work(work, self.context.job_id)
        if self.context.options.local_copies is not None:
            remove_copies(self._open_folder(self.context.options.local_copies), self.context.job_id)
        try:
            sweep_checkpoints(self.open_store(self.context.root), self.context.layout, permit)
            self._expect(permit.heads)
            self.compactor.close()
            for table in self.context.table_urls if permit.tables_settled else ():
                if self._is_whole(table):
                    delete_unreferenced(self.open_store(table), self.context.job_id, None)
            if permit.tables_settled:
                self._sinks.abort(self.context.job_id)
        except StorageError as error:
            log.warning("the sweep of job %s did not finish, files are left behind: %s", self.context.job_id, error)

    def _is_whole(self, table: str) -> bool:
        """Returns whether the log of a table still has all committed entries.

        If not, the table's files are the only copy of the rows, and must not be deleted.
        """
        try:
            self._table_log(table).head(self.context.job_id)
        except TableError as error:
            log.error("files of the table are not deleted: %s", error)
            return False
        return True


def _away_ms(error: Exception) -> int | None:
    """Returns 0 if a retry may succeed after this error of storage, or None if waiting cannot help."""
    return 0 if isinstance(error, StorageError) and may_be_awaited(error) else None


TURN_TIMEOUT_S = 10.0
"""Seconds for which a call of master hooks waits for earlier calls. A waiting call blocks a thread of the
coordinator.
"""


class HookError(Exception):
    """Raised when a master hook raised an exception, or when an earlier call of a hook has not returned."""


class HookCalls:
    """Calls a job's master hooks, one at a time, on a separate thread, because they are code of users.

    Rules:

    - A call that does not return blocks only its own thread and the thread that waits for the call. Later calls fail
      after `turn_timeout_s`. Checkpoints are therefore still written and committed.
    - `close` releases the waiting thread. The thread of the hook is a daemon, so that the process can end without it.
    """

    def __init__(self, hooks: Sequence[MasterHook], turn_timeout_s: float = TURN_TIMEOUT_S) -> None:
        self._hooks = hooks
        self._turn_timeout_s = turn_timeout_s
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._waiting: Future[object] | None = None
        self._closed = False
        self._running = ""
        self._pid = os.getpid()

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> tuple[tuple[str, bytes], ...]:
        """Calls every hook for a checkpoint that starts. Returns pairs of a hook's identifier and the state to
        store. Raises HookError.
        """
        states: list[tuple[str, bytes]] = []

        def call(hook: MasterHook) -> None:
            data = hook.trigger(checkpoint_id, timestamp_ms)
            if data is not None:
                states.append((hook.identifier, bytes(data)))

        self._call_all(call, f"for checkpoint {checkpoint_id}")
        return tuple(states)

    def restore(self, checkpoint_id: CheckpointId, states: Mapping[str, bytes]) -> None:
        """Passes every hook the state that it stored with a checkpoint, or None. Raises HookError."""
        self._call_all(
            lambda hook: hook.restore(checkpoint_id, states.get(hook.identifier)), f"to restore {checkpoint_id}"
        )

    def close(self) -> None:
        """Makes the running call raise HookError in the thread that waits for it, because the job has ended."""
        with self._guard:
            self._closed = True
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_exception(
                    HookError(f"the job has ended while master hook {self._running} was running; its result is ignored")
                )

    def _call_all(self, call: Callable[[MasterHook], None], what: str) -> None:
        if not self._turn.acquire(timeout=self._turn_timeout_s):
            raise HookError(
                f"master hook {self._running} has not returned yet, so no hook was called {what}; "
                "give its calls a timeout"
            )
        done: Future[object] = Future()
        with self._guard:
            self._waiting = done
        try:
            threading.Thread(target=self._run, args=(call, what, done), name="tidegate-hooks", daemon=True).start()
        except RuntimeError as error:
            self._turn.release()
            raise HookError(f"no master hook was called {what}: {error}; correct the hook") from error
        if self._closed:
            self.close()
        done.result()

    def _run(self, call: Callable[[MasterHook], None], what: str, done: Future[object]) -> None:
        error: HookError | None = None
        name = "of unknown identifier"
        try:
            for hook in self._hooks:
                name = repr_text(hook.identifier)
                self._running = f"{name} {what}"
                call(hook)
        except BaseException as raised:  # noqa: BLE001 (code of the user: whatever it raises, also an exit, is reported)
            error = HookError(f"master hook {name} raised {failure_text(raised)}; correct its code")
        leave_if_forked(self._pid)
        self._turn.release()
        with self._guard:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


class _StoppedError(Exception):
    """Raised inside a compaction step to end it, because the job has ended."""


class TableCompactor:
    """Compacts small files of a job's tables, and deletes files that are no longer needed, while the job commits.

    Rules:

    - A step runs after a commit, on a thread that commits do not need. Steps do not overlap.
    - A step first merges small files. Then it deletes files that the table has not shown for the length of its history.
    - A step that fails changes nothing, and fails neither the job nor a checkpoint. The next step tries again, unless a
      file of the table is damaged or lost. That is logged once.
    - Before the files of the job are swept, the running step is stopped. It checks for that at each file.
    """

    def __init__(
        self,
        context: JobContext,
        open_store: OpenStore,
        log_of: Callable[[str], TableLog],
        now_ms: Callable[[], int],
    ) -> None:
        self._context = context
        self._open_store = open_store
        self._log_of = log_of
        self._lock = threading.Lock()
        self._stopped = False
        self._now_ms = now_ms
        self._tables: dict[str, RunningCompaction] = {}
        self._vacuums: dict[str, RunningVacuum] = {}
        self._given_up: set[tuple[str, str]] = set()

    @property
    def compacts(self) -> bool:
        """Returns whether the job has a table to compact or vacuum, and the compactor is not stopped."""
        return bool(self._context.compactions or self._context.histories) and not self._stopped

    def step(self) -> None:
        """Does one compaction in each table that needs one, and deletes some of the files that are no longer needed."""
        if self._stopped or not self._lock.acquire(blocking=False):
            return
        try:
            for url in self._context.compactions:
                self._step(url, "the small files of {} are put together", lambda: self._of(url))  # noqa: B023
            for url in self._context.histories:
                self._step(url, "old files of {} are deleted", lambda: self._vacuum_of(url))  # noqa: B023
        except _StoppedError:
            log.debug("a compaction of %s is left, because the job is over", self._context.job_id)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Starts no further steps, and makes the running step end at its next file."""
        self._stopped = True

    def close(self) -> None:
        """Stops, waits for the running step, and deletes files that were written but not committed. Raises
        StorageError.

        Deletes nothing of a table whose log has lost entries, because its files are the only copy of their rows.
        """
        self.stop()
        with self._lock:
            for url in self._context.compactions:
                try:
                    self._of(url).close()
                except TableError as error:
                    log.error("files of compactions are not deleted: %s", error)

    def _step(self, url: str, what: str, of: Callable[[], RunningCompaction | RunningVacuum]) -> None:
        """Runs one step of work on a table. `what` is the text that describes the step, with {} in place of the
        table.
        """
        if (url, what) in self._given_up:
            return
        try:
            of().step(self._may_go_on)
        except _StoppedError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is: the job is worth more than the size of its files)
            if isinstance(error, StorageError) and may_be_awaited(error):
                log.warning("%s later: %s", what.format(url), error)
                return
            self._given_up.add((url, what))
            log_failure(log, f"no longer: {what.format(url)}", error)

    def _of(self, url: str) -> RunningCompaction:
        if url not in self._tables:
            settings = self._context.compactions[url]
            store = self._open_store(url)
            table_log = self._log_of(url)
            self._tables[url] = RunningCompaction(store, table_log, self._context.job_id, settings)
        return self._tables[url]

    def _vacuum_of(self, url: str) -> RunningVacuum:
        if url not in self._vacuums:
            store = self._open_store(url)
            table_log = self._log_of(url)
            context = self._context
            self._vacuums[url] = RunningVacuum(
                store, table_log, context.job_id, context.histories[url], self._checkpoints, self._now_ms
            )
        return self._vacuums[url]

    def _checkpoints(self) -> tuple[CheckpointId, ...]:
        """Returns the ids of all checkpoints of the job that exist in storage, in any state. Raises StorageError."""
        names = self._open_store(self._context.root).list(self._context.layout.job_dir())
        return tuple(found for found in map(parse_checkpoint_name, names) if found is not None)

    def _may_go_on(self) -> None:
        if self._stopped:
            raise _StoppedError
