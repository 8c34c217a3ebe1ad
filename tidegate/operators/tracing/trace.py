"""`Trace`: a function of a row as expressions over batches of one schema, and the batches for which they may stand.

`trace_map` and `trace_filter` run the function on a symbolic row, once for each way that its conditions can go.
`Trace.computed` gives the columns for a batch, or None where only the function itself knows what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.operators.output_schema import polars_frame
from tidegate.operators.tracing.code_rules import (
    Outside,
    UntraceableError,
    checked,
    outside_is_unchanged,
)
from tidegate.operators.tracing.symbols import (
    ForkError,
    Notes,
    Symbol,
    Tracer,
    constant,
)

_RUNS_MAX = 64
_SMALL_INTEGERS = frozenset({pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()})
_OF_KIND = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
_COPIED = frozenset({pa.date32(), pa.timestamp("us")})
"""Types that a column keeps when its values pass through Python, although nothing is traced with them."""


@dataclass(frozen=True, slots=True)
class Output:
    """A column of the result: an expression, or a column of the input as it is."""

    expression: pl.Expr
    data_type: pa.DataType
    column: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced function."""

    outputs: Mapping[str, Output]
    notes: Notes
    outside: Outside

    def computed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The result for a batch; None if the function has to be called with its rows."""
        if not self._may_stand_for(batch):
            return None
        computed = {name: out for name, out in self.outputs.items() if out.column is None}
        asked = [condition.all().alias(f"?{number}") for number, condition in enumerate(self.notes.conditions)]
        read = self._columns_read(batch)
        frame = polars_frame(read) if read.num_columns else pl.DataFrame(height=batch.num_rows)
        if asked and not all(frame.select(asked).row(0)):
            return None
        columns: dict[str, pa.Array] = {}
        if computed:
            made = frame.with_columns(out.expression.alias(f"={name}") for name, out in computed.items())
            columns = {name: made.get_column(f"={name}").rechunk().to_arrow() for name in computed}
        arrays = []
        for name, out in self.outputs.items():
            array = columns[name] if out.column is None else batch.column(out.column)
            if array.null_count == len(array):
                return None  # the function's rows would give a column without a type
            arrays.append(array if array.type == out.data_type else array.cast(out.data_type))
        return pa.RecordBatch.from_arrays(arrays, names=list(self.outputs))

    def __str__(self) -> str:
        return ", ".join(f"{name} = {out.column or out.expression}" for name, out in self.outputs.items())

    def _may_stand_for(self, batch: pa.RecordBatch) -> bool:
        if not outside_is_unchanged(self.outside) or any(batch.column(name).null_count for name in self.notes.columns):
            return False
        bounds = {}
        for name in self.notes.integers:
            found = pc.min_max(batch.column(name)).as_py()
            bounds[name] = (found["min"], found["max"])
        for bounds_of, least, greatest in self.notes.ranges:
            low, high = bounds_of(bounds)
            if low < least or high > greatest:
                return False
        return True

    def _columns_read(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        expressions = [*self.notes.conditions, *(out.expression for out in self.outputs.values() if out.column is None)]
        read = {name for expression in expressions for name in expression.meta.root_names()}
        return batch.select([name for name in batch.schema.names if name in read])


def trace_map(function: Callable[[dict[str, Any]], object], schema: pa.Schema, given: pa.Schema | None) -> Trace:
    """Trace a function that gives a row for each row. `given` is the schema that its rows are said to have.

    UntraceableError if it cannot be told what it does.
    """
    outside, notes, found = _explored(function, schema)
    outputs = _outputs(found, schema, partial(_keeps_its_type, given))
    if given is not None:
        _check_types(outputs, given)
    return Trace(outputs, notes, outside)


def traced_schema(function: Callable[[dict[str, Any]], object], schema: pa.Schema) -> pa.Schema | None:
    """Returns the columns of the rows that a function returns, found without a row. None if it cannot be traced.

    A column that the function copies keeps its type, whatever that is.
    """
    try:
        _, _, found = _explored(function, schema)
        outputs = _outputs(found, schema, lambda name, data_type: True)
    except UntraceableError:
        return None
    return pa.schema([(name, out.data_type) for name, out in outputs.items()])


def trace_filter(function: Callable[[dict[str, Any]], object], schema: pa.Schema) -> Trace:
    """Trace a function that says which rows stay: a trace with one boolean column. UntraceableError."""

    def kept(row: Any) -> dict[str, object]:
        result = function(row)
        return {"kept": bool(result) if isinstance(result, Symbol) and result.kind is not bool else result}

    outside, notes, found = _explored(function, schema, kept)
    outputs = _outputs(found, schema, partial(_keeps_its_type, None))
    if outputs["kept"].data_type != pa.bool_():
        raise UntraceableError("it does not always give a bool")
    return Trace({"kept": outputs["kept"]}, notes, outside)


@dataclass(frozen=True, slots=True)
class _Branch:
    condition: pl.Expr
    yes: _Branch | dict[str, Symbol]
    no: _Branch | dict[str, Symbol]


def _explored(
    function: Callable[[dict[str, Any]], object], schema: pa.Schema, run: Callable[[Any], object] | None = None
) -> tuple[Outside, Notes, _Branch | dict[str, Symbol]]:
    outside, asks_for_none = checked(function)
    if len(set(schema.names)) < len(schema):
        raise UntraceableError("two columns share a name")
    notes, runs = Notes(), 0

    def follow(decisions: tuple[bool, ...]) -> _Branch | dict[str, Symbol]:
        nonlocal runs
        runs += 1
        if runs > _RUNS_MAX:
            raise UntraceableError("it has too many conditions")
        tracer = Tracer(notes, decisions)
        try:
            result = (run or function)({field.name: _column(tracer, field) for field in schema})
        except ForkError as fork:
            return _Branch(fork.condition, follow((*decisions, True)), follow((*decisions, False)))
        return _row(tracer, result)

    try:
        found = follow(())
    except UntraceableError:
        raise
    except Exception as error:  # whatever the function raises: with rows it may not
        raise UntraceableError(f"{type(error).__name__}: {error}") from error
    if asks_for_none:
        notes.columns.update(schema.names)
    return outside, notes, found


def _column(tracer: Tracer, field: pa.Field) -> Symbol:
    name, data_type = field.name, field.type
    column = pl.col(name)
    if name == "*" or name.startswith("^"):  # to polars a pattern
        return Symbol(tracer, None, column)
    if data_type in _SMALL_INTEGERS:
        return Symbol(tracer, int, column.cast(pl.Int64), lambda of: of[name], name)
    if pa.types.is_float32(data_type) or pa.types.is_float64(data_type):
        return Symbol(tracer, float, column.cast(pl.Float64), column=name)
    if pa.types.is_boolean(data_type):
        return Symbol(tracer, bool, column, column=name)
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return Symbol(tracer, str, column, column=name)
    return Symbol(tracer, None, column, column=name)


def _row(tracer: Tracer, result: object) -> dict[str, Symbol]:
    if type(result) is not dict or not result or not all(type(name) is str for name in result):
        raise UntraceableError("it does not always give a dict with names of columns")
    return {name: v if isinstance(v, Symbol) else constant(tracer, v) for name, v in result.items()}


def _outputs(
    found: _Branch | dict[str, Symbol], schema: pa.Schema, may_copy: Callable[[str, pa.DataType], bool]
) -> dict[str, Output]:
    if isinstance(found, dict):
        return {name: _output(name, symbol, schema, may_copy) for name, symbol in found.items()}
    yes, no = _outputs(found.yes, schema, may_copy), _outputs(found.no, schema, may_copy)
    if [(name, out.data_type) for name, out in yes.items()] != [(name, out.data_type) for name, out in no.items()]:
        raise UntraceableError("its rows do not always have the same columns and types")
    return {
        name: out
        if out.column is not None and out.column == no[name].column
        else Output(pl.when(found.condition).then(out.expression).otherwise(no[name].expression), out.data_type, None)
        for name, out in yes.items()
    }


def _output(name: str, symbol: Symbol, schema: pa.Schema, may_copy: Callable[[str, pa.DataType], bool]) -> Output:
    if symbol.kind is not None:
        return Output(symbol.expression, _OF_KIND[symbol.kind], symbol.column)
    if symbol.column is None:
        raise UntraceableError("it copies a column whose type could change on its way through Python")
    data_type = schema.field(symbol.column).type
    if not may_copy(name, data_type):
        raise UntraceableError("it copies a column whose type could change on its way through Python")
    return Output(symbol.expression, data_type, symbol.column)


def _keeps_its_type(given: pa.Schema | None, name: str, data_type: pa.DataType) -> bool:
    """Whether the rows of a function have a copied column in its own type: as `schema=` says, or as Python keeps it."""
    if data_type in _COPIED:
        return True
    return given is not None and name in given.names and given.field(name).type == data_type


def _check_types(outputs: Mapping[str, Output], given: pa.Schema) -> None:
    """What is computed must have the types of `schema=`; integers may become narrower, which is checked by value."""
    if set(outputs) != set(given.names):
        raise UntraceableError("its rows have other columns than schema=")
    for name, out in outputs.items():
        wanted = given.field(name).type
        if wanted != out.data_type and not (out.data_type == pa.int64() and pa.types.is_integer(wanted)):
            raise UntraceableError(f"schema= has {wanted} for {name!r}, and it gives {out.data_type}")
