"""Errors that a user can cause or must act on. Each error text names what is wrong, where, and what to do."""

from __future__ import annotations

import errno


class TidegateError(Exception):
    """Base of every error that tidegate raises on purpose."""


class StorageError(TidegateError):
    """Raised when an operation of a file system failed. The operation may be tried again."""


class AlreadyExistsError(StorageError):
    """Raised when a conditional create finds that the path exists already."""


class NotFoundError(StorageError):
    """Raised when a file that was requested by name does not exist."""


class CorruptionError(StorageError):
    """Raised when stored bytes do not match their checksum or their format."""


class InvalidPathError(StorageError):
    """Raised for a path or a range of a file that no store accepts. Repeating the call fails again."""


class StateTooLargeError(StorageError):
    """Raised when a state has more bytes than its storage accepts."""


class LogDeletedError(StorageError):
    """Raised when the event log of a running job is gone, because its folder was deleted."""


class CodecError(TidegateError):
    """Raised when a value cannot be encoded, or when bytes cannot be decoded into known types."""


class FencedError(TidegateError):
    """Raised when a newer coordinator generation has taken over the job. The caller must stop."""


class SavepointStoppedError(TidegateError):
    """Raised when a savepoint was aborted while it was being copied. The copy is incomplete."""


class ConfigurationError(TidegateError):
    """Raised when a setting or an argument is wrong, or when two contradict each other."""


class IncompatibleStateError(ConfigurationError):
    """Raised when a program cannot continue from the state of a checkpoint, because the state has another meaning in
    the program.

    A restart cannot fix that. The job ends, whatever its restart strategy is.
    """


class ProtocolError(TidegateError):
    """Raised when a rule of the protocol is broken: a bug of tidegate or of the transport, never of the user.

    The state machine that raises this error has not changed its state. Its runtime fails the task or the job, which
    then recovers.
    """


class InvariantError(TidegateError, AssertionError):
    """Raised when an invariant of a state machine is broken: a bug of tidegate itself. The text names the invariant.

    The error ends the job, or the attempt, before wrong data is written. Unlike an `assert` it also works under `python
    -O`.
    """


class TableError(TidegateError):
    """Raised when an output table does not allow an operation, such as a write with other columns."""


class CheckpointError(TidegateError):
    """Raised when a checkpoint or savepoint that a user requested could not be taken."""


class JobFailedError(TidegateError):
    """Raised when a job has failed. The message gives the reason."""


class FailureCause(TidegateError):
    """The cause of a `JobFailedError` in code of the user. It holds the file, line and frames of the user's
    function.
    """


class JobTimeoutError(TidegateError, TimeoutError):
    """Raised when a job did not complete a request within the given time. The job continues."""


_FINAL = (
    AlreadyExistsError,
    NotFoundError,
    CorruptionError,
    InvalidPathError,
    StateTooLargeError,
    LogDeletedError,
)
_REFUSED_ERRNOS = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
_FINAL_ERRNOS = _REFUSED_ERRNOS | frozenset(
    (
        errno.EEXIST,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.EINVAL,
    )
)


def may_pass(error: StorageError) -> bool:
    """Returns whether the same operation may succeed later without any change to its arguments or its target.

    True while the storage does not answer or is full. False if storage refused the operation (no write permission), for
    damaged files, and for a file that is missing or has the name of a needed folder.
    """
    cause = error.__cause__
    return not isinstance(error, _FINAL) and not (isinstance(cause, OSError) and cause.errno in _FINAL_ERRNOS)


def is_refused(error: StorageError) -> bool:
    """Returns whether the storage answered and refused the operation, e.g. for a folder without write permission."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _REFUSED_ERRNOS


def may_be_awaited(error: StorageError) -> bool:
    """Returns whether a running job waits and tries again after this storage error, instead of failing.

    True for errors of `may_pass`, and for refusals: the job was allowed to write there when it was submitted, so the
    permissions were changed and can be changed back. A restart would not help.
    """
    return may_pass(error) or is_refused(error)


DAMAGE = (CorruptionError, NotFoundError, CodecError)
"""Error classes for a complete file that is damaged, as opposed to a storage that does not answer."""
