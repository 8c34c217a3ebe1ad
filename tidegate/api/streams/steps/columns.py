"""Works out the columns of a stream before the job runs: which a step computes, and which it copies.

`stream_steps.py` asks, when it adds an operator. Expressions are evaluated on no rows, so polars itself answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.operators.operator import Operator, OperatorContext
from tidegate.operators.output_schema import empty_frame
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.protocol.errors import OperatorError
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.reserved_names import check_not_reserved
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl


def passed_columns(expressions: Sequence[pl.Expr | str], schema: pa.Schema | None) -> Mapping[str, str]:
    """Columns that expressions copy, maybe under another name: name in the output to name in the input.

    Without a schema only columns that are named one by one are found, not those of selectors.
    """
    import polars as pl

    passed: dict[str, str] = {}
    frame = None if schema is None else empty_frame(schema)
    for item in expressions:
        expression = pl.col(item) if isinstance(item, str) else item
        bare = expression.meta.undo_aliases()
        if not bare.meta.is_column_selection():
            continue
        if frame is not None:
            passed.update(zip(frame.select(expression).columns, frame.select(bare).columns, strict=True))
        elif bare.meta.is_column():
            passed[expression.meta.output_name()] = bare.meta.output_name()
    return passed


def computed_columns(expressions: Sequence[pl.Expr], schema: pa.Schema | None) -> frozenset[str]:
    """Names of the columns that expressions make. Without a schema only those that polars can tell."""
    if schema is None:
        names = (expression.meta.output_name(raise_if_undetermined=False) for expression in expressions)
        return frozenset(name for name in names if name is not None)
    frame = empty_frame(schema)
    return frozenset(frame.select(*expressions).columns)


def name_after(column: str, passed: Mapping[str, str]) -> str | None:
    """What a column is called after a step that copies `passed`: its own name if it keeps that; None if it is gone."""
    if passed.get(column) == column:
        return column
    return next((name for name, source in passed.items() if source == column), None)


def check_keys(names: Sequence[str], schema: pa.Schema | None) -> None:
    """ConfigurationError for a key that is named twice, that is no column, or is called as one of tidegate's own."""
    if len(set(names)) < len(names):
        raise ConfigurationError(f"key_by({', '.join(names)}): a column is named twice")
    check_not_reserved(names, "key_by")
    for key in names:
        if schema is not None and key not in schema.names:
            raise ConfigurationError(f"key_by: there is no column {key!r}; there are {columns_text(schema)}")


def time_after(time: str | None, passed: Mapping[str, str]) -> str | None:
    """The event time after a step that copies `passed`; None if it is gone."""
    name = None if time is None else name_after(time, passed)
    return name if name is None or not isinstance(time, WindowEnd) else WindowEnd(name)


def idleness_of(
    idleness: str | timedelta | int | None, column: str, before: Sequence[StreamNode], parallelism: int
) -> int | None:
    """The idleness of splits in milliseconds. ConfigurationError where it is not known which splits have rows."""
    if idleness is None:
        return None
    if not all(node.tells_splits(parallelism) for node in before):
        raise ConfigurationError(
            f"assign_timestamps({column!r}, idleness={idleness!r}): only right behind an unbounded source, and in as "
            "many subtasks, is it known which splits have no rows; call it on the stream of the source"
        )
    return parse_duration_ms(idleness, setting="idleness")


def reads_only(expression: pl.Expr, columns: Sequence[str]) -> bool:
    """Whether an expression reads only these columns."""
    by_selector = '"Selector"' in expression.meta.serialize(format="json")
    return not by_selector and set(expression.meta.root_names()) <= set(columns)


def schema_after(operator: Operator, schema: pa.Schema | None, where: str) -> pa.Schema | None:
    """The columns after an operator, found by running it on no rows. None without a schema.

    ConfigurationError, which begins with `where`, for what cannot be computed.
    """
    if schema is None:
        return None
    operator.open(OperatorContext(OperatorUid("plan"), "plan", SubtaskIndex(0), 1, 1), ())
    emitted: list[pa.RecordBatch] = []
    try:
        operator.process(pa.RecordBatch.from_pylist([], schema), emitted.append)
    except OperatorError as error:
        raise ConfigurationError(f"{where}: {_reason(error.__cause__ or error, schema)}") from error
    return emitted[0].schema if emitted else schema


def _reason(error: BaseException, schema: pa.Schema) -> str:
    import polars as pl

    if isinstance(error, pl.exceptions.ColumnNotFoundError):
        # What polars lists are the columns that it was given, and not those of the stream.
        return f"{str(error).partition('; valid columns')[0]}; there are {columns_text(schema)}"
    return str(error)
