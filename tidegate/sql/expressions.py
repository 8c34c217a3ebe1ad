"""`Expressions`: translates SQL expressions into polars expressions, each with its type.

The caller of `Expressions` defines the meaning of names: `resolve` returns the value of a column, and `known` the value
of an expression that is computed already, such as an aggregate. All translated expressions work row by row. For any
other expression an error advises what to write instead.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
from sqlglot import exp

from tidegate.api.program import UserFunction, user_function
from tidegate.sql.functions.aggregates import AGGREGATES, is_aggregate
from tidegate.sql.functions.call import Call, Functions
from tidegate.sql.functions.numbers import NUMBERS
from tidegate.sql.functions.row_calls import RowCalls
from tidegate.sql.functions.texts import JSON, TEXTS, position, sliced
from tidegate.sql.functions.times import CLOCK, RANDOM, TIMES, UNIT_MONTHS, UNIT_MS, extracted, unit_of
from tidegate.sql.operators import (
    COMPARISONS,
    added,
    compared,
    divided,
    multiplied,
    negated,
    remainder,
    whole_quotient,
)
from tidegate.sql.query_text import WINDOW_TABLES, check_only, parse, refused
from tidegate.sql.typed_values import (
    DIGITS_MAX,
    Interval,
    Typed,
    as_type,
    calculated,
    check_known,
    is_integer,
    is_time,
    literal,
    named,
    needed_common_type,
    null,
    python_value,
    truth,
    type_of_name,
)
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import check_polars_has

FUNCTIONS: Functions = {**TEXTS, **NUMBERS, **TIMES, **JSON}
_INT_MAX, _BIGINT_MAX = 2**31 - 1, 2**63 - 1
_CALCULATIONS: dict[type[exp.Expr], Callable[[exp.Expr, Typed, Typed], Typed]] = {
    exp.Add: lambda node, a, b: added(node, a, b, 1),
    exp.Sub: lambda node, a, b: added(node, a, b, -1),
    exp.Mul: multiplied,
    exp.Div: divided,
    exp.IntDiv: whole_quotient,
    exp.Mod: remainder,
}


def balanced(conditions: Sequence[pl.Expr], join: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> pl.Expr:
    """Combines conditions by `join` (such as AND) into a balanced tree.

    polars cannot deserialize expressions that are nested more than 60 levels deep.
    """
    if len(conditions) == 1:
        return conditions[0]
    middle = len(conditions) // 2
    return join(balanced(conditions[:middle], join), balanced(conditions[middle:], join))


class Expressions:
    """Translates SQL expressions over the columns that `resolve` finds into polars expressions."""

    def __init__(
        self, resolve: Callable[[exp.Column], Typed], known: Callable[[exp.Expr], Typed | None] = lambda _: None
    ) -> None:
        self._resolve, self._known = resolve, known

    def of(self, node: exp.Expr) -> Typed:
        """Translates an expression.

        Raises ConfigurationError if it is not supported, or if the types of its operands cannot be combined.
        """
        found = self._known(node)
        if found is not None:
            return found
        kind = type(node)
        method = _KINDS.get(kind)
        if method is not None or kind in COMPARISONS or kind in _CALCULATIONS:
            check_only(node, *_WORDS, *_MORE_WORDS.get(kind, ()))
        if kind in COMPARISONS:
            return compared(node, self.of(node.this), self.of(node.expression), COMPARISONS[kind])
        if kind in _CALCULATIONS:
            return _CALCULATIONS[kind](node, self.of(node.this), self.of(node.expression))
        if method is not None:
            return method(self, node)
        if isinstance(node, exp.Anonymous):
            return self._called(node, node.name, node.expressions)
        raise refused(node, _why_not(node))

    def condition(self, node: exp.Expr) -> pl.Expr:
        """Translates a condition. Raises ConfigurationError for an expression that is not boolean."""
        return truth(node, self.of(node))

    def _conditions(self, node: exp.Expr) -> list[pl.Expr]:
        """Returns the translated operands of a chain of AND or OR.

        A chain may have hundreds of operands, so recursion is avoided.
        """
        return [self.condition(operand) for operand in node.flatten()]

    def _literal(self, node: exp.Expr) -> Typed:
        text = str(node.this)
        if node.is_string:
            return literal(text, pl.String())
        if text.isdigit():
            value = int(text)
            if _BIGINT_MAX < value < 10**DIGITS_MAX:
                return literal(Decimal(value), pl.Decimal(len(text), 0))
            if value > _BIGINT_MAX:
                raise refused(node, f"a number has at most {DIGITS_MAX} digits; write a double, as in 1e40")
            return literal(value, pl.Int32() if value <= _INT_MAX else pl.Int64())
        if "e" in text.lower():
            return literal(float(text), pl.Float64())
        value_of = Decimal(text)
        scale = max(0, -int(value_of.as_tuple().exponent))
        digits = max(len(value_of.as_tuple().digits), scale)
        if digits > DIGITS_MAX:
            raise refused(node, f"a decimal has at most {DIGITS_MAX} digits; write a double, as in 1.5e0")
        return literal(value_of, pl.Decimal(digits, scale))

    def _is(self, node: exp.Expr) -> Typed:
        given, other = self.of(node.this), node.expression
        if isinstance(other, exp.Not):
            return self._not(exp.Not(this=exp.Is(this=node.this, expression=other.this)))
        if isinstance(other, exp.Null):
            return Typed(given.expr.is_null(), pl.Boolean())
        if isinstance(other, exp.Boolean):
            return Typed(truth(node.this, given).eq_missing(pl.lit(bool(other.this))), pl.Boolean())
        raise refused(node, "IS must be followed by NULL, TRUE, FALSE or DISTINCT FROM")

    def _not(self, node: exp.Expr) -> Typed:
        return Typed(~self.condition(node.this), pl.Boolean())

    def _in(self, node: exp.Expr) -> Typed:
        if node.args.get("query") is not None or node.args.get("unnest") is not None or node.args.get("field"):
            raise refused(node, "IN takes a list of values; for the values of a stream write LEFT SEMI JOIN in windows")
        given, values = self.of(node.this), [self.of(each) for each in node.expressions]
        wanted = needed_common_type(node, [given.type, *(each.type for each in values)])
        cast = [as_type(node, each, wanted) for each in values]
        expr = as_type(node, given, wanted).expr
        literals = [each.value for each, value in zip(cast, values, strict=True) if not value.is_null]
        if all(value is not None for value in literals):
            found = expr.is_in(pl.Series(literals, dtype=wanted).to_list()) if literals else pl.lit(False)
            if len(literals) < len(values):  # NOT IN a list with a null is never true
                found = found | pl.lit(None, dtype=pl.Boolean)
            return Typed(found, pl.Boolean())
        found = expr == cast[0].expr
        for each in cast[1:]:
            found = found | (expr == each.expr)
        return Typed(found, pl.Boolean())

    def _between(self, node: exp.Expr) -> Typed:
        given = self.of(node.this)
        low = compared(node, given, self.of(node.args["low"]), COMPARISONS[exp.GTE])
        high = compared(node, given, self.of(node.args["high"]), COMPARISONS[exp.LTE])
        return Typed(low.expr & high.expr, pl.Boolean())

    def _like(self, node: exp.Expr) -> Typed:
        escape = "\\"
        if isinstance(node, exp.Escape):
            escape = str(python_value(node.expression, self.of(node.expression), str))
            node = node.this
            if len(escape) != 1 or not isinstance(node, exp.Like | exp.ILike):
                raise refused(node, "ESCAPE takes one character, and follows LIKE")
            check_only(node, *_WORDS, *_MORE_WORDS[type(node)])
        text = self._text(node.this)
        if self.of(node.expression).is_null:
            return Typed(pl.lit(None, dtype=pl.Boolean), pl.Boolean())
        if isinstance(node, exp.RegexpLike):
            return Typed(text.str.contains(self._literal_text(node.expression)), pl.Boolean())
        found = like(node, text, self._literal_text(node.expression), escape, isinstance(node, exp.ILike))
        return Typed(~found if node.args.get("negate") else found, pl.Boolean())

    def _case(self, node: exp.Expr) -> Typed:
        subject, branches = node.args.get("this"), node.args["ifs"]
        conditions = [
            self.condition(each.this if subject is None else exp.EQ(this=subject.copy(), expression=each.this.copy()))
            for each in branches
        ]
        default = node.args.get("default")
        return self._chosen(node, conditions, [each.args["true"] for each in branches], default)

    def _if(self, node: exp.Expr) -> Typed:
        return self._chosen(node, [self.condition(node.this)], [node.args["true"]], node.args.get("false"))

    def _chosen(
        self, node: exp.Expr, conditions: list[pl.Expr], then: list[exp.Expr], default: exp.Expr | None
    ) -> Typed:
        values = [self.of(each) for each in then] + [null() if default is None else self.of(default)]
        wanted = needed_common_type(node, [each.type for each in values])
        if isinstance(wanted, pl.Null):
            return null()
        chosen = as_type(node, values[-1], wanted).expr
        for condition, value in zip(reversed(conditions), reversed(values[:-1]), strict=True):
            chosen = pl.when(condition).then(as_type(node, value, wanted).expr).otherwise(chosen)
        return Typed(chosen, wanted)

    def _cast(self, node: exp.Expr) -> Typed:
        wanted = type_of_name(node.args["to"])
        given = self.of(node.this)
        if is_time(given.type) and isinstance(wanted, pl.Datetime) and given.type.base_type() == pl.Datetime:
            wanted = pl.Datetime(wanted.time_unit, given.type.time_zone)
        return as_type(node, given, wanted)

    def _concat(self, node: exp.Expr) -> Typed:
        return Typed(pl.concat_str([self._text(node.this), self._text(node.expression)]), pl.String())

    def _extract(self, node: exp.Expr) -> Typed:
        return extracted(node, node.name, self._call(node, "EXTRACT", [node.expression]).time(0))

    def _trim(self, node: exp.Expr) -> Typed:
        text, where = self._text(node.this), str(node.args.get("position") or "BOTH").upper()
        characters = " " if node.expression is None else self._literal_text(node.expression)
        strip = {"LEADING": text.str.strip_chars_start, "TRAILING": text.str.strip_chars_end}
        return Typed(strip.get(where, text.str.strip_chars)(characters), pl.String())

    def _substring(self, node: exp.Expr) -> Typed:
        parts = [node.this, node.args.get("start") or exp.Literal.number(1), node.args.get("length")]
        call = self._call(node, "SUBSTRING", [each for each in parts if each is not None])
        return Typed(
            sliced(call.text(0), call.integer(1), call.integer(2) if len(call.args) > 2 else None), pl.String()
        )

    def _position(self, node: exp.Expr) -> Typed:
        return Typed(position(self._text(node.this), self._literal_text(node.args["substr"])), pl.Int32())

    def _interval(self, node: exp.Expr) -> Typed:
        given = node.this
        if given is None or node.args.get("unit") is None or not isinstance(given, exp.Literal | exp.Neg):
            raise refused(node, "an interval needs a whole number and a unit, as in INTERVAL '10' SECONDS")
        unit, text = (
            unit_of(node, node.args["unit"].name),
            str(given.name if isinstance(given, exp.Literal) else given.sql()),
        )
        try:
            number = int(text)
        except ValueError:
            raise refused(
                node, f"{text!r} is not a whole number; write INTERVAL '90' MINUTES for one and a half hours"
            ) from None
        value = Interval(UNIT_MONTHS[unit] * number, 0) if unit in UNIT_MONTHS else Interval(0, UNIT_MS[unit] * number)
        return Typed(pl.lit(None), pl.Duration("ms"), value)

    def _element(self, node: exp.Expr) -> Typed:
        given, (place_of, *more) = self.of(node.this), node.expressions
        if not isinstance(given.type, pl.List | pl.Array) or more:
            raise refused(
                node,
                f"[…] selects one element of a list, but this is {named(given.type)}"
                ": for a field of a struct write .name",
            )
        index = self.of(place_of)
        if not is_integer(index.type):
            raise refused(place_of, "the index of an element must be a whole number, from 0")
        values = given.expr.list if isinstance(given.type, pl.List) else given.expr.arr
        found = values.get(pl.when(index.expr >= 0).then(index.expr), null_on_oob=True)
        return Typed(found, given.type.inner)

    def _field(self, node: exp.Expr) -> Typed:
        return field_of(node, self.of(node.this), node.expression.name)

    def _called(self, node: exp.Expr, name: str, arguments: list[exp.Expr]) -> Typed:
        upper = name.upper()
        of_user = user_function(name)
        if of_user is not None:
            return called_by_user(self._call(node, upper, arguments), of_user)
        function = FUNCTIONS.get(upper)
        if function is None:
            raise refused(node, _no_function(upper))
        if not function.least <= len(arguments) <= function.most:
            count = str(function.least) if function.least == function.most else f"{function.least} to {function.most}"
            raise refused(node, f"{upper} takes {count} argument{'' if count == '1' else 's'}, not {len(arguments)}")
        return function.make(self._call(node, upper, arguments))

    def _call(self, node: exp.Expr, name: str, arguments: list[exp.Expr]) -> Call:
        units = name in ("TIMESTAMPDIFF", "TIMESTAMPADD")
        args = [null() if units and not n else self.of(each) for n, each in enumerate(arguments)]
        return Call(node, name, tuple(args), tuple(arguments))

    def _text(self, node: exp.Expr) -> pl.Expr:
        return as_type(node, self.of(node), pl.String()).expr

    def _literal_text(self, node: exp.Expr) -> str:
        return str(python_value(node, self.of(node), str))


def field_of(node: exp.Expr, given: Typed, name: str) -> Typed:
    """Returns the field `name` of a struct value. Raises ConfigurationError if the struct has no such field."""
    fields = given.type.fields if isinstance(given.type, pl.Struct) else []
    found = [field for field in fields if field.name.lower() == name.lower()]
    if len(found) != 1:
        known = f"; it has {', '.join(field.name for field in fields)}" if fields else ""
        raise refused(
            node,
            f"{named(given.type)} has no field {name!r}{known}; select another field, or add this one to the schema "
            "of the stream",
        )
    return Typed(given.expr.struct.field(found[0].name), found[0].dtype)


def check_function_name(name: object) -> None:
    """Raises ConfigurationError if the name of a user function has another meaning in queries."""
    if isinstance(name, str) and name.isidentifier():
        check_name(name, name.upper() in FUNCTIONS or name.upper() in (*CLOCK, *RANDOM, *AGGREGATES))


def _no_function(name: str) -> str:
    if name in CLOCK:
        return (
            f"{name} reads the clock, so rows that are replayed after a failure would have other values; use a column "
            "of event time"
        )
    if name in RANDOM:
        return f"{name} is random, so that a replay gives other rows"
    if name in ("EXPLODE", "EXPLODE_OUTER"):
        return (
            f"{name} makes several rows of one: write it in SELECT, alone, once and without groups, or in LATERAL VIEW "
            f"{name}(…) t AS x"
        )
    if name in AGGREGATES:
        return f"{name} is an aggregate: write it in SELECT or HAVING, and not within another aggregate"
    return (
        f"there is no function {name}; docs/sql.md lists them, and create_temporary_function makes one of a Python "
        "function"
    )


def _why_not(node: exp.Expr) -> str:
    if isinstance(node, exp.Window):
        return (
            "OVER (…) is for ROW_NUMBER and RANK, with an outer condition such as rn <= 10; for running sums and "
            "counts use GROUP BY, and for others key_by(…).process(…)"
        )
    if isinstance(node, exp.Exists | exp.Subquery | exp.Select):
        return "a query within an expression is not covered; join it"
    if isinstance(node, exp.CurrentTimestamp | exp.CurrentDate | exp.CurrentTime):
        return _no_function("CURRENT_TIMESTAMP")
    if isinstance(node, exp.Filter | exp.Distinct | exp.IgnoreNulls):
        return "this belongs to an aggregate: write it in SELECT or HAVING"
    if isinstance(node, exp.Star):
        return "write * only in SELECT and in COUNT(*)"
    return f"{type(node).__name__} is not covered; see docs/sql.md"


_WORDS = ("this", "expression", "expressions", "safe", "typed")
"""Names of the arguments of sqlglot nodes that all kinds of expressions may have. sqlglot itself adds `safe` and
`typed`.
"""
_MORE_WORDS: dict[type[exp.Expr], tuple[str, ...]] = {
    exp.Between: ("low", "high"),
    exp.Case: ("ifs", "default"),
    exp.Cast: ("to",),
    exp.Column: ("table", "db", "catalog"),
    exp.If: ("true", "false"),
    exp.ILike: ("negate",),
    exp.In: ("query", "unnest", "field"),
    exp.Interval: ("unit",),
    exp.Like: ("negate",),
    exp.Literal: ("is_string",),
    exp.StrPosition: ("substr",),
    exp.Substring: ("start", "length"),
    exp.Trim: ("position",),
    exp.TryCast: ("to",),
}
"""For some kinds of expressions, the names of further arguments that their sqlglot nodes may have.

Other arguments raise an error, because they may change the meaning: a newer sqlglot might represent NOT by such an
argument.
"""

_KINDS: dict[Any, Callable[[Expressions, Any], Typed]] = {
    exp.Paren: lambda self, node: self.of(node.this),
    exp.Column: lambda self, node: self._resolve(node),
    exp.Boolean: lambda self, node: literal(bool(node.this), pl.Boolean()),
    exp.Null: lambda self, node: null(),
    exp.Neg: lambda self, node: negated(node, self.of(node.this)),
    exp.And: lambda self, node: Typed(balanced(self._conditions(node), operator.and_), pl.Boolean()),
    exp.Or: lambda self, node: Typed(balanced(self._conditions(node), operator.or_), pl.Boolean()),
    exp.Literal: Expressions._literal,
    exp.Not: Expressions._not,
    exp.Is: Expressions._is,
    exp.In: Expressions._in,
    exp.Between: Expressions._between,
    exp.Like: Expressions._like,
    exp.ILike: Expressions._like,
    exp.RegexpLike: Expressions._like,
    exp.Escape: Expressions._like,
    exp.Case: Expressions._case,
    exp.If: Expressions._if,
    exp.Cast: Expressions._cast,
    exp.TryCast: Expressions._cast,
    exp.DPipe: Expressions._concat,
    exp.Extract: Expressions._extract,
    exp.Trim: Expressions._trim,
    exp.Substring: Expressions._substring,
    exp.StrPosition: Expressions._position,
    exp.Interval: Expressions._interval,
    exp.Bracket: Expressions._element,
    exp.Dot: Expressions._field,
}


_OTHERS: tuple[str, ...] = (
    "WINDOW",
    "SESSION_WINDOW",
    "ROW_NUMBER",
    "RANK",
    "DENSE_RANK",
    "EXPLODE",
    "EXPLODE_OUTER",
    *WINDOW_TABLES,
)
"""Names of functions that queries give a meaning, but that the tables of functions do not contain."""
_OTHERS += ("TABLE", "DESCRIPTOR", "UNNEST", "POSEXPLODE")
"""Names of functions that the tables of functions do not have."""


def called_by_user(call: Call, function: UserFunction) -> Typed:
    """Translates a call of a user function. Raises ConfigurationError for a wrong number or kind of arguments."""
    count = len(call.args)
    if not function.least <= count <= function.most:
        wanted = str(function.least) if function.least == function.most else f"{function.least} to {function.most}"
        raise call.refused(
            f"the function {function.name} takes {wanted} argument{'' if wanted == '1' else 's'}, not {count}"
        )
    inputs = []
    for node, given in zip(call.nodes, call.args, strict=True):
        if isinstance(given.value, Interval):
            raise call.refused(
                f"{node.sql(dialect='spark')} is an interval, which cannot be passed to a Python function: pass a "
                "number of seconds or milliseconds"
            )
        inputs.append(given.expr)
    made = _polars_type(function.returns, call)
    calls = RowCalls(function.name, function.function, function.returns, function.columns)
    expr = pl.map_batches([*inputs, pl.lit(f"function {function.name}")], calls, return_dtype=made, is_elementwise=True)
    of_kind = calculated(made)
    return Typed(expr if of_kind == made else expr.cast(of_kind), of_kind)


def _polars_type(data_type: pa.DataType, call: Call) -> pl.DataType:
    """Returns the polars type for the result type that a user function declares.

    Raises ConfigurationError for a type that SQL does not support.
    """
    try:
        check_polars_has(pa.schema([pa.field(call.name, data_type)]))
        found = pl.Series(pa.array([], data_type)).dtype
        check_known(call.name, found)
    except ConfigurationError as error:
        raise call.refused(f"the function returns {data_type}: {error}; give it another type in returns=") from error
    return found


def check_name(name: str, builtin: bool) -> None:
    """Raises ConfigurationError if a name cannot be the name of a user function.

    `builtin` is True if SQL has a function of this name.
    """
    try:
        (node,) = parse(f"SELECT {name}(a) FROM t").expressions
    except ConfigurationError:
        node = None
    if builtin or not isinstance(node, exp.Anonymous) or is_aggregate(node) or name.upper() in _OTHERS:
        raise ConfigurationError(
            f"create_temporary_function({name!r}): this name has another meaning in SQL; choose another one"
        )


def like(node: exp.Expr, text: pl.Expr, pattern: str, escape: str, any_case: bool) -> pl.Expr:
    """Returns a condition that is true where a text matches a LIKE pattern. `any_case` ignores case (ILIKE).

    Raises ConfigurationError for a pattern that ends with the escape character.
    """
    parts = _parts(node, pattern, escape)
    if any_case:
        return text.str.contains(_regex(parts, "(?is)"))
    fixed = "".join(part for part in parts if part is not None and part != "")
    match parts:
        case [] | [str()] if "" not in parts:
            return text == fixed
        case [str() as start, None] if start:
            return text.str.starts_with(start)
        case [None, str() as end] if end:
            return text.str.ends_with(end)
        case [None, str() as inside, None] if inside:
            return text.str.contains(inside, literal=True)
    return text.str.contains(_regex(parts, "(?s)"))


def _parts(node: exp.Expr, pattern: str, escape: str) -> list[str | None]:
    """Divides a LIKE pattern into a list of parts: texts, None for `%`, and an empty text for `_`."""
    found: list[str | None] = []
    letters, kept = iter(pattern), ""
    for letter in letters:
        if letter not in (escape, "%", "_"):
            kept += letter
            continue
        if letter == escape:
            following = next(letters, None)
            if following is None:
                raise refused(node, f"the pattern ends in the escape {escape!r}: remove it, or write it twice")
            kept += following
            continue
        if kept:
            found.append(kept)
            kept = ""
        found.append(None if letter == "%" else "")
    if kept:
        found.append(kept)
    return found


def _regex(parts: list[str | None], flags: str) -> str:
    words = (".*" if part is None else "." if part == "" else re.escape(part) for part in parts)
    return f"^{flags}{''.join(words)}$".replace("^(", "(", 1).replace(flags, f"{flags}^", 1)
