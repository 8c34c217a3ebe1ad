"""Errors that a user can cause or must act on. Each names what is wrong, where, and what to do."""

from __future__ import annotations

import errno


class TidegateError(Exception):
    """Base of every error that tidegate raises on purpose."""


class StorageError(TidegateError):
    """A file system failed an operation, which may be tried again."""


class AlreadyExistsError(StorageError):
    """A conditional create lost: the path exists already."""


class NotFoundError(StorageError):
    """A file that was requested by name does not exist."""


class CorruptionError(StorageError):
    """Stored bytes do not match their checksum or their format."""


class InvalidPathError(StorageError):
    """A path or a range of a file is invalid in every store. Repeating the call fails again."""


class StateTooLargeError(StorageError):
    """A state has more bytes than its storage accepts."""


class LogDeletedError(StorageError):
    """The event log of a running job is gone: its folder was deleted."""


class CodecError(TidegateError):
    """A value cannot be encoded, or bytes cannot be decoded into known types."""


class FencedError(TidegateError):
    """A newer generation has taken over. The caller must stop."""


class SavepointStoppedError(TidegateError):
    """A savepoint was given up while it was copied. The copy is incomplete."""


class ConfigurationError(TidegateError):
    """A setting or an argument is wrong, or two contradict each other."""


class IncompatibleStateError(ConfigurationError):
    """A program cannot continue from the state of a checkpoint, because the state means something else to it.

    A restart cannot fix that. The job ends, whatever its restart strategy is.
    """


class ProtocolError(TidegateError):
    """A rule of the protocol was broken: a fault of tidegate or of the transport, never of the user.

    The machine that raises it has not changed. Its runtime fails the task or the job, which then recovers.
    """


class InvariantError(TidegateError, AssertionError):
    """An invariant of a machine is broken: a fault of tidegate itself. The text names the invariant.

    It ends the job, or the attempt, before harm is done. Unlike an `assert` it also works under `python -O`.
    """


class TableError(TidegateError):
    """An output table does not allow an operation, such as a write with other columns."""


class CheckpointError(TidegateError):
    """A checkpoint that a user requested was not taken."""


class JobFailedError(TidegateError):
    """A job has failed. The message gives the reason."""


class FailureCause(TidegateError):
    """The cause of a `JobFailedError`, with the file, line and frames of the user's function."""


class JobTimeoutError(TidegateError, TimeoutError):
    """A job did not complete a request within the given time. The job continues."""


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

    True while storage does not answer or is full: it comes back, or other files are deleted. False for a refusal (a
    folder without write permission), damage, and a file that is missing or in the way.
    """
    cause = error.__cause__
    return not isinstance(error, _FINAL) and not (isinstance(cause, OSError) and cause.errno in _FINAL_ERRNOS)


def is_refused(error: StorageError) -> bool:
    """Returns whether storage answers and refuses the operation: a folder without write permission, or read-only."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _REFUSED_ERRNOS


def may_be_awaited(error: StorageError) -> bool:
    """Returns whether a running job waits for its storage after this error, as it does in an outage.

    True where `may_pass` is, and where storage refuses: the job was allowed to write there when it was submitted, so
    the permissions were changed and can be changed back. A restart would not help.
    """
    return may_pass(error) or is_refused(error)


DAMAGE = (CorruptionError, NotFoundError, CodecError)
"""Errors of reading a complete file that is damaged, as opposed to a storage that does not answer."""
