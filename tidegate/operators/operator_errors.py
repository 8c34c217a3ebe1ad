"""Turns a failure inside an operator into an `OperatorError` that names the operator, the subtask and the row.

Operators wrap calls of user functions in `blame`, `blame_row` or `blame_call`. Each subtask and attempt calls its own
copy of the user's function (`own_copy`), because subtasks may share a process.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TypeVar

import pyarrow as pa

from tidegate.operators.operator import OperatorContext
from tidegate.operators.output_schema import SchemaMismatchError
from tidegate.protocol.failures import OperatorError, error_text, interrupts
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.user_values import mark_values, value_text

_ROW_CHARACTERS_MAX = 500
_ROWS_SEARCHED_MAX = 10_000
"""Greatest number of rows of a batch whose values are searched for in the message of an exception, to mark them as
values of the user.
"""
_DEPTH_MAX = 8
_CALLS_MAX = 64
"""Greatest number of exceptions of functions inside polars expressions that are kept until `Blame` looks them up."""
_CALL = re.compile(r"call (\d+) of a function has failed")


class Blame(AbstractContextManager[None]):
    """A context manager that converts any exception inside to an OperatorError, with the exception as its cause. An
    OperatorError passes unchanged.

    Do not emit inside: an exception of the next operator would be reported as an error of this operator.
    """

    __slots__ = ("_batch", "_context", "_locate", "_start")

    def __init__(
        self,
        context: OperatorContext,
        locate: Callable[[], tuple[str, Mapping[str, object] | None]],
        batch: pa.RecordBatch | pa.Table | None = None,
        start: int | None = None,
    ) -> None:
        """`locate` is called after a failure, and returns a description of the place and the failing row (or None) for
        the error text.

        `batch` has the rows that the code inside works on. Their values are marked as user values in the message of the
        exception. `start` is given if the code inside makes one row of each row of `batch`: the index of the first row
        of `batch` in the batch of the operator. A SchemaMismatchError then shows the row whose result it refuses.
        """
        self._context = context
        self._start = start
        self._locate = locate
        self._batch = batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, OperatorError) and is_failure(error):
            place, row = self._locate()
            call = _failed_call(error)
            if call is not None:
                error, number = call
                if number is not None and self._batch is not None and number < self._batch.num_rows:
                    place, row = f"row {number} of the batch", first_row(self._batch.slice(number, 1))
            elif isinstance(error, SchemaMismatchError) and error.row is not None and self._start is not None:
                assert self._batch is not None, "results of no batch"
                place = f"row {self._start + error.row} of the batch"
                row = first_row(self._batch.slice(error.row, 1))
            raise failure(self._context, error, place, row, self._batch) from error


def blame(context: OperatorContext, batch: pa.RecordBatch) -> Blame:
    """Returns a context manager that reports an exception as a failure in this batch.

    The error shows the first row of the batch.
    """
    return Blame(context, lambda: ("first row of the batch", first_row(batch)), batch)


def blame_results(context: OperatorContext, batch: pa.RecordBatch, start: int = 0) -> Blame:
    """Returns a context manager for results of which there is one for each row of a batch.

    The error shows the row whose result does not fit, or else the first row. `start` is the index of the first row in
    the batch of the operator.
    """
    return Blame(context, lambda: ("first row of the batch", first_row(batch)), batch, start)


def timer_place(moment_ms: int) -> str:
    """Returns the description of a timer for an error text."""
    return "timer at the end of the input" if moment_ms == MAX_WATERMARK_MS else f"timer at {moment_ms}"


def blame_row(context: OperatorContext, row: Mapping[str, object], number: int) -> Blame:
    """Returns a context manager that reports an exception as a failure of the row with the index `number` in a
    batch.
    """
    return Blame(context, lambda: (f"row {number} of the batch", row))


class CallFailedError(Exception):
    """Raised inside a polars expression in place of an exception of a user's function, which polars would not pass on.

    Its text contains the number of the stored exception.
    """


_calls: OrderedDict[int, tuple[BaseException, int | None]] = OrderedDict()
_calls_lock = threading.Lock()
_call_numbers = itertools.count(1)


def call_failed(error: BaseException, row: int | None) -> CallFailedError:
    """Stores an exception of a user's function, with the index of its row in the batch. Returns the exception to raise
    instead.

    polars turns an exception inside an expression into a new one with the same text. `blame` finds the stored exception
    by the number in that text.
    """
    with _calls_lock:
        number = next(_call_numbers)
        _calls[number] = (error, row)
        while len(_calls) > _CALLS_MAX:
            _calls.popitem(last=False)
    return CallFailedError(
        f"call {number} of a function has failed with {type(error).__name__}: see the cause of this error"
    )


def _failed_call(error: BaseException) -> tuple[BaseException, int | None] | None:
    """Returns the stored exception and the index of its row, for an exception that polars raised.

    None if polars itself failed.
    """
    if not isinstance(error, CallFailedError):
        return None
    found = _CALL.search(str(error))
    with _calls_lock:
        return None if found is None else _calls.pop(int(found[1]), None)


def first_row(rows: pa.RecordBatch) -> dict[str, object]:
    """Returns the first row of a batch for an error text. Empty if there are no rows.

    Never raises, because that would hide the error. Values that Python cannot represent, such as days after the year
    9999 or strings that are not UTF-8, are replaced.
    """
    return {
        name: _shown(column[0]) for name, column in zip(rows.schema.names, rows.columns, strict=True) if len(column)
    }


def _shown(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return f"<{value.type}: {getattr(value, 'value', 'no value')}, which Python cannot represent>"


@contextmanager
def blame_call(context: OperatorContext, method: str) -> Iterator[None]:
    """Returns a context manager that reports an exception of a user's method that gets no row, such as `open`.

    A TidegateError passes unchanged.
    """
    try:
        yield
    except TidegateError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise failure(context, error, f"in {method}") from error


def is_failure(error: BaseException) -> bool:
    """Returns whether an exception means that code of the user has failed.

    True for every exception except Ctrl-C, also for SystemExit and panics of libraries. Do not abandon a generator
    inside a `Blame`, because its `GeneratorExit` would count as a failure.
    """
    return not interrupts(error)


def failure(
    context: OperatorContext,
    error: BaseException,
    place: str,
    row: Mapping[str, object] | None = None,
    batch: pa.RecordBatch | pa.Table | None = None,
) -> OperatorError:
    """Returns an OperatorError for `error`, which happened at `place` with `row` of `batch`. `row` and `batch` are None
    if unknown.

    The row is marked as a user value, and so are values of the batch that the message of `error` repeats.
    """
    row_text = "" if row is None else value_text(row if type(row) is dict else dict(row), _ROW_CHARACTERS_MAX)
    line = _raising_line(error)  # Texts that stand in the code itself are not user values.
    texts = [text for text in [*_texts_of(row), *_texts_of_batch(batch)] if text not in line]
    if isinstance(error, TidegateError):  # It marks its own values, and other numbers in it are not user values.
        texts = [text for text in texts if not text.lstrip("-").replace(".", "").isdigit()]
    message = mark_values(error_text(error), texts)
    shown = f": {row_text}" if row_text else ""
    failed = OperatorError(
        f"operator {context.name!r} (uid {context.uid!r}) failed on subtask {context.subtask + 1} of "
        f"{context.parallelism}: {message}; {place}{shown}"
    )
    if row_text and not isinstance(error, OSError):  # An OSError may be transient, so it does not identify a bad row.
        known = "\0".join([str(context.uid), error_text(error), row_text])
        failed.fingerprint = hashlib.sha256(known.encode("utf-8", "backslashreplace")).hexdigest()[:32]
    return failed


def _raising_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return (frames[-1].line or "") if frames else ""


def _texts_of(value: object, depth: int = 0) -> list[str]:
    """Returns the texts by which an error message may show a value, or the values inside it. Never raises."""
    if value is None or isinstance(value, bool) or depth > _DEPTH_MAX:
        return []
    if isinstance(value, Mapping):
        return [text for each in value.values() for text in _texts_of(each, depth + 1)]
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _texts_of(each, depth + 1)]
    if isinstance(value, bytes):
        return [repr(value), value.decode("utf-8", "replace")]
    try:
        return [str(value), repr(value)]
    except BaseException as error:
        if not is_failure(error):
            raise
        return []


def _texts_of_batch(batch: pa.RecordBatch | pa.Table | None) -> list[str]:
    if batch is None:
        return []
    texts: list[str] = []
    for column in batch.slice(0, _ROWS_SEARCHED_MAX).columns:
        try:
            texts += _texts_of(column.to_pylist())
        except (ValueError, OverflowError, pa.ArrowException):  # as in `first_row`
            texts += [text for value in column for text in _texts_of(_shown(value))]
    return texts


F = TypeVar("F")


def own_copy(function: F) -> F:
    """Returns a deep copy of a function object for one subtask. Raises ConfigurationError if it cannot be copied."""
    try:
        return copy.deepcopy(function)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"{type(function).__name__} cannot be copied ({error_text(error)}), but each subtask needs its own copy. "
            "Create attributes that cannot be copied in open"
        ) from error
