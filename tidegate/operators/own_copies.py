"""`own_copy`: each subtask of each attempt has a function object to itself, also where all of them share a process."""

from __future__ import annotations

import copy
from typing import TypeVar

from tidegate.operators.operator_errors import is_failure
from tidegate.protocol.failure_reasons import error_text
from tidegate.storage.errors import ConfigurationError

F = TypeVar("F")


def own_copy(function: F) -> F:
    """A deep copy of a function object. ConfigurationError for one that cannot be copied."""
    try:
        return copy.deepcopy(function)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"{type(function).__name__} cannot be copied ({error_text(error)}), and each subtask needs a copy of its "
            "own; make in open what cannot be copied"
        ) from error
