"""Determines the columns of a stream before the job runs: the columns that a step computes, and the columns that it
copies.

The builders of steps call these functions. Expressions are evaluated on empty frames, so polars itself determines the
result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.connectors.files.source import FilesSource
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.column_expressions import column_like
from tidegate.operators.operator import Operator, OperatorContext
from tidegate.operators.output_schema import empty_frame
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.protocol.edges import Partitioning
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.schemas.column_names import check_not_reserved, columns_text
from tidegate.storage.schemas.polars_frames import exact_column, is_polars_expression
from tidegate.storage.schemas.row_schemas import python_schema
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl


def passed_columns(expressions: Sequence[pl.Expr | str], schema: pa.Schema | None) -> Mapping[str, str]:
    """Returns the columns that expressions copy, maybe under another name. Maps names in the output to names in the
    input.

    Without a schema, only columns that are named one by one are found, and not columns that selectors match.
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
    """Returns the output names of expressions. Without a schema, names that polars cannot infer are missing."""
    if schema is None:
        names = (expression.meta.output_name(raise_if_undetermined=False) for expression in expressions)
        return frozenset(name for name in names if name is not None)
    frame = empty_frame(schema)
    return frozenset(frame.select(*expressions).columns)


def name_after(column: str, passed: Mapping[str, str]) -> str | None:
    """Returns the name of a column after a step that copies columns, or None if the step does not copy it. `passed`
    maps new names to old names.

    If the step copies the column under several names, its own name takes precedence.
    """
    if passed.get(column) == column:
        return column
    return next((name for name, source in passed.items() if source == column), None)


def check_keys(names: Sequence[str], schema: pa.Schema | None) -> None:
    """Raises ConfigurationError for a key column that is named twice, does not exist, or has a reserved name."""
    if len(set(names)) < len(names):
        raise ConfigurationError(f"key_by({', '.join(names)}): a column is named twice; name it once")
    check_not_reserved(names, "key_by")
    for key in names:
        if schema is not None and key not in schema.names:
            raise ConfigurationError(f"key_by: there is no column {key!r}; name one of {columns_text(schema)}")


def time_after(time: str | None, passed: Mapping[str, str]) -> str | None:
    """Returns the event-time column after a step that copies columns (`passed`, new names to old names), or None if the
    step does not copy it.
    """
    name = None if time is None else name_after(time, passed)
    return name if name is None or not isinstance(time, WindowEnd) else WindowEnd(name)


def idleness_of(
    idleness: str | timedelta | int | None, column: str, before: Sequence[StreamNode], parallelism: int
) -> int | None:
    """Returns the argument `idleness` of `assign_timestamps` in ms, or None. `before` are the previous steps.

    Raises ConfigurationError if the step cannot see which splits of the source have rows.
    """
    if idleness is None:
        return None
    if not all(node.tells_splits(parallelism) for node in before):
        raise ConfigurationError(
            f"assign_timestamps({column!r}, idleness={idleness!r}): splits without rows are only visible directly "
            "after an unbounded source, with the same parallelism; call it on the stream of the source"
        )
    return parse_duration_ms(idleness, setting="idleness")


def reads_only(expression: pl.Expr, columns: Sequence[str]) -> bool:
    """Returns whether an expression reads only these columns."""
    by_selector = '"Selector"' in expression.meta.serialize(format="json")
    return not by_selector and set(expression.meta.root_names()) <= set(columns)


def schema_after(operator: Operator, schema: pa.Schema | None, where: str) -> pa.Schema | None:
    """Returns the schema after an operator, found by running the operator on an empty batch. None if `schema` is None.

    Raises ConfigurationError, which begins with `where`, if the columns cannot be computed.
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
        # Polars lists the columns of its frame, which are not the columns of the stream.
        return f"{str(error).partition('; valid columns')[0]}; there are {columns_text(schema)}"
    return str(error)


_OF_STRINGS = ("name", "uid")
"""Names of step options that are strings. For any other keyword a string is the name of a column."""


def expressions_and_options(
    method: str,
    given: Sequence[pl.Expr | str | Mapping[str, pl.Expr | str] | Sequence[pl.Expr | str]],
    named: Mapping[str, pl.Expr | str],
    options: Mapping[str, tuple[Any, Any]],
    schema: pa.Schema | None,
) -> tuple[tuple[pl.Expr | str, ...], dict[str, Any]]:
    """Returns the expressions of a step, and its options. A keyword may be an option of the step or the name of a new
    column.

    `options` maps each option of the step to its given value and its default. `schema` has the columns of the stream,
    or is None. Raises ConfigurationError for a string that may be either, and for a value that is neither a name nor an
    expression.
    """
    columns = dict(named)
    found: dict[str, Any] = {}
    for word, (value, default) in options.items():
        found[word] = value
        is_column = isinstance(value, str) and schema is not None and value in schema.names
        if isinstance(value, str) and word in _OF_STRINGS and is_column:
            raise ConfigurationError(
                f"{method}: {word}={value!r} may be the {word} of the step, or a column {word!r} that copies the "
                f"column {value!r}. For the column write {method}({{{word!r}: {value!r}}}); for the step choose "
                f"another {word}"
            )
        if is_polars_expression(value) or (isinstance(value, str) and word not in _OF_STRINGS):
            columns[word] = value
            found[word] = default
    expressions: list[pl.Expr | str] = []
    for item in _flat(given):
        if isinstance(item, Mapping):
            expressions += _named(item, method)
        elif isinstance(item, str) and _is_for_several(item) and schema is not None and item in schema.names:
            several = "pl.all()" if item == "*" else f"pl.col({item!r})"
            raise ConfigurationError(
                f"{method}({item!r}) may be several columns, or the one column {item!r}. Write {several} for several "
                f"columns, and {method}({{{item!r}: {item!r}}}) for the one"
            )
        else:
            expressions.append(item)
    return (*expressions, *_named(columns, method)), found


def aggregates_and_options(
    method: str,
    mapping: Mapping[str, Aggregate] | None,
    named: Mapping[str, Aggregate],
    options: Mapping[str, tuple[Any, Any]],
) -> tuple[dict[str, Aggregate], dict[str, Any]]:
    """Returns the aggregates of a step by name, and its options. A keyword with an aggregate as its value is the name
    of a result, even if it is also an option.

    Raises ConfigurationError for a name that is given both in the mapping and by keyword.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ConfigurationError(
            f"{method} takes aggregates by keyword, n=tg.count(), or in one mapping, {{'n': tg.count()}}, not "
            f"{type(mapping).__name__}"
        )
    found: dict[str, Any] = {}
    columns = dict(named)
    for word, (value, default) in options.items():
        found[word] = value
        if isinstance(value, Aggregate):
            columns[word] = value
            found[word] = default
    of_mapping = dict(mapping or {})
    for name in of_mapping:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{method}: the key {name!r} of the mapping is not the name of a column; give a string"
            )
    if twice := sorted(of_mapping.keys() & columns.keys()):
        raise ConfigurationError(f"{method}: {twice} are in the mapping and by keyword; give each aggregate once")
    return of_mapping | columns, found


def _is_for_several(name: str) -> bool:
    """Returns whether polars interprets a column name as a pattern for several columns: `*`, or a regular
    expression.
    """
    return name == "*" or (name.startswith("^") and name.endswith("$"))


def _flat(given: Sequence[Any]) -> Iterator[Any]:
    """Yields positional arguments one by one, with lists replaced by their items, as in `select(["a", "b"])`."""
    for item in given:
        yield from item if isinstance(item, list | tuple) else (item,)


def _named(named: Mapping[str, pl.Expr | str], method: str) -> Iterator[pl.Expr]:
    """Yields the expressions of keyword arguments with their names, as in polars: `x=pl.col("y") * 2`, or `x="y"`."""
    for name, value in named.items():
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{method}: the key {name!r} of the mapping is not the name of a column; give a string"
            )
        column = column_like(value, f"{method}: {name}=")
        yield (exact_column(column) if isinstance(column, str) else column.expression).alias(name)


log = logging.getLogger(__name__)

_ROWS_MAX = 20
"""Number of first input rows with which the schema is tried.

More than one, because a filter may drop the first rows.
"""


class Columns(Protocol):
    """The attributes of a stream that this module uses: its schema, and the steps that produce its rows."""

    @property
    def schema(self) -> pa.Schema | None: ...

    @property
    def _inputs(self) -> tuple[tuple[StreamNode, Partitioning | None], ...]: ...


def known_schema(stream: Columns, where: str, called: str = "the stream") -> pa.Schema:
    """Returns the schema of a stream. Raises ConfigurationError, which begins with `where`, if it is not known.

    `called` names the stream in the error. The error suggests a `schema=` that fits the first row, if the source is in
    memory or consists of files, and if no step in between has two inputs.
    """
    if stream.schema is not None:
        return stream.schema
    node = stream._inputs[0][0]
    chain = _chain(node)
    unknown = next((each for each in chain if each.schema is None), node)
    fitting = _of_first_row(chain[: chain.index(unknown) + 1]) if unknown in chain else None
    advice = "schema={...}" if fitting is None else f"schema={python_schema(fitting)}, which fits the first row"
    raise ConfigurationError(
        f"{where}: the columns of {called} are not known before the job runs. Give schema= to {unknown.name!r}: "
        f"{advice}"
    )


def _chain(node: StreamNode) -> list[StreamNode]:
    """Returns the steps up to `node`, from the source or from the last step with two inputs."""
    chain = [node]
    while len(chain[0].inputs) == 1:
        chain.insert(0, chain[0].inputs[0][0])
    return chain


def _of_first_row(chain: Sequence[StreamNode]) -> pa.Schema | None:
    """Returns the columns that the last step of the chain emits for the first input row that reaches it, or None if
    this fails.

    Calls the functions of the user. Their errors are ignored.
    """
    source = chain[0].source
    if not isinstance(source, MemorySource | FilesSource):
        return None
    try:
        operators = [_opened(node) for node in chain[1:]]
        rows = _first_rows(source)
        if rows is None:
            return None
        for row in range(rows.num_rows):
            batches = [rows.slice(row, 1)]
            for operator in operators:
                batches, before = [], batches
                for batch in before:
                    operator.process(batch, batches.append)
            if batches:
                schema = batches[0].schema
                return None if any(pa.types.is_null(field.type) for field in schema) else schema
    except Exception as error:  # noqa: BLE001 - the user sees the missing schema, with this advice or without
        log.debug("the columns of %r are not found from the first row: %r", chain[-1].name, error)
    return None


def _first_rows(source: MemorySource | FilesSource) -> pa.RecordBatch | None:
    splits, reader = source.splits(), source.reader()
    try:
        return reader.read(splits[0], 0, _ROWS_MAX).batch if splits else None
    finally:
        reader.close()


def _opened(node: StreamNode) -> Operator:
    assert node.factory is not None, "a step without an operator"
    operator = node.factory()
    operator.open(OperatorContext(OperatorUid(node.uid), node.name, SubtaskIndex(0), 1, 128), ())
    return operator
