"""Turns what went wrong inside an operator into an error that names the operator, the subtask and the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa

from tidegate.actors.operators.operator import OperatorContext
from tidegate.actors.protocol.errors import OperatorError
from tidegate.actors.protocol.failure_reasons import error_text, interrupts, value_text

_ROW_CHARACTERS_MAX = 500


@contextmanager
def blame(context: OperatorContext, batch: pa.RecordBatch) -> Iterator[None]:
    """Raise OperatorError, with the cause chained, for any exception inside.

    Emit outside of it, never inside.
    """
    try:
        yield
    except OperatorError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        first = batch.slice(0, 1).to_pylist()
        raise failure(context, error, "first row of the batch", first[0] if first else {}) from error


@contextmanager
def blame_row(context: OperatorContext, row: Mapping[str, object], number: int) -> Iterator[None]:
    """As `blame`, for code that works on one row of a batch."""
    try:
        yield
    except OperatorError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise failure(context, error, f"row {number} of the batch", row) from error


def is_failure(error: BaseException) -> bool:
    """Whether code of the user has failed: by whatever it raises, also an exit or the panic of a library.

    Not Ctrl-C. No generator of ours is left in the middle of what is blamed: its end would look like a failure.
    """
    return not interrupts(error)


def failure(
    context: OperatorContext, error: BaseException, place: str, row: Mapping[str, object] | None = None
) -> OperatorError:
    """The error to raise for `error`, found at `place` and, where there is one, `row`."""
    shown = "" if row is None else f": {value_text(dict(row), _ROW_CHARACTERS_MAX)}"
    return OperatorError(
        f"operator {context.name!r} (uid {context.uid!r}) failed on subtask {context.subtask + 1} of "
        f"{context.parallelism}: {error_text(error)}; {place}{shown}"
    )
