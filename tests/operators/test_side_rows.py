"""What functions emit under tags: it leaves with the call, in batches of the tag's columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from operator_harness import context

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.protocol.edges import OutputTag
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError

SCHEMA = pa.schema([("x", pa.int32())])
BAD, NONE = OutputTag("bad", SCHEMA), OutputTag("none", SCHEMA)
Row = dict[str, Any]


class Sorting(ProcessFunction):
    """Negative rows go aside, all of them again at the end."""

    def open(self, context: ProcessContext) -> None:
        self._aside = 0

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        if row["x"] < 0:
            self._aside += 1
            context.emit(BAD if row["x"] % 2 else "bad", row)
        else:
            yield row

    def finish(self, context: ProcessContext) -> None:
        context.emit("none", {"x": self._aside})


class Emitting(ProcessFunction):
    """Emits one thing under one tag."""

    def __init__(self, tag: object, row: object, when: str = "process") -> None:
        self._tag, self._row, self._when = tag, row, when

    def open(self, context: ProcessContext) -> None:
        if self._when == "open":
            context.emit(self._tag, self._row)  # type: ignore[arg-type]

    def process(self, row: Row, context: ProcessContext) -> None:
        context.emit(self._tag, self._row)  # type: ignore[arg-type]


def emitted(function: ProcessFunction, *batches: list[int]) -> list[tuple[str, list[Row]]]:
    """What leaves, in order: rows of the output as `out`."""
    log: list[tuple[str, list[Row]]] = []
    operator = ProcessOperator(function, schema=pa.schema([("x", pa.int64())]), side_outputs=(BAD, NONE))

    def aside(tag: str, batch: pa.RecordBatch) -> None:
        assert batch.schema == SCHEMA
        log.append((tag, batch.to_pylist()))

    operator.open(replace(context(), emit_aside=aside), ())
    for batch in batches:
        operator.process(pa.record_batch({"x": batch}), lambda batch: log.append(("out", batch.to_pylist())))
        log.append(("end of the call", []))
    list(operator.finish(lambda batch: log.append(("out", batch.to_pylist()))))
    return log


def test_rows_leave_when_the_call_ends() -> None:
    """None waits for the next batch: a barrier may come in between."""
    assert emitted(Sorting(), [1, -2, 3, -5], [-7]) == [
        ("bad", [{"x": -2}, {"x": -5}]),
        ("out", [{"x": 1}, {"x": 3}]),
        ("end of the call", []),
        ("bad", [{"x": -7}]),
        ("end of the call", []),
        ("none", [{"x": 3}]),
    ]


def test_many_rows_leave_before_that() -> None:
    """What waits is bounded."""
    sizes = [len(rows) for tag, rows in emitted(Sorting(), [-1] * (OUTPUT_ROWS_MAX + 3)) if tag == "bad"]
    assert sizes == [OUTPUT_ROWS_MAX, 3]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (Emitting("worst", {"x": 1}), OperatorError, r"no such side output; it has 'bad', 'none'"),
        (Emitting("bad", [1]), OperatorError, "a row must be a dict, not list"),
        (Emitting("bad", {"y": 1}), OperatorError, r"for the side output 'bad'.*'y': 1"),
        (Emitting("bad", {"x": 2**40}), OperatorError, "for the side output 'bad'"),
        (Emitting("bad", {"x": 1}, "open"), ConfigurationError, "not in open"),
    ],
)
def test_what_cannot_be_emitted_is_refused(function: ProcessFunction, error: type[Exception], message: str) -> None:
    """With the tag, and the row where there is one."""
    with pytest.raises(error, match=message):
        emitted(function, [1])


def test_two_tags_of_one_name_are_refused_with_the_program() -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError, match="two side outputs are called 'bad'"):
        ProcessOperator(Sorting(), side_outputs=(BAD, BAD))
