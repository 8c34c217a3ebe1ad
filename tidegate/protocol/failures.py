"""The reasons why checkpoints fail, the errors of operators, and functions that turn an error into bounded text.

The reasons are those in Flink's `CheckpointFailureReason` that can happen in tidegate. A *counted* reason counts
towards the tolerable number of failed checkpoints. The other reasons are not a fault of the job: a request that came
too early, a task that had just finished, an attempt that failed for another reason.

The functions that return text never raise, whatever the class of a user's error does.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import threading
import traceback

from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.user_values import logged_text, with_marks_of_cut


@wire
class CheckpointFailureReason(enum.Enum):
    """The reason why a checkpoint failed, or why a request for a checkpoint was refused."""

    # Before the trigger: the request is refused.
    SCHEDULER_SHUTDOWN = "the checkpoint scheduler is shut down"
    TOO_MANY_REQUESTS = "too many checkpoint requests are waiting"
    NOT_ALL_REQUIRED_TASKS_RUNNING = "not all required tasks are running"
    UNION_STATE_PARTLY_FINISHED = "an operator with union list state has finished in some of its subtasks only"
    # After the trigger; not counted.
    TASK_NOT_READY = "a task was not ready"
    TASK_CLOSING = "a task was closing"
    TASK_FINISHED = "a task finished while the checkpoint was being triggered"
    SUBSUMED = "a newer checkpoint overtook it"
    CANCEL_BARRIER = "an upstream task had cancelled it"
    JOB_FAILOVER = "the attempt failed"
    COORDINATOR_LOST = "the coordinator was lost"
    JOB_ENDING = "the job is ending"
    STORAGE_AWAY = "checkpoint storage does not answer"
    # Counted.
    DECLINED = "a task declined"
    ASYNC_PART_FAILED = "the asynchronous part of a task's snapshot failed"
    EXPIRED = "it expired before it was complete"
    HOOK_FAILED = "a master hook failed"
    METADATA_NOT_WRITTEN = "its metadata could not be written"
    SAVEPOINT_NOT_WRITTEN = "the savepoint could not be written"

    @property
    def counted(self) -> bool:
        """Returns whether a checkpoint that fails for this reason counts against the tolerable number of failures."""
        return self in _COUNTED


_COUNTED = frozenset(
    {
        CheckpointFailureReason.DECLINED,
        CheckpointFailureReason.ASYNC_PART_FAILED,
        CheckpointFailureReason.EXPIRED,
        CheckpointFailureReason.HOOK_FAILED,
        CheckpointFailureReason.METADATA_NOT_WRITTEN,
        CheckpointFailureReason.SAVEPOINT_NOT_WRITTEN,
    }
)

TEXT_BYTES_MAX = 4 * 1024
_TAIL_BYTES = 1024
_NOTE_BYTES = 64
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_LIBRARIES = frozenset(
    {
        "pyarrow",
        "polars",
        "numpy",
        "numba",
        "pandas",
        "ray",
        "fsspec",
        "s3fs",
        "gcsfs",
        "adlfs",
        "azure",
        "pyspark",
        "py4j",
        "cloudpickle",
    }
)
"""Libraries that user code calls. Stack frames of these libraries alone do not show where the user's code failed."""
_FRAMES_MAX = 8
_TRACE_FRAMES_MAX = 200
_CAUSES_MAX = 10
_SOURCE_CHARACTERS_MAX = 160


def bounded_text(text: str) -> str:
    """Returns the text in at most `TEXT_BYTES_MAX` bytes of UTF-8, for events, logs and messages.

    A longer text loses its middle, because an error begins with the failed step and ends with the cause. Lone
    surrogates are escaped, because UTF-8 cannot encode them.
    """
    if len(text) <= TEXT_BYTES_MAX:
        encoded = text.encode("utf-8", "backslashreplace")
        if len(encoded) <= TEXT_BYTES_MAX:
            return encoded.decode()
    head_bytes = TEXT_BYTES_MAX - _TAIL_BYTES - _NOTE_BYTES
    head = text[:head_bytes].encode("utf-8", "backslashreplace")[:head_bytes].decode("utf-8", "ignore")
    tail = text[-_TAIL_BYTES:].encode("utf-8", "backslashreplace")[-_TAIL_BYTES:].decode("utf-8", "ignore")
    head, tail = with_marks_of_cut(head, tail)
    return f"{head} … (cut; {len(text)} characters in all) … {tail}"


def error_text(error: BaseException) -> str:
    """Returns the class and the message of an error, cut to `TEXT_BYTES_MAX` bytes. Never raises, even if the code of
    the error does.
    """
    try:
        name = str.__str__(type(error).__name__)
        message = str.__str__(str(error))
    except BaseException as raised:  # noqa: BLE001 (user code; the failure must still be reported)
        return f"{type.__dict__['__name__'].__get__(type(error))}, whose text cannot be read: {type(raised).__name__}"
    return bounded_text(f"{name}: {message}" if message else name)


def failure_text(error: BaseException) -> str:
    """Returns the class and message of an error, and below them the stack frames of the user's code, outermost first.

    Each frame has the file, line and source. Frames of tidegate are omitted. The frames belong to the deepest cause
    that has frames of user code. Never raises.
    """
    try:
        frames = _user_frames(error)
    except BaseException as raised:  # noqa: BLE001 (as in `error_text`: the failure must still be reported)
        frames = [f"  (its frames cannot be read: {type(raised).__name__})"]
    return bounded_text("\n".join([error_text(error), *frames]))


def _user_frames(error: BaseException) -> list[str]:
    """Returns the lines of up to `_FRAMES_MAX` innermost stack frames of user code, as Python prints them, outermost
    first.
    """
    found: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < _CAUSES_MAX:
        seen.add(id(at))
        frames = traceback.extract_tb(at.__traceback__, limit=-_TRACE_FRAMES_MAX)
        called = itertools.dropwhile(lambda frame: not frame.filename.startswith(_PACKAGE), frames)
        users = [frame for frame in called if not frame.filename.startswith(_PACKAGE)]
        if not all(_is_of_library(frame.filename) for frame in users):
            found = [line for frame in users[-_FRAMES_MAX:] for line in _frame_lines(frame)]
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return found


def _frame_lines(frame: traceback.FrameSummary) -> list[str]:
    lines = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}']
    return [*lines, f"    {frame.line[:_SOURCE_CHARACTERS_MAX]}"] if frame.line else lines


def _is_of_library(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return True
    parts = filename.replace(os.sep, "/").split("/")
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py") in _LIBRARIES
    return filename.startswith(_STANDARD_LIBRARY) or parts[0] in _LIBRARIES


def is_permanent(error: BaseException) -> bool:
    """Returns whether a restart cannot help, because the program itself is wrong.

    True for a ConfigurationError, also as the cause of an OperatorError, and for an OperatorError that is marked
    permanent.
    """
    at: BaseException | None = error
    while isinstance(at, OperatorError):
        if at.permanent:
            return True
        at = at.__cause__
    return isinstance(at, ConfigurationError)


def fingerprint(error: BaseException) -> str:
    """Returns the fingerprint of an OperatorError, which is equal for repeated failures at one row, or "" for other
    errors.
    """
    return error.fingerprint if isinstance(error, OperatorError) else ""


def interrupts(error: BaseException) -> bool:
    """Returns whether the error is a KeyboardInterrupt of Ctrl-C, which reaches only the main thread.

    In another thread, user code has raised KeyboardInterrupt itself, and the function returns False.
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def log_failure(log: logging.Logger, message: str, error: BaseException) -> None:
    """Logs a failure as a warning, with its cause and the frames of the user's code, and at DEBUG with all frames.

    Values of users' rows are withheld unless `log_rows` is on. Never raises: user code may have closed the stream of
    the log.
    """
    try:
        log.warning("%s: %s", message, logged_text(failure_text(error)))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s", message, logged_text(stack_text(error)))
    except BaseException:  # noqa: BLE001 (nowhere is left to report it)
        return


def stack_text(error: BaseException) -> str:
    """Returns all stack frames of an error and of its causes, cut to `TEXT_BYTES_MAX` bytes. The error itself comes
    last.

    Of a cause that is not a TidegateError only the class is given: its message may contain unmarked values of rows, and
    the last error repeats it.
    """
    parts: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < _CAUSES_MAX:
        seen.add(id(at))
        said = error_text(at) if isinstance(at, TidegateError) else type(at).__name__
        parts.append("".join([*traceback.format_tb(at.__traceback__, limit=-_TRACE_FRAMES_MAX), said]))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return bounded_text("\n".join(reversed(parts)))


class OperatorError(TidegateError):
    """An operator failed on a batch.

    Either user code raised, or the data does not fit what the program declared.
    """

    permanent = False
    """True if a restart would fail in the same way. The job is then not restarted."""

    fingerprint = ""
    """Text that is equal for two failures of an operator with the same error at the same row. Empty if the failure may
    pass.
    """


class ChangedTypeError(OperatorError):
    """Raised if a batch has other column types than the operator's state. A restart would read the same rows and fail
    again.
    """

    permanent = True
