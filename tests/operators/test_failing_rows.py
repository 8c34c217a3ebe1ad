"""Rows that a function fails for go to a side output with the error, and change nothing for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from operator_harness import context

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.failing_rows import GuardedFilter, GuardedFlatMap, GuardedMap, error_tag
from tidegate.operators.operator import Operator
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError

SCHEMA = pa.schema([("x", pa.int32()), ("s", pa.dictionary(pa.int8(), pa.string()))])
TAG = error_tag("bad", SCHEMA, "map")
OUT = pa.schema([("y", pa.int8())])
BATCH = pa.record_batch({"x": pa.array([1, 0, None, 4]), "s": pa.array(["a", "b", None, "b"])}).cast(SCHEMA)


def outputs(operator: Operator, batch: pa.RecordBatch = BATCH) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """The rows of the output, and those aside."""
    aside: list[pa.RecordBatch] = []
    out: list[pa.RecordBatch] = []
    operator.open(replace(context(), emit_aside=lambda tag, rows: aside.append(rows)), ())
    operator.process(batch, out.append)
    assert all(rows.schema == TAG.schema for rows in aside)
    assert all(rows.num_rows for rows in out)
    return (
        [row for rows in out for row in rows.to_pylist()],
        [tuple(row.values()) for rows in aside for row in rows.to_pylist()],
    )


def test_a_row_that_fails_keeps_its_columns_and_says_why() -> None:
    """With their types, dictionaries and nulls included."""
    kept, failed = outputs(GuardedMap(lambda row: {"y": 4 // row["x"]}, OUT, TAG))
    assert kept == [{"y": 4}, {"y": 1}]
    assert [(x, s, error.split(":")[0]) for x, s, error in failed] == [
        (0, "b", "ZeroDivisionError"),
        (None, None, "TypeError"),
    ]


def test_nothing_of_a_row_that_fails_is_in_the_output() -> None:
    """Also not what was yielded before it failed, or what fits the schema when another row of it does not."""

    def several(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"y": 1}
        yield {"y": 10 ** (row["x"] or 9)}

    kept, failed = outputs(GuardedFlatMap(several, OUT, TAG))
    assert kept == [{"y": 1}, {"y": 10}]
    assert [x for x, _, _ in failed] == [0, None, 4]
    assert "SchemaMismatchError" in failed[0][2]


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda row: 7, "iterable of rows, not int"),
        (lambda row: [7], "a row must be a dict, not int"),
        (lambda row: {}, "returned one row"),
        (lambda row: "", "iterable of rows, not str"),
    ],
)
def test_what_is_no_row_fails_for_its_row_alone(fn: Callable[[Any], Any], error: str) -> None:
    """As an error of the function does."""
    kept, failed = outputs(GuardedFlatMap(fn, OUT, TAG))
    assert (kept, len(failed)) == ([], 4)
    assert all(error in text for _, _, text in failed)


def test_a_filter_drops_what_fails_and_what_is_false() -> None:
    """Only what fails goes aside."""
    kept, failed = outputs(GuardedFilter(lambda row: 4 // row["x"] > 1, TAG))
    assert [row["x"] for row in kept] == [1]
    assert [x for x, _, _ in failed] == [0, None]


def test_output_comes_in_batches_of_bounded_size() -> None:
    """However many rows one row becomes; nothing aside, no empty batch."""
    operator = GuardedFlatMap(lambda row: [{"y": 1}] * (OUTPUT_ROWS_MAX - 1 + (row["x"] or 0)), OUT, TAG)
    operator.open(context(), ())
    sizes: list[int] = []
    operator.process(BATCH.slice(0, 2), lambda batch: sizes.append(batch.num_rows))
    assert sizes == [OUTPUT_ROWS_MAX, OUTPUT_ROWS_MAX - 1]


def test_ctrl_c_is_no_failure_of_a_row() -> None:
    """It ends the program."""

    def interrupted(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outputs(GuardedMap(interrupted, OUT, TAG))


def test_the_columns_of_failing_rows_must_be_known() -> None:
    """And there must be room for the error; a tag with other columns is refused."""
    with pytest.raises(ConfigurationError, match="known only when the job runs"):
        error_tag("bad", None, "map")
    with pytest.raises(ConfigurationError, match="already has a column 'error'"):
        error_tag("bad", TAG.schema, "map")
    with pytest.raises(ConfigurationError, match="give its name alone"):
        error_tag(OutputTag("bad", SCHEMA), SCHEMA, "map")
    assert error_tag(TAG, SCHEMA, "map") == TAG
