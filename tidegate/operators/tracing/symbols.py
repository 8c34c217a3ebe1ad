"""`Symbol`: stands for a value of every row at once while a function of a row is traced.

What Python computes for a row and polars for a column differs at edges. Each operation here is one that agrees, as long
as some things hold for a batch, which the trace notes (`Notes`); a batch for which they do not is given to the function
row by row. Rules:

- What is computed with has no nulls: Python would raise an error.
- Integers stay in int64, where Python's are exact without end: bounds are followed from the columns on.
- A divisor is never 0. What is divided, or compared with a float, is exact as a float.
- What is compared is not NaN: polars takes NaN for equal to itself, and greater than any number.
- Any other operation cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import polars as pl

from tidegate.operators.tracing.code_rules import UntraceableError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_EXACT_FLOAT = 2**53

Bounds: TypeAlias = tuple[int, int]
Columns: TypeAlias = Mapping[str, Bounds]
BoundsOf: TypeAlias = Callable[[Columns], Bounds]
"""The least and the greatest value of an integer, from those of the columns of a batch."""


class ForkError(Exception):
    """The function asks whether something is true: it has to be followed both ways."""

    def __init__(self, condition: pl.Expr) -> None:
        super().__init__("a condition")
        self.condition = condition


@dataclass(slots=True)
class Notes:
    """What must hold for a batch, so that the expressions give what the function gives."""

    columns: set[str] = field(default_factory=set)
    """Columns that are computed with: none of their values is null."""
    integers: set[str] = field(default_factory=set)
    """Those of them whose bounds are asked for."""
    ranges: list[tuple[BoundsOf, int, int]] = field(default_factory=list)
    """Integers, and the range that they must stay in."""
    conditions: list[pl.Expr] = field(default_factory=list)
    """Must be true for every row."""


class Tracer:
    """One run of the function: what it decides at each condition, as far as that was told."""

    def __init__(self, notes: Notes, decisions: tuple[bool, ...]) -> None:
        self.notes = notes
        self._decisions = list(reversed(decisions))

    def decide(self, condition: pl.Expr) -> bool:
        """The next decision. ForkError if it is not made yet."""
        if not self._decisions:
            raise ForkError(condition)
        return self._decisions.pop()


class Symbol:
    """A value of each row: `kind` is int, float, bool or str (the Python types), or None for one that is only copied.

    `column` is the column that it is a copy of. `bounds` is that of an int.
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
        raise UntraceableError("it asks whether a value is true that is no number or string")

    def __add__(self, other: Any) -> Symbol:
        if self.kind is str:
            right = self._operand(other)
            if right.kind is not str:
                raise UntraceableError("it adds a string and something else")
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
        # The remainder has the sign of the divisor, and polars' that of the dividend for some versions.
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
        """Whether a string begins with this one."""
        return self._edge(text, lambda value: value.str.starts_with(text))

    def endswith(self, text: Any) -> Symbol:
        """Whether a string ends with this one."""
        return self._edge(text, lambda value: value.str.ends_with(text))

    def __repr__(self) -> str:
        raise UntraceableError("it writes a value as text")

    def __format__(self, form: str) -> str:
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        raise UntraceableError(f"it uses .{name} of a value")

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
        """The value as a number: a bool counts as 0 or 1."""
        self._use()
        if self.kind is bool:
            return Symbol(self.tracer, int, self.expression.cast(pl.Int64), lambda of: (0, 1))
        if self.kind not in (int, float):
            raise UntraceableError("it calculates with what is no number")
        return self

    def _numbers(self, other: object) -> tuple[Symbol, Symbol]:
        return self._number(), self._operand(other)._number()

    def _whole_numbers(self, other: object) -> tuple[Symbol, Symbol]:
        left, right = self._numbers(other)
        if left.kind is not int or right.kind is not int:
            raise UntraceableError("it takes the whole part or the remainder of a float")
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
            raise UntraceableError("it compares values that are no numbers or strings")
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
            raise UntraceableError("it takes the bits of what is no bool")
        self._use()
        return self._made(bool, compute(self.expression, right.expression))

    def _edge(self, text: Any, compute: Callable[[pl.Expr], pl.Expr]) -> Symbol:
        if self.kind is not str or type(text) is not str:
            raise UntraceableError("it looks for the beginning or end of a string that is not always the same")
        self._use()
        return self._made(bool, compute(self.expression))


def constant(tracer: Tracer, value: object) -> Symbol:
    """A constant, for every row. UntraceableError for one that is no number or string."""
    if type(value) is int and INT64_MIN <= value <= INT64_MAX:
        bounds = (value, value)
        return Symbol(tracer, int, pl.lit(value, dtype=pl.Int64), lambda of: bounds)
    if type(value) is float:
        return Symbol(tracer, float, pl.lit(value, dtype=pl.Float64))
    if type(value) is bool:
        return Symbol(tracer, bool, pl.lit(value, dtype=pl.Boolean))
    if type(value) is str:
        return Symbol(tracer, str, pl.lit(value, dtype=pl.String))
    raise UntraceableError(f"it uses {type(value).__name__} as a value")


def _product(left: Bounds, right: Bounds) -> Bounds:
    corners = [a * b for a in left for b in right]
    return min(corners), max(corners)


def _quotient(left: Bounds, right: Bounds) -> Bounds:
    """The divisor is never 0, so it is at least 1 away from it."""
    divisors = {b for b in (*right, -1, 1) if right[0] <= b <= right[1] and b}
    corners = [a // b for a in left for b in divisors] or [0]
    return min(corners), max(corners)


def _remainder(left: Bounds, right: Bounds) -> Bounds:
    greatest = max(abs(bound) for bound in right)
    return -2 * greatest, 2 * greatest  # of the sum on the way to it as well


def _absolute(bounds: Bounds) -> Bounds:
    least = 0 if bounds[0] <= 0 <= bounds[1] else min(map(abs, bounds))
    return least, max(map(abs, bounds))
