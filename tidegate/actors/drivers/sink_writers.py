"""`SinkWriters`: calls the writing half of the sinks of the user's in one task.

Rules:

- What one sink is given is written in order, one call at a time: `begin` and `over` say when the next one may start.
- What a sink raises fails the task, and names the operator. It is not tried again: nobody knows how much was written.
- A task may be closed in the middle of a call. The thread that calls closes the sink then, so that no two are inside.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from tidegate.actors.task.messages.instructions import StageFile
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.operators.operator_errors import is_failure, own_copy
from tidegate.operators.sinks.sink import COMMITTABLES_BYTES_MAX, Sink, SinkContext
from tidegate.protocol.errors import OperatorError
from tidegate.protocol.failure_reasons import error_text, log_failure
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import JobId, OperatorUid

log = logging.getLogger(__name__)


class _Writer:
    """One sink in one subtask."""

    def __init__(self, sink: Sink, name: str, context: SinkContext) -> None:
        self.sink = own_copy(sink)
        self.name = name
        self.context = context
        self.opened = False
        self.rows = 0
        """Rows since it has prepared."""


class SinkWriters:
    """The sinks of the user's in one task. `begin` and `over` run on its mailbox, all else on any thread."""

    def __init__(self, job_id: JobId, job_name: str, descriptor: TaskDescriptor) -> None:
        task, d = descriptor.task, descriptor
        self._writers = {
            spec.uid: _Writer(
                spec.sink,
                spec.name,
                SinkContext(str(job_id), job_name, str(spec.uid), task.subtask, d.parallelism, d.attempt),
            )
            for spec in descriptor.operators
            if spec.sink is not None
        }
        self._waiting: dict[OperatorUid, deque[Callable[[], None]]] = {uid: deque() for uid in self._writers}
        self._lock = threading.Lock()
        self._calling: set[OperatorUid] = set()
        self._closed = False

    def __contains__(self, uid: object) -> bool:
        return uid in self._writers

    def begin(self, uid: OperatorUid, start: Callable[[], None]) -> None:
        """Start a call of `stage` as soon as those before it are over."""
        self._waiting[uid].append(start)
        if len(self._waiting[uid]) == 1:
            start()

    def over(self, uid: OperatorUid) -> None:
        """The first call of a sink is over: start the next one, if one waits. Nothing for a table."""
        waiting = self._waiting.get(uid)
        if waiting:
            waiting.popleft()
            if waiting:
                waiting[0]()

    def stage(self, instruction: StageFile) -> DataFile | None:
        """Write rows and, where a checkpoint begins, prepare. None if the task is closed."""
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
        """Close every sink that was opened. Called once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = [writer for uid, writer in self._writers.items() if uid not in self._calling]
        for writer in idle:
            _close(writer)

    def _call(self, writer: _Writer, instruction: StageFile) -> DataFile:
        method = "open"
        try:
            if not writer.opened:
                writer.opened = True
                writer.sink.open(writer.context)
            method = "write"
            for batch in instruction.batches:
                writer.sink.write(batch)
                writer.rows += batch.num_rows
            method = "prepare"
            committables = _checked(writer.sink.prepare()) if instruction.prepare else ()
        except BaseException as error:
            if not is_failure(error):
                raise
            c = writer.context
            raise OperatorError(
                f"operator {writer.name!r} (uid {c.uid!r}) failed on subtask {c.subtask + 1} of {c.parallelism}: "
                f"{error_text(error)}; in {method} of {type(writer.sink).__name__}"
            ) from error
        rows = writer.rows if instruction.prepare else 0
        writer.rows -= rows
        return DataFile("", rows, sum(map(len, committables)), "", committables)


def _checked(prepared: object) -> tuple[bytes, ...]:
    """What `prepare` has returned. ConfigurationError for anything else than a few bytes."""
    if isinstance(prepared, bytes | str) or not hasattr(prepared, "__iter__"):
        raise ConfigurationError(
            f"prepare must return a list of committables, each of bytes, not {type(prepared).__name__}; an empty list "
            "if there is nothing to commit"
        )
    committables = tuple(prepared)
    for committable in committables:
        if not isinstance(committable, bytes):
            raise ConfigurationError(
                f"a committable must be bytes, not {type(committable).__name__}; encode it, as by "
                "json.dumps(...).encode()"
            )
    if (size := sum(map(len, committables))) > COMMITTABLES_BYTES_MAX:
        raise ConfigurationError(
            f"prepare returned committables of {size} bytes; at most {COMMITTABLES_BYTES_MAX} go into a checkpoint. "
            "Write the data itself in prepare, and return where it is"
        )
    return committables


def _close(writer: _Writer) -> None:
    if not writer.opened:
        return
    try:
        writer.sink.close()
    except BaseException as error:
        if not is_failure(error):
            raise
        log_failure(log, f"sink {writer.name!r} could not be closed", error)
