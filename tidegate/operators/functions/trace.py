"""`Trace` is a row function of a user, converted to polars expressions for batches of one schema, with the conditions
under which the expressions give the same result.

`trace_map` and `trace_filter` run the function on a symbolic row, once for each path through its conditions.
`Trace.computed` returns the result for a batch, or None if the function itself must be called to get the right result.

A `Symbol` represents a value of every row while the function is traced. Python on a row and polars on a column differ
in edge cases. The operations here give equal results as long as the conditions in `Notes` hold for a batch. A batch for
which they do not hold is passed to the function row by row. Rules:

- Operands have no nulls, because Python would raise an error.
- Integer results must fit into int64, because Python's integers are unbounded. The bounds of each result are computed
  from the bounds of the columns.
- A divisor is never 0. An integer that is divided, or compared with a float, must be exact as a float.
- Compared values are not NaN, because polars treats NaN as equal to itself and greater than any number.
- Any other operation cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.operators.functions.traceable_code import (
    Outside,
    UntraceableError,
    checked,
    outside_is_unchanged,
)
from tidegate.operators.output_schema import polars_frame

_RUNS_MAX = 64
_SMALL_INTEGERS = frozenset({pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()})
_OF_KIND = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
_COPIED = frozenset({pa.date32(), pa.timestamp("us")})
"""Types without operations in a traced function, which may only copy such values.

They keep their type when they pass through Python.
"""


@dataclass(frozen=True, slots=True)
class Output:
    """A column of the result: an expression, or the name of an input column that is copied."""

    expression: pl.Expr
    data_type: pa.DataType
    column: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced function: the columns of its result, and the conditions that a batch must meet before the trace may be
    used.
    """

    outputs: Mapping[str, Output]
    notes: Notes
    outside: Outside

    def computed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Returns the result for a batch, computed by expressions.

        None if the function has to be called with each row.
        """
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
    """Traces a function that returns a row for each row. `given` is the schema declared for its results, or None.

    Raises UntraceableError if the function cannot be expressed by polars expressions.
    """
    outside, notes, found = _explored(function, schema)
    outputs = _outputs(found, schema, partial(_keeps_its_type, given))
    if given is not None:
        _check_types(outputs, given)
    return Trace(outputs, notes, outside)


def traced_schema(function: Callable[[dict[str, Any]], object], schema: pa.Schema) -> pa.Schema | None:
    """Returns the columns of the rows that a function returns, found by tracing it, without input rows. None if it
    cannot be traced.

    A column that the function copies keeps its type, whatever the type is.
    """
    try:
        _, _, found = _explored(function, schema)
        outputs = _outputs(found, schema, lambda name, data_type: True)
    except UntraceableError:
        return None
    return pa.schema([(name, out.data_type) for name, out in outputs.items()])


def trace_filter(function: Callable[[dict[str, Any]], object], schema: pa.Schema) -> Trace:
    """Traces a filter function into a trace with the boolean column `kept`.

    Raises UntraceableError if it cannot be traced.
    """

    def kept(row: Any) -> dict[str, object]:
        result = function(row)
        return {"kept": bool(result) if isinstance(result, Symbol) and result.kind is not bool else result}

    outside, notes, found = _explored(function, schema, kept)
    outputs = _outputs(found, schema, partial(_keeps_its_type, None))
    if outputs["kept"].data_type != pa.bool_():
        raise UntraceableError("the function does not always return a bool")
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
        raise UntraceableError(f"two input columns have the same name: {schema.names}")
    notes, runs = Notes(), 0

    def follow(decisions: tuple[bool, ...]) -> _Branch | dict[str, Symbol]:
        nonlocal runs
        runs += 1
        if runs > _RUNS_MAX:
            raise UntraceableError(
                f"the function has too many conditions: it would have to be run more than {_RUNS_MAX} times"
            )
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
        raise UntraceableError(f"the function raised {type(error).__name__}: {error}") from error
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
        raise UntraceableError(
            f"the function returned {type(result).__name__}, and not always a dict of column names and values"
        )
    return {name: v if isinstance(v, Symbol) else constant(tracer, v) for name, v in result.items()}


def _outputs(
    found: _Branch | dict[str, Symbol], schema: pa.Schema, may_copy: Callable[[str, pa.DataType], bool]
) -> dict[str, Output]:
    if isinstance(found, dict):
        return {name: _output(name, symbol, schema, may_copy) for name, symbol in found.items()}
    yes, no = _outputs(found.yes, schema, may_copy), _outputs(found.no, schema, may_copy)
    if [(name, out.data_type) for name, out in yes.items()] != [(name, out.data_type) for name, out in no.items()]:
        raise UntraceableError(
            f"the rows of the function do not always have the same columns and types: they have {list(yes)} or "
            f"{list(no)}"
        )
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
        raise UntraceableError(
            f"the function copies to {name!r} a column whose type could change on its way through Python"
        )
    data_type = schema.field(symbol.column).type
    if not may_copy(name, data_type):
        raise UntraceableError(
            f"the function copies to {name!r} a column of type {data_type}, which could change on its way through "
            "Python"
        )
    return Output(symbol.expression, data_type, symbol.column)


def _keeps_its_type(given: pa.Schema | None, name: str, data_type: pa.DataType) -> bool:
    """Returns whether the column `name` still has the type `data_type` after the function copied it to its result.

    `given` is the schema from `schema=`, or None. Without a schema, values are converted to Python objects and back.
    """
    if data_type in _COPIED:
        return True
    return given is not None and name in given.names and given.field(name).type == data_type


def _check_types(outputs: Mapping[str, Output], given: pa.Schema) -> None:
    """Raises UntraceableError if computed columns do not have the types of `schema=`.

    An integer type may be narrower, because values are checked later.
    """
    if set(outputs) != set(given.names):
        raise UntraceableError(
            f"the rows of the function have the columns {list(outputs)}, and schema= has {given.names}"
        )
    for name, out in outputs.items():
        wanted = given.field(name).type
        if wanted != out.data_type and not (out.data_type == pa.int64() and pa.types.is_integer(wanted)):
            raise UntraceableError(f"the function returns {out.data_type} for {name!r}, and schema= has {wanted}")


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_EXACT_FLOAT = 2**53

Bounds: TypeAlias = tuple[int, int]
Columns: TypeAlias = Mapping[str, Bounds]
BoundsOf: TypeAlias = Callable[[Columns], Bounds]
"""A function that computes the least and the greatest value of an integer expression from the least and greatest values
of columns in a batch.
"""


class ForkError(Exception):
    """Raised when the function tests a condition for which no decision is chosen yet.

    The tracer then runs the function once for each decision.
    """

    def __init__(self, condition: pl.Expr) -> None:
        super().__init__("a condition")
        self.condition = condition


@dataclass(slots=True)
class Notes:
    """Conditions that a batch must meet.

    If it meets them, the traced expressions give the same results as the function.
    """

    columns: set[str] = field(default_factory=set)
    """Columns that the function calculates with. They must have no nulls."""
    integers: set[str] = field(default_factory=set)
    """Columns for which the least and the greatest value in the batch must be computed."""
    ranges: list[tuple[BoundsOf, int, int]] = field(default_factory=list)
    """Integer expressions, each with the smallest and the largest value that it may have."""
    conditions: list[pl.Expr] = field(default_factory=list)
    """Boolean expressions that must be true for every row."""


class Tracer:
    """One run of the function along one path.

    `decisions` are the outcomes of the conditions that the function tests, in order.
    """

    def __init__(self, notes: Notes, decisions: tuple[bool, ...]) -> None:
        self.notes = notes
        self._decisions = list(reversed(decisions))

    def decide(self, condition: pl.Expr) -> bool:
        """Returns the chosen outcome of the next condition. Raises ForkError if none is chosen yet."""
        if not self._decisions:
            raise ForkError(condition)
        return self._decisions.pop()


class Symbol:
    """Represents the value of an expression in every row while a function is traced.

    `kind` is int, float, bool or str (the Python types), or None for a value that is only copied. `column` is the input
    column that it copies, or None. `bounds` computes the least and greatest value of an int.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("bounds", "column", "expression", "kind", "tracer")

    def __init__(
        self,
        tracer: Tracer,
        kind: type | None,
        expression: pl.Expr,
        bounds: BoundsOf | None = None,
        column: str | None = None,
    ) -> None:
        self.tracer = tracer
        self.kind = kind
        self.expression = expression
        self.bounds = bounds
        self.column = column

    def __bool__(self) -> bool:
        self._use()
        if self.kind is bool:
            return self.tracer.decide(self.expression)
        if self.kind is str:
            return self.tracer.decide(self.expression != "")
        if self.kind in (int, float):
            return self.tracer.decide(self.expression != 0)
        raise UntraceableError("the function tests as a condition a value that is neither a number nor a string")

    def __add__(self, other: Any) -> Symbol:
        if self.kind is str:
            right = self._operand(other)
            if right.kind is not str:
                raise UntraceableError("the function adds a string to a value that is not a string")
            self._use()
            return self._made(str, self.expression + right.expression)
        return self._arithmetic(other, lambda a, b: a + b, lambda a, b: (a[0] + b[0], a[1] + b[1]))

    def __radd__(self, other: Any) -> Symbol:
        return self._operand(other) + self

    def __sub__(self, other: Any) -> Symbol:
        return self._arithmetic(other, lambda a, b: a - b, lambda a, b: (a[0] - b[1], a[1] - b[0]))

    def __rsub__(self, other: Any) -> Symbol:
        return self._operand(other) - self

    def __mul__(self, other: Any) -> Symbol:
        return self._arithmetic(other, lambda a, b: a * b, _product)

    def __rmul__(self, other: Any) -> Symbol:
        return self._operand(other) * self

    def __truediv__(self, other: Any) -> Symbol:
        left, right = self._numbers(other)
        for number in (left, right):
            number._must_be_exact()
        self.tracer.notes.conditions.append(right.expression != 0)
        return self._made(float, left._as_float() / right._as_float())

    def __rtruediv__(self, other: Any) -> Symbol:
        return self._operand(other) / self

    def __floordiv__(self, other: Any) -> Symbol:
        left, right = self._whole_numbers(other)
        return self._whole(left.expression // right.expression, left, right, _quotient)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return self._operand(other) // self

    def __mod__(self, other: Any) -> Symbol:
        left, right = self._whole_numbers(other)
        # Python's remainder has the sign of the divisor. In some versions of polars it has the sign of the dividend.
        divisor = right.expression
        return self._whole(((left.expression % divisor) + divisor) % divisor, left, right, _remainder)

    def __rmod__(self, other: Any) -> Symbol:
        return self._operand(other) % self

    def __neg__(self) -> Symbol:
        return self._operand(0) - self if self.kind is not float else self._floats(-self.expression)

    def __pos__(self) -> Symbol:
        return self._operand(0) + self if self.kind is not float else self._floats(self.expression)

    def __abs__(self) -> Symbol:
        if self.kind is float:
            return self._floats(self.expression.abs())
        number = self._number()
        return self._bounded(number.expression.abs(), lambda of: _absolute(number._bounds(of)))

    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._compared(other, lambda a, b: a == b)

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._compared(other, lambda a, b: a != b)

    def __lt__(self, other: object) -> Symbol:
        return self._compared(other, lambda a, b: a < b)

    def __le__(self, other: object) -> Symbol:
        return self._compared(other, lambda a, b: a <= b)

    def __gt__(self, other: object) -> Symbol:
        return self._compared(other, lambda a, b: a > b)

    def __ge__(self, other: object) -> Symbol:
        return self._compared(other, lambda a, b: a >= b)

    def __and__(self, other: Any) -> Symbol:
        return self._logical(other, lambda a, b: a & b)

    def __or__(self, other: Any) -> Symbol:
        return self._logical(other, lambda a, b: a | b)

    __rand__, __ror__ = __and__, __or__

    def startswith(self, text: Any) -> Symbol:
        """Returns a boolean symbol that is true where the string begins with `text`."""
        return self._edge(text, lambda value: value.str.starts_with(text))

    def endswith(self, text: Any) -> Symbol:
        """Returns a boolean symbol that is true where the string ends with `text`."""
        return self._edge(text, lambda value: value.str.ends_with(text))

    def __repr__(self) -> str:
        raise UntraceableError("the function writes the value of a column as text")

    def __format__(self, form: str) -> str:
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"the function uses .{name} of the value of a column")

    def _use(self) -> None:
        if self.column is not None:
            self.tracer.notes.columns.add(self.column)
            if self.kind is int:
                self.tracer.notes.integers.add(self.column)

    def _operand(self, value: object) -> Symbol:
        if isinstance(value, Symbol):
            value._use()
            return value
        return constant(self.tracer, value)

    def _made(self, kind: type, expression: pl.Expr) -> Symbol:
        return Symbol(self.tracer, kind, expression)

    def _floats(self, expression: pl.Expr) -> Symbol:
        self._use()
        return self._made(float, expression)

    def _bounds(self, of: Columns) -> Bounds:
        assert self.bounds is not None, "no integer"
        return self.bounds(of)

    def _bounded(self, expression: pl.Expr, bounds: BoundsOf) -> Symbol:
        self.tracer.notes.ranges.append((bounds, INT64_MIN, INT64_MAX))
        return Symbol(self.tracer, int, expression, bounds)

    def _number(self) -> Symbol:
        """Returns the value as an integer or float symbol. A bool becomes 0 or 1."""
        self._use()
        if self.kind is bool:
            return Symbol(self.tracer, int, self.expression.cast(pl.Int64), lambda of: (0, 1))
        if self.kind not in (int, float):
            raise UntraceableError("the function calculates with a value that is not a number")
        return self

    def _numbers(self, other: object) -> tuple[Symbol, Symbol]:
        return self._number(), self._operand(other)._number()

    def _whole_numbers(self, other: object) -> tuple[Symbol, Symbol]:
        left, right = self._numbers(other)
        if left.kind is not int or right.kind is not int:
            raise UntraceableError("the function takes the whole part or the remainder of a float")
        self.tracer.notes.conditions.append(right.expression != 0)
        return left, right

    def _whole(self, expression: pl.Expr, left: Symbol, right: Symbol, bounds: Any) -> Symbol:
        return self._bounded(expression, lambda of: bounds(left._bounds(of), right._bounds(of)))

    def _as_float(self) -> pl.Expr:
        return self.expression if self.kind is float else self.expression.cast(pl.Float64)

    def _must_be_exact(self) -> None:
        if self.kind is int:
            self.tracer.notes.ranges.append((self._bounds, -_EXACT_FLOAT, _EXACT_FLOAT))

    def _arithmetic(self, other: Any, compute: Callable[[Any, Any], Any], bounds: Any) -> Symbol:
        left, right = self._numbers(other)
        if left.kind is int and right.kind is int:
            return self._whole(compute(left.expression, right.expression), left, right, bounds)
        return self._made(float, compute(left._as_float(), right._as_float()))

    def _compared(self, other: object, compare: Callable[[Any, Any], Any]) -> Symbol:
        left, right = self, self._operand(other)
        self._use()
        if left.kind is not right.kind:
            left, right = self._numbers(right)
        if left.kind is None:
            raise UntraceableError("the function compares values that are neither numbers nor strings")
        if left.kind is not right.kind:
            left._must_be_exact()
            right._must_be_exact()
        if float in (left.kind, right.kind):
            for number in (left, right):
                if number.kind is float:
                    self.tracer.notes.conditions.append(number.expression.is_not_nan())
            return self._made(bool, compare(left._as_float(), right._as_float()))
        return self._made(bool, compare(left.expression, right.expression))

    def _logical(self, other: Any, compute: Callable[[Any, Any], Any]) -> Symbol:
        right = self._operand(other)
        if self.kind is not bool or right.kind is not bool:
            raise UntraceableError("the function uses &, | or ~ on a value that is not a bool")
        self._use()
        return self._made(bool, compute(self.expression, right.expression))

    def _edge(self, text: Any, compute: Callable[[pl.Expr], pl.Expr]) -> Symbol:
        if self.kind is not str or type(text) is not str:
            raise UntraceableError(
                "the function looks at the beginning or end of a string for a text that is not always the same"
            )
        self._use()
        return self._made(bool, compute(self.expression))


def constant(tracer: Tracer, value: object) -> Symbol:
    """Returns a symbol with the same value in every row.

    Raises UntraceableError for a value that is not a number, a bool or a string.
    """
    if type(value) is int and INT64_MIN <= value <= INT64_MAX:
        bounds = (value, value)
        return Symbol(tracer, int, pl.lit(value, dtype=pl.Int64), lambda of: bounds)
    if type(value) is float:
        return Symbol(tracer, float, pl.lit(value, dtype=pl.Float64))
    if type(value) is bool:
        return Symbol(tracer, bool, pl.lit(value, dtype=pl.Boolean))
    if type(value) is str:
        return Symbol(tracer, str, pl.lit(value, dtype=pl.String))
    raise UntraceableError(f"the function uses an object of type {type(value).__name__} as a value")


def _product(left: Bounds, right: Bounds) -> Bounds:
    corners = [a * b for a in left for b in right]
    return min(corners), max(corners)


def _quotient(left: Bounds, right: Bounds) -> Bounds:
    """Returns the bounds of the quotient of two integers. The divisor must not be 0."""
    divisors = {b for b in (*right, -1, 1) if right[0] <= b <= right[1] and b}
    corners = [a // b for a in left for b in divisors] or [0]
    return min(corners), max(corners)


def _remainder(left: Bounds, right: Bounds) -> Bounds:
    greatest = max(abs(bound) for bound in right)
    return -2 * greatest, 2 * greatest  # of the sum on the way to it as well


def _absolute(bounds: Bounds) -> Bounds:
    least = 0 if bounds[0] <= 0 <= bounds[1] else min(map(abs, bounds))
    return least, max(map(abs, bounds))
