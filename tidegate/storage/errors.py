"""Errors that a user can cause or must act on. Each says what was wrong, where, and what to do."""

from __future__ import annotations

import errno


class TidegateError(Exception):
    """Base of every error that tidegate raises on purpose."""


class StorageError(TidegateError):
    """A file system did not do what was asked; the operation may be tried again."""


class AlreadyExistsError(StorageError):
    """A conditional create lost: the path was there already."""


class NotFoundError(StorageError):
    """A file that was asked for by name is not there."""


class CorruptionError(StorageError):
    """Bytes were read that do not match their checksum or their format."""


class InvalidPathError(StorageError):
    """No store has such a path, or such a range of a file: whoever asked is wrong, and will be wrong again."""


class StateTooLargeError(StorageError):
    """A state has more bytes than its storage takes."""


class LogDeletedError(StorageError):
    """The event log of a job that runs is gone: somebody has deleted its folder."""


class CodecError(TidegateError):
    """A value cannot be encoded, or bytes cannot be decoded into known types."""


class FencedError(TidegateError):
    """Somebody with a newer generation has taken over; the caller must stop."""


class SavepointStoppedError(TidegateError):
    """A savepoint was given up while it was being copied, so the copy was not completed."""


class ConfigurationError(TidegateError):
    """A setting or an argument is wrong, or two contradict each other."""


class IncompatibleStateError(ConfigurationError):
    """A program cannot go on from the state of a checkpoint, because the state means something else to it.

    A restart cannot fix it: the job ends, whatever its restart strategy is.
    """


class ProtocolError(TidegateError):
    """A rule of the protocol was broken: a fault of tidegate or of the transport, never of the user.

    The machine that raises it has changed nothing; its runtime fails the task or the job, which then recovers.
    """


class InvariantError(TidegateError, AssertionError):
    """What must always hold does not, inside one machine: a fault of tidegate itself. The text says what was broken.

    It ends the job, or the attempt, before harm is done. Unlike an `assert` it is there under `python -O` as well.
    """


class TableError(TidegateError):
    """An output table does not fit what a job wants to do with it."""


class CheckpointError(TidegateError):
    """A checkpoint that a user asked for was not taken."""


class JobFailedError(TidegateError):
    """A job has failed; the message holds the reason."""


class FailureCause(TidegateError):
    """What failed a job, with the file, line and frames of the user's function: the cause of a `JobFailedError`."""


class JobTimeoutError(TidegateError, TimeoutError):
    """A job has not done what was asked of it within the time that was given. It goes on."""


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
    """Whether the same operation may succeed later without anybody changing what was asked or what it was asked of.

    True while storage does not answer or has no room: it comes back, or other files go. False for a refusal (a folder
    that may not be written), damage, and a file that is missing or in the way.
    """
    cause = error.__cause__
    return not isinstance(error, _FINAL) and not (isinstance(cause, OSError) and cause.errno in _FINAL_ERRNOS)


def is_refused(error: StorageError) -> bool:
    """Whether storage answers, and does not allow the operation: a folder that may not be written, or is read-only."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _REFUSED_ERRNOS


def may_be_awaited(error: StorageError) -> bool:
    """Whether a running job waits for its storage after this error, as it does in an outage.

    True where `may_pass` is, and where storage refuses: the job was allowed to write there when it was submitted, so
    somebody has changed the permissions and can change them back. A restart would not help.
    """
    return may_pass(error) or is_refused(error)


DAMAGE = (CorruptionError, NotFoundError, CodecError)
"""What reading something that was complete raises when it is damaged, and not when storage is away."""
