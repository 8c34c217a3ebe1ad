"""`OperatorError`: wraps what an operator or a user function raised, and names the operator."""

from __future__ import annotations

from tidegate.storage.errors import TidegateError


class OperatorError(TidegateError):
    """An operator failed on a batch.

    Either user code raised, or the data does not fit what the program declared.
    """

    permanent = False
    """Whether a restart would fail in the same way, so that none is made."""

    fingerprint = ""
    """Equal for two failures that are the same: of one operator, with the same error, at the same row. Empty for those
    that may pass by themselves."""


class ChangedTypeError(OperatorError):
    """A batch has other types than the state that an operator keeps. The rows come again after a restart."""

    permanent = True
