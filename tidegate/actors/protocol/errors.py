"""`OperatorError`: what went wrong inside an operator or a function of the user, and in which."""

from __future__ import annotations

from tidegate.storage.errors import TidegateError


class OperatorError(TidegateError):
    """An operator failed on a batch.

    Code of the user raised, or data does not fit what the operator was told.
    """
