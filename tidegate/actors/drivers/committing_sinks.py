"""Calls the committers of sinks that commit in their tasks, and stores the files of such sinks in checkpoint storage.

`SinkWriters` in `user_sinks.py` calls the writers of the sinks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.outages import delete_files
from tidegate.actors.drivers.threads import NotBackError, call_within
from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.connectors.committing_sink import Committable, Committer, CommittingContext, CommittingSink, CommitToken
from tidegate.operators.operator_errors import is_failure, own_copy
from tidegate.protocol.failures import OperatorError, error_text, log_failure
from tidegate.storage.argument_checks import check_methods_run_at_once
from tidegate.storage.checkpoints.memory_limit import MemoryStorage
from tidegate.storage.checkpoints.metadata import PreparedRows
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.key_groups import key_group_range

log = logging.getLogger(__name__)

CALL_LIMIT_MIN_MS = 60_000
"""Shortest time limit of a sink's commit, in ms, also if storage outages are not tolerated."""


class CommitFailedError(OperatorError):
    """Raised when a sink could not commit. `may_pass`: whether another try may succeed."""

    def __init__(self, text: str, *, may_pass: bool) -> None:
        super().__init__(text)
        self.may_pass = may_pass


class CheckpointSinkFiles:
    """The files in checkpoint storage that one sink writes in one subtask (`SinkFiles`).

    A path is relative to the root of checkpoint storage, or the URL of a file of another job. Files that are written
    after the end of the task are deleted at once, because the sweep of the job may be over.
    """

    def __init__(
        self,
        context: JobContext,
        descriptor: TaskDescriptor,
        uid: OperatorUid,
        open_store: OpenStore,
        over: threading.Event,
    ) -> None:
        self._context = context
        self._descriptor = descriptor
        self._uid = uid
        self._open_store = open_store
        self._over = over
        self._numbers = itertools.count()

    def write(self, chunks: Iterable[bytes | memoryview]) -> str:
        """Writes a new file. Returns its path."""
        d = self._descriptor
        path = self._context.layout.sink_file(self._uid, d.task.subtask, d.attempt, next(self._numbers))
        store: Store = self._open_store(self._context.root)
        limit = self._context.options.state_bytes_max
        (store if limit is None else MemoryStorage(store, limit)).write(path, chunks)
        if self._over.is_set():
            delete_files(store, (path,))
        return path

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns the bytes of a file, or of a range of it."""
        if path.startswith("/") or "://" in path:
            folder, _, name = path.rpartition("/")
            return self._open_store(folder).read(name, offset, length)
        return self._open_store(self._context.root).read(path, offset, length)


def committing_context(
    context: JobContext,
    descriptor: TaskDescriptor,
    spec: OperatorSpec,
    open_store: OpenStore,
    over: threading.Event,
) -> CommittingContext:
    """Returns the context that a sink of this task gets: names of job and sink, the subtask, its buckets and its file
    storage.
    """
    assert spec.committing is not None
    d = descriptor
    return CommittingContext(
        str(context.job_id),
        context.job_name,
        str(spec.uid),
        spec.name,
        d.task.subtask,
        d.parallelism,
        d.attempt,
        key_group_range(d.task.subtask, spec.committing.buckets, d.parallelism),
        CheckpointSinkFiles(context, descriptor, spec.uid, open_store, over),
    )


class _SubtaskCommitter:
    """The committer of one sink in one subtask. It is opened at its first commit."""

    def __init__(self, sink: CommittingSink, context: CommittingContext) -> None:
        self._sink = sink
        self.context = context
        self.opened: Committer | None = None
        self.hangs = False

    def commit(self, prepared: Sequence[tuple[CommitToken, Sequence[Committable]]]) -> None:
        if self.opened is None:
            committer = own_copy(self._sink).open_committer(self.context)
            check_methods_run_at_once(committer, Committer)
            self.opened = committer
        self.opened.commit_all(prepared)


class TaskCommitters:
    """The committers of one task's sinks.

    Rules:

    - Calls of one committer do not overlap, and each is opened with a copy of the sink that no writer uses.
    - An error of a committer becomes a `CommitFailedError`, which names the step. The driver of the task repeats the
      call, because commits are idempotent. A ConfigurationError, a damaged file (CorruptionError), and a call that
      does not return fail the task at once.
    - The time limit of a call is the tolerated storage outage, and a minute at least, for each checkpoint in it. The
      next attempt of the task opens another committer, which has to fence the committer that hangs.
    - If the task is closed during a call, the calling thread closes the committer afterwards.
    """

    def __init__(self, sinks: Iterable[tuple[CommittingSink, CommittingContext]], limit_ms: int) -> None:
        """Creates the committers. `limit_ms` is the time in ms for which a storage outage is tolerated."""
        self._committers = {OperatorUid(c.uid): _SubtaskCommitter(sink, c) for sink, c in sinks}
        self._limit_ms = max(limit_ms, CALL_LIMIT_MIN_MS)
        self._lock = threading.Lock()
        self._calling: set[OperatorUid] = set()
        self._closed = False

    def commit(self, uid: OperatorUid, rows: Sequence[PreparedRows]) -> bool:
        """Commits prepared rows of one sink, in their order. Returns False if the task is closed.

        Raises CommitFailedError.
        """
        with self._lock:
            if self._closed:
                return False
            self._calling.add(uid)
        committer = self._committers[uid]
        try:
            self._call(committer, rows)
        finally:
            with self._lock:
                self._calling.discard(uid)
                closes = self._closed
            if closes:
                _close(committer)
        return True

    def close(self) -> None:
        """Closes every opened committer. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = [committer for uid, committer in self._committers.items() if uid not in self._calling]
        for committer in idle:
            _close(committer)

    def _call(self, committer: _SubtaskCommitter, rows: Sequence[PreparedRows]) -> None:
        c = committer.context
        prepared = [
            (
                CommitToken(str(each.job_id), each.checkpoint_id),
                [Committable(part.bucket, part.data, part.files) for part in each.parts],
            )
            for each in rows
        ]
        first = rows[0].checkpoint_id
        last = rows[-1].checkpoint_id
        checkpoints = f"checkpoint {first}" if first == last else f"checkpoints {first} to {last}"
        what = (
            f"sink {c.name!r} (uid {c.uid!r}) failed on subtask {c.subtask + 1} of {c.parallelism} to commit "
            f"{sum(len(each.parts) for each in rows)} committables of {checkpoints} of {rows[-1].job_id}"
        )
        call: Callable[[], None] = partial(committer.commit, prepared)
        try:
            call_within(call, len(rows) * self._limit_ms / 1_000, "tidegate-committer")
        except NotBackError as error:
            committer.hangs = True
            raise CommitFailedError(f"{what}: {error}; give the calls of the sink a timeout", may_pass=False) from None
        except BaseException as error:
            if not is_failure(error):
                raise
            permanent = isinstance(error, ConfigurationError | CorruptionError)
            raise CommitFailedError(f"{what}: {error_text(error)}", may_pass=not permanent) from error


def _close(committer: _SubtaskCommitter) -> None:
    if committer.opened is None or committer.hangs:
        return
    try:
        committer.opened.close()
    except BaseException as error:
        if not is_failure(error):
            raise
        log_failure(log, f"the committer of sink {committer.context.name!r} could not be closed", error)
