"""Calls the sinks of users: `SinkWriters` writes and prepares rows in the tasks, `SinkCommitters` commits in the
coordinator.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from tidegate.actors.drivers.threads import NotBackError, call_within
from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.instructions import StageFile
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.connectors.committing_sink import Committable as PreparedCommittable
from tidegate.connectors.committing_sink import CommittingContext, CommittingSink, CommittingWriter
from tidegate.connectors.sink import COMMITTABLES_BYTES_MAX, CommitContext, Sink, SinkContext
from tidegate.operators.operator_errors import is_failure, own_copy
from tidegate.protocol.failures import OperatorError, error_text, failure_text, log_failure
from tidegate.storage.argument_checks import check_methods_run_at_once
from tidegate.storage.checkpoints.metadata import Committable, DataFile, PreparedPart
from tidegate.storage.errors import ConfigurationError, CorruptionError, TableError, TidegateError
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Result of a sink's `prepare`.

    `file` has the committables that the coordinator commits, `parts` the ones that the task itself commits.
    """

    file: DataFile
    parts: tuple[PreparedPart, ...] = ()


class _Writer(ABC):
    """The interface for calling the writer of a user's sink in one subtask."""

    def __init__(self, name: str, context: SinkContext | CommittingContext) -> None:
        self.name = name
        self.context = context
        self.rows = 0
        """Number of rows since the last `prepare`."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Returns the name of the sink's class, for errors."""

    @property
    @abstractmethod
    def opened(self) -> bool:
        """Returns whether the sink was opened."""

    @abstractmethod
    def open(self) -> None:
        """Opens the sink for writing. Called once."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Passes rows to the sink."""

    @abstractmethod
    def prepare(self, checkpoint_id: CheckpointId | None) -> tuple[tuple[bytes, ...], tuple[PreparedPart, ...]]:
        """Makes the sink prepare the rows so far. Returns two tuples: the committables for the coordinator, and the
        committables for the task itself.

        `checkpoint_id` is None if the rows belong to no checkpoint.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the sink."""


class _SinkWriter(_Writer):
    """Calls the writer of a `Sink`, whose rows the coordinator commits."""

    def __init__(self, sink: Sink, name: str, context: SinkContext) -> None:
        super().__init__(name, context)
        self._context = context
        self._sink = own_copy(sink)
        self._opened = False

    @property
    def kind(self) -> str:
        return type(self._sink).__name__

    @property
    def opened(self) -> bool:
        return self._opened

    def open(self) -> None:
        self._opened = True
        self._sink.open(self._context)

    def write(self, batch: pa.RecordBatch) -> None:
        self._sink.write(batch)

    def prepare(self, checkpoint_id: CheckpointId | None) -> tuple[tuple[bytes, ...], tuple[PreparedPart, ...]]:
        return _checked(self._sink.prepare()), ()

    def close(self) -> None:
        self._sink.close()


class _CommittingSinkWriter(_Writer):
    """Calls the writer of a `CommittingSink`, whose rows its tasks commit."""

    def __init__(self, sink: CommittingSink, name: str, context: CommittingContext) -> None:
        super().__init__(name, context)
        self._context = context
        self._sink = sink
        self._writer: CommittingWriter | None = None

    @property
    def kind(self) -> str:
        return type(self._sink).__name__

    @property
    def opened(self) -> bool:
        return self._writer is not None

    def open(self) -> None:
        writer = own_copy(self._sink).open_writer(self._context)
        check_methods_run_at_once(writer, CommittingWriter)
        self._writer = writer

    def write(self, batch: pa.RecordBatch) -> None:
        assert self._writer is not None
        self._writer.write(batch)

    def prepare(self, checkpoint_id: CheckpointId | None) -> tuple[tuple[bytes, ...], tuple[PreparedPart, ...]]:
        assert self._writer is not None and checkpoint_id is not None
        return (), _checked_parts(self._writer.prepare(checkpoint_id), self._context.buckets)

    def close(self) -> None:
        assert self._writer is not None
        self._writer.close()


class SinkWriters:
    """Calls the writing half of the users' sinks in one task.

    Rules:

    - The rows of one sink are written in order, one call at a time: `begin` and `over` mark when the next call may
      start.
    - An error of a sink fails the task, and names the operator. The call is not repeated, because it is unknown which
      rows were written.
    - If the task is closed during a call, the calling thread closes the sink afterwards, so that calls do not overlap.
    """

    def __init__(
        self,
        job_id: JobId,
        job_name: str,
        descriptor: TaskDescriptor,
        committing: Iterable[tuple[CommittingSink, CommittingContext]] = (),
    ) -> None:
        """Creates the writers. `committing` has the sinks that commit in their tasks, with their contexts."""
        task = descriptor.task
        d = descriptor
        self._writers: dict[OperatorUid, _Writer] = {
            spec.uid: _SinkWriter(
                spec.sink,
                spec.name,
                SinkContext(str(job_id), job_name, str(spec.uid), task.subtask, d.parallelism, d.attempt),
            )
            for spec in descriptor.operators
            if spec.sink is not None
        }
        for sink, context in committing:
            self._writers[OperatorUid(context.uid)] = _CommittingSinkWriter(sink, context.name, context)
        self._waiting: dict[OperatorUid, deque[Callable[[], None]]] = {uid: deque() for uid in self._writers}
        self._lock = threading.Lock()
        self._calling: set[OperatorUid] = set()
        self._closed = False

    def __contains__(self, uid: object) -> bool:
        return uid in self._writers

    def begin(self, uid: OperatorUid, start: Callable[[], None]) -> None:
        """Runs `start`, which calls `stage`, as soon as the earlier calls of the same sink have returned."""
        self._waiting[uid].append(start)
        if len(self._waiting[uid]) == 1:
            start()

    def over(self, uid: OperatorUid) -> None:
        """Records that a call of a sink has returned, and starts the next waiting call.

        `uid` may also belong to a table sink, for which nothing happens.
        """
        waiting = self._waiting.get(uid)
        if waiting:
            waiting.popleft()
            if waiting:
                waiting[0]()

    def stage(self, instruction: StageFile) -> Prepared | None:
        """Writes rows to a user's sink and, if a checkpoint begins, prepares them. Returns None if the task is
        closed.
        """
        uid = instruction.uid
        with self._lock:
            if self._closed:
                return None
            self._calling.add(uid)
        writer = self._writers[uid]
        try:
            return self._call(writer, instruction)
        finally:
            with self._lock:
                self._calling.discard(uid)
                closes = self._closed
            if closes:
                _close(writer)

    def close(self) -> None:
        """Closes every sink that was opened, unless a call is running."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = [writer for uid, writer in self._writers.items() if uid not in self._calling]
        for writer in idle:
            _close(writer)

    def _call(self, writer: _Writer, instruction: StageFile) -> Prepared:
        method = "open"
        committables: tuple[bytes, ...] = ()
        parts: tuple[PreparedPart, ...] = ()
        try:
            if not writer.opened:
                writer.open()
            method = "write"
            for batch in instruction.batches:
                writer.write(batch)
                writer.rows += batch.num_rows
            method = "prepare"
            if instruction.prepare:
                committables, parts = writer.prepare(instruction.checkpoint_id)
        except BaseException as error:
            if not is_failure(error):
                raise
            c = writer.context
            raise OperatorError(
                f"operator {writer.name!r} (uid {c.uid!r}) failed on subtask {c.subtask + 1} of {c.parallelism}: "
                f"{error_text(error)}; in {method} of {writer.kind}"
            ) from error
        rows = writer.rows if instruction.prepare else 0
        writer.rows -= rows
        return Prepared(DataFile("", rows, sum(map(len, committables)), "", committables), parts)


def _checked(prepared: object) -> tuple[bytes, ...]:
    """Returns the result of `Sink.prepare` as a tuple. Raises ConfigurationError if the result is not a list of bytes,
    or too large.
    """
    if isinstance(prepared, bytes | str) or not hasattr(prepared, "__iter__"):
        raise ConfigurationError(
            f"prepare must return a list of bytes, not {type(prepared).__name__}; return an empty list if there is "
            "nothing to commit"
        )
    committables = tuple(prepared)
    for committable in committables:
        if not isinstance(committable, bytes):
            raise ConfigurationError(
                f"prepare returned a committable of type {type(committable).__name__}, and it must be bytes; encode "
                "it, for example with json.dumps(...).encode()"
            )
    if (size := sum(map(len, committables))) > COMMITTABLES_BYTES_MAX:
        raise ConfigurationError(
            f"prepare returned committables of {size} bytes; at most {COMMITTABLES_BYTES_MAX} go into a checkpoint. "
            "Write the data to your storage in prepare, and return its path"
        )
    return committables


def _checked_parts(prepared: object, buckets: range) -> tuple[PreparedPart, ...]:
    """Returns the result of `CommittingWriter.prepare`, converted. Raises ConfigurationError for invalid
    committables.
    """
    if isinstance(prepared, bytes | str) or not hasattr(prepared, "__iter__"):
        raise ConfigurationError(
            f"prepare must return a list of tg.Committable, not {type(prepared).__name__}; return an empty list if "
            "there is nothing to commit"
        )
    parts = []
    size_bytes = 0
    for committable in prepared:
        if not isinstance(committable, PreparedCommittable) or not isinstance(committable.data, bytes):
            raise ConfigurationError(
                f"prepare must return a list of tg.Committable(bucket, data) with data of bytes, not {committable!r}; "
                "encode the data"
            )
        if committable.bucket not in buckets:
            raise ConfigurationError(
                f"prepare returned a committable of bucket {committable.bucket!r}, and this subtask has buckets "
                f"{buckets.start} to {buckets.stop - 1}: use one of context.buckets"
            )
        parts.append(PreparedPart(committable.bucket, committable.data, tuple(committable.files)))
        size_bytes += len(committable.data) + sum(map(len, committable.files))
    if size_bytes > COMMITTABLES_BYTES_MAX:
        raise ConfigurationError(
            f"prepare returned committables of {size_bytes} bytes; at most {COMMITTABLES_BYTES_MAX} go into a "
            "checkpoint. Write the rows themselves with context.files.write, and return the path"
        )
    return tuple(parts)


def _close(writer: _Writer) -> None:
    if not writer.opened:
        return
    try:
        writer.close()
    except BaseException as error:
        if not is_failure(error):
            raise
        log_failure(log, f"sink {writer.name!r} could not be closed", error)


CALL_LIMIT_MIN_MS = 60_000
"""Shortest time limit of a call of a user's sink, in ms, also if storage outages are not tolerated."""


class SinkFailedError(TidegateError):
    """Raised when a sink of the user could not commit."""


class SinkRefusedError(SinkFailedError):
    """Raised when a sink has raised ConfigurationError, TableError or CorruptionError. A retry cannot help."""


class SinkHangsError(SinkFailedError):
    """Raised when a call of a user's sink has not returned in time. A retry cannot help."""


class SinkCommitters:
    """Calls the committing half of the users' sinks, for a coordinator or at the submission of a job.

    Rules:

    - Each sink has one committer, a copy that is never opened. Its calls do not overlap.
    - An error of a sink becomes a `SinkFailedError` with the sink and the reason. The caller retries, because commits
      are idempotent. ConfigurationError, TableError and CorruptionError become a `SinkRefusedError`, which fails the
      job at once.
    - The time limit of a call is the tolerated storage outage, and a minute at least. After that the sink is not called
      again, because calls must not overlap. The job fails, and a restored job commits with a new copy of the sink.
    """

    def __init__(self, specs: Mapping[str, OperatorSpec], limit_ms: int) -> None:
        self._specs = specs
        self._limit_ms = max(limit_ms, CALL_LIMIT_MIN_MS)
        self._committers: dict[str, Sink] = {}
        self._hung: set[str] = set()
        self._lock = threading.Lock()

    def __contains__(self, place: object) -> bool:
        return place in self._specs

    def commit(self, job_id: JobId, checkpoint_id: CheckpointId, asked: Iterable[Committable]) -> None:
        """Commits the prepared rows of a completed checkpoint. Earlier commits stay if a later one fails.

        Raises SinkFailedError if a sink fails, and SinkHangsError if its call does not return in time.
        """
        found: dict[str, list[bytes]] = {}
        for committable in asked:
            prepared = (item for file in committable.files for item in file.committables)
            found.setdefault(committable.table, []).extend(prepared)
        with self._lock:
            for place, committables in found.items():
                if not committables:
                    continue
                spec = self._specs[place]
                context = CommitContext(str(job_id), checkpoint_id, str(spec.uid))
                what = f"commit {len(committables)} committables of checkpoint {checkpoint_id}"
                try:
                    self._call(place, partial(self._committer(place).commit, committables, context))
                except NotBackError as error:
                    text = f"sink {spec.name!r} (uid {spec.uid!r}) did not {what}: {error}; give its calls a timeout"
                    raise SinkHangsError(text) from None
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    refused = isinstance(error, ConfigurationError | TableError | CorruptionError)
                    raise (SinkRefusedError if refused else SinkFailedError)(
                        f"sink {spec.name!r} (uid {spec.uid!r}) failed to {what}: {failure_text(error)}"
                    ) from error

    def abort(self, job_id: JobId) -> None:
        """Calls `abort` of each sink, because the job has ended. Errors are only logged."""
        with self._lock:
            for place, spec in self._specs.items():
                try:
                    self._call(place, partial(self._committer(place).abort, str(job_id)))
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    log_failure(log, f"sink {spec.name!r} could not drop what was never committed", error)

    def _call(self, place: str, call: Callable[[], None]) -> None:
        if place in self._hung:
            raise NotBackError("an earlier call of the sink has not returned; give its calls a timeout")
        try:
            call_within(call, self._limit_ms / 1_000, "tidegate-sink")
        except NotBackError:
            self._hung.add(place)
            raise

    def _committer(self, place: str) -> Sink:
        if place not in self._committers:
            sink = self._specs[place].sink
            assert sink is not None
            self._committers[place] = own_copy(sink)
        return self._committers[place]
