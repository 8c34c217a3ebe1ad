"""Builds the steps that choose and compute columns by polars expressions, and the union of streams.

`drop` and `rename` are built from `select`, and `cast` from `with_columns`. A column that a step copies keeps its
meaning: under its new name it is still the event time, or a key of a changelog. Each builder raises ConfigurationError
for arguments that are not valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.api.streams.changelog_mode import united
from tidegate.api.streams.event_time import gives_other_times
from tidegate.api.streams.expression_columns import (
    computed_columns,
    known_schema,
    passed_columns,
    schema_after,
    time_after,
)
from tidegate.api.streams.state_meanings import column_texts, computed_text
from tidegate.api.streams.step import Step, StepOptions
from tidegate.operators.operator import OperatorFactory
from tidegate.operators.watermarks.watermark_generator import same_time
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.polars_frames import check_polars_has, exact_column
from tidegate.storage.schemas.row_schemas import as_schema

if TYPE_CHECKING:
    import polars as pl

    from tidegate.api.streams.stream import Stream

log = logging.getLogger(__name__)


def with_columns(
    stream: Stream,
    given: Sequence[pl.Expr | str],
    options: StepOptions,
    *,
    own: Collection[str] = (),
    are_keys: bool = False,
) -> Stream:
    """Builds the step of `Stream.with_columns`.

    `own` are columns that tidegate itself adds. With `are_keys` the expressions are keys of the next step.
    """
    from tidegate.operators.functions.expressions import WithColumns

    expressions: Any = given  # WithColumns refuses other values
    if stream._changelog is not None:
        stream._changelog.check_kind_is_not_read(repr(options.name), given, stream.schema)
    schema = schema_after(WithColumns(*expressions), stream.schema, options.name)
    untouched = {column: column for column in _own_columns(stream) - computed_columns(expressions, stream.schema)}
    return _computed(
        stream,
        lambda: WithColumns(*expressions),
        schema,
        {**untouched, **passed_columns(expressions, stream.schema)},
        options,
        computes=computed_text("with_columns", expressions),
        expressions=expressions,
        own=own,
        key_texts=column_texts(expressions) if are_keys else None,
    )


def _own_columns(stream: Stream) -> set[str]:
    """Returns the names of all columns of a stream or, if its schema is unknown, of the keys of its changelog and the
    event-time column.
    """
    if stream.schema is not None:
        return set(stream.schema.names)
    keys = () if stream._changelog is None else stream._changelog.keys
    return {*keys, *(() if stream.timestamp is None else (stream.timestamp,))}


def selected(stream: Stream, given: Sequence[pl.Expr | str], options: StepOptions) -> Stream:
    """Builds the step of `Stream.select`."""
    from tidegate.operators.functions.expressions import Select

    expressions = given
    if stream._changelog is not None:
        stream._changelog.check_kind_is_not_read(repr(options.name), expressions, stream.schema)
        expressions = stream._changelog.with_kind(expressions, stream.schema)
    return _computed(
        stream,
        lambda: Select(*expressions),
        schema_after(Select(*expressions), stream.schema, options.name),
        passed_columns(expressions, stream.schema),
        options,
        computes=computed_text("select", expressions),
        expressions=expressions,
    )


def _computed(
    stream: Stream,
    operator: OperatorFactory,
    schema: pa.Schema | None,
    passed: Mapping[str, str],
    options: StepOptions,
    *,
    computes: str,
    expressions: Sequence[pl.Expr | str],
    own: Collection[str] = (),
    key_texts: Mapping[str, str] | None = None,
) -> Stream:
    """Adds a step of polars expressions. `passed` maps output columns to the input columns that they copy."""
    changelog = None if stream._changelog is None else stream._changelog.renamed(repr(options.name), passed)
    retimes = None
    if stream.timestamp is not None and time_after(stream.timestamp, passed) is None:
        retimes = stream.timestamp if gives_other_times(expressions, stream.timestamp, stream.schema) else None
    result = stream._then(
        Step(
            operator=operator,
            schema=schema,
            options=options,
            changelog=changelog,
            own=own,
            computes=computes,
            retimes=retimes,
            key_texts=key_texts or {},
        )
    )
    timestamp = time_after(stream.timestamp, passed) or result.timestamp
    if timestamp is None and type(stream.timestamp) is str:  # a WindowEnd was not named by the program
        log.warning(
            "%s (uid %r) drops the column of event time, %r: rows after it have no timestamp; keep the column",
            options.name,
            result._inputs[0][0].uid,
            stream.timestamp,
        )
    return result._derived(timestamp=timestamp, changelog=changelog)


def without_columns(stream: Stream, columns: Iterable[str | Iterable[str]], name: str, uid: str | None) -> Stream:
    """Builds the step of `Stream.drop`."""
    schema = known_schema(stream, name)
    dropped: list[str] = []
    for given in columns:
        dropped += [given] if isinstance(given, str) else given
    if not dropped:
        raise ConfigurationError(f"{name} needs at least one column: give names or expressions")
    _check_columns(dropped, schema, name)
    kept = [exact_column(column) for column in schema.names if column not in dropped]
    if not kept:
        raise ConfigurationError(f"{name}: no column would remain of {schema.names}; keep at least one")
    return selected(stream, kept, StepOptions(name, uid))


def renamed(stream: Stream, mapping: Mapping[str, str] | Callable[[str], str], name: str, uid: str | None) -> Stream:
    """Builds the step of `Stream.rename`."""
    schema = known_schema(stream, name)
    if callable(mapping):
        mapping = {column: mapping(column) for column in schema.names}
    _check_columns(mapping, schema, name)
    after = [mapping.get(column, column) for column in schema.names]
    if doubles := sorted({column for column in after if after.count(column) > 1}):
        raise ConfigurationError(f"{name}: two columns would have the name {doubles[0]!r}; choose another name")
    columns = [exact_column(old).alias(new) for old, new in zip(schema.names, after, strict=True)]
    return selected(stream, columns, StepOptions(name, uid))


def cast(stream: Stream, types: Mapping[str, Any], name: str, uid: str | None) -> Stream:
    """Builds the step of `Stream.cast`."""
    schema = known_schema(stream, name)
    wanted = as_schema(types, f"{name}(types)")
    assert wanted is not None, "a mapping is a schema"
    _check_columns(wanted.names, schema, name)
    check_polars_has(wanted)
    import polars as pl

    dtypes = pl.DataFrame(wanted.empty_table()).schema
    columns = [exact_column(column).cast(dtype) for column, dtype in dtypes.items()]
    return with_columns(stream, columns, StepOptions(name, uid))


def _check_columns(names: Iterable[object], schema: pa.Schema, method: str) -> None:
    for column in names:
        if column not in schema.names:
            raise ConfigurationError(f"{method}: there is no column {column!r}; name one of {columns_text(schema)}")


def union(streams: Sequence[Stream], by_name: bool, allow_missing: bool) -> Stream:
    """Builds `Stream.union`. Adds a step to each stream with other columns, which converts its rows."""
    first, *others = streams
    if allow_missing and not by_name:
        raise ConfigurationError(
            "union: allow_missing=True needs by_name=True, because missing columns are found by name"
        )
    changelog = united([(stream._changelog, stream._input_parallelism) for stream in streams])
    if any(other._program is not first._program for other in others):
        raise ConfigurationError(
            "union: the streams belong to different environments; make all of them from one StreamEnvironment"
        )
    if by_name:
        return union(_with_same_columns(streams, allow_missing), False, False)
    for other in others:
        if first.schema is not None and other.schema is not None and not first.schema.equals(other.schema):
            columns = f"{columns_text(first.schema)} and {columns_text(other.schema)}"
            raise ConfigurationError(
                f"union: the streams have different columns: {columns}"
                "; select the same columns in both, or use by_name=True with allow_missing=True"
            )
    return first._derived(
        inputs=tuple(each for stream in streams for each in stream._inputs),
        timestamp=first.timestamp if all(same_time(each.timestamp, first.timestamp) for each in others) else None,
        changelog=changelog,
    )


def _with_same_columns(streams: Sequence[Stream], allow_missing: bool) -> list[Stream]:
    # Imported late, because it loads polars.
    from tidegate.operators.functions.projection import UnionColumns
    from tidegate.operators.functions.projection import united as united_schema

    schemas = [known_schema(stream, "union", f"stream {number}") for number, stream in enumerate(streams, start=1)]
    schema = united_schema(schemas, allow_missing)
    return [
        stream
        if own.equals(schema)
        else stream._then(
            Step(
                operator=partial(UnionColumns, schema),
                schema=schema,
                options=StepOptions("union", None, stream._input_parallelism),
            )
        )
        for stream, own in zip(streams, schemas, strict=True)
    ]
