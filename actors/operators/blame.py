"""Turns what went wrong inside an operator into an error that says which operator, which subtask and which
row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa

from tidegate.actors.errors import OperatorError
from tidegate.actors.operators.base import OperatorContext

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
    except Exception as error:
        first = batch.slice(0, 1).to_pylist()
        raise failure(context, error, "first row of the batch", first[0] if first else {}) from error


@contextmanager
def blame_row(context: OperatorContext, row: Mapping[str, object], number: int) -> Iterator[None]:
    """As `blame`, for code that works on one row of a batch."""
    try:
        yield
    except OperatorError:
        raise
    except Exception as error:
        raise failure(context, error, f"row {number} of the batch", row) from error


def failure(
    context: OperatorContext, error: Exception, place: str, row: Mapping[str, object] | None = None
) -> OperatorError:
    """The error to raise for `error`, found at `place` and, where there is one, `row`."""
    shown = "" if row is None else f": {dict(row)!r}"
    if len(shown) > _ROW_CHARACTERS_MAX:
        shown = shown[:_ROW_CHARACTERS_MAX] + "…"
    return OperatorError(
        f"operator {context.name!r} (uid {context.uid!r}) failed on subtask {context.subtask + 1} of "
        f"{context.parallelism}: {type(error).__name__}: {error}; {place}{shown}"
    )
