"""Random expressions have the values that the rules of SQL give row by row, in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from tidegate.sql.expressions import Expressions, like
from tidegate.sql.query_text import parse
from tidegate.sql.typed_values import Typed, column

Row = dict[str, Any]
NUMBERS, FLAGS, TEXTS = ("a", "b"), ("p", "q"), ("s", "t")
TYPES: dict[str, Any] = {
    **dict.fromkeys(NUMBERS, pl.Int64()),
    **dict.fromkeys(FLAGS, pl.Boolean()),
    **dict.fromkeys(TEXTS, pl.String()),
}
VALUES = {
    **dict.fromkeys(NUMBERS, st.none() | st.integers(-5, 5)),
    **dict.fromkeys(FLAGS, st.none() | st.booleans()),
    **dict.fromkeys(TEXTS, st.none() | st.text("ab%_", max_size=4)),
}


@dataclass(frozen=True)
class Both:
    """An expression as text, and what it is of a row."""

    text: str
    of: Callable[[Row], Any]


def _strict(function: Callable[..., Any], *parts: Both) -> Callable[[Row], Any]:
    """A function of which a null makes a null."""

    def of(row: Row) -> Any:
        values = [part.of(row) for part in parts]
        return None if None in values else function(*values)

    return of


def _remainder(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) % abs(b) * (1 if a >= 0 else -1)


def _quotient(a: int, b: int) -> int | None:
    return None if b == 0 else _wrapped(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _and(a: Any, b: Any) -> Any:
    return False if a is False or b is False else None if a is None or b is None else True


def _or(a: Any, b: Any) -> Any:
    return True if a is True or b is True else None if a is None or b is None else False


def _in(value: Any, found: list[Any]) -> Any:
    if value is None:
        return None
    return True if value in found else None if None in found else False


_ARITHMETIC: dict[str, Callable[[int, int], Any]] = {
    "{} + {}": lambda a, b: _wrapped(a + b),
    "{} - {}": lambda a, b: _wrapped(a - b),
    "{} * {}": lambda a, b: _wrapped(a * b),
    "{} % {}": _remainder,
    "{} DIV {}": _quotient,
}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
}


def _column(names: tuple[str, ...]) -> st.SearchStrategy[Both]:
    return st.sampled_from(names).map(lambda name: Both(name, lambda row: row[name]))


def _chosen(condition: Both, a: Both, b: Both) -> Both:
    return Both(
        f"CASE WHEN {condition.text} THEN {a.text} ELSE {b.text} END",
        lambda row: a.of(row) if condition.of(row) is True else b.of(row),
    )


def _coalesced(a: Both, b: Both) -> Both:
    return Both(f"COALESCE({a.text}, {b.text})", lambda row: b.of(row) if (found := a.of(row)) is None else found)


@st.composite
def number(draw: st.DrawFn, depth: int = 3) -> Both:
    """An expression of whole numbers; one side is a BIGINT, so that all of it is."""
    kind = draw(st.sampled_from(("column", "calculated", "case", "coalesce", "minus", "length"))) if depth else "column"
    if kind == "column":
        return draw(_column(NUMBERS))
    a, b = draw(number(depth - 1)), draw(number(depth - 1))
    if kind == "calculated":
        if draw(st.booleans()):
            value = draw(st.integers(0, 4))
            b = Both(str(value), lambda row: value)
        form = draw(st.sampled_from(list(_ARITHMETIC)))
        return Both(f"({form.format(a.text, b.text)})", _strict(_ARITHMETIC[form], a, b))
    if kind == "case":
        return _chosen(draw(flag(depth - 1)), a, b)
    if kind == "coalesce":
        return _coalesced(a, b)
    if kind == "minus":
        return Both(f"(- {a.text})", _strict(lambda value: _wrapped(-value), a))
    words = draw(text(depth - 1))
    return Both(f"CAST(LENGTH({words.text}) AS BIGINT)", _strict(len, words))


@st.composite
def text(draw: st.DrawFn, depth: int = 2) -> Both:
    """An expression of text."""
    kind = draw(st.sampled_from(("column", "joined", "case", "coalesce", "part"))) if depth else "column"
    if kind == "column":
        return draw(_column(TEXTS))
    a, b = draw(text(depth - 1)), draw(text(depth - 1))
    if kind == "joined":
        return Both(f"({a.text} || {b.text})", _strict(lambda x, y: x + y, a, b))
    if kind == "case":
        return _chosen(draw(flag(depth - 1)), a, b)
    if kind == "coalesce":
        return _coalesced(a, b)
    start = draw(st.integers(1, 4))
    return Both(f"SUBSTRING({a.text}, {start}, 2)", _strict(lambda x: x[start - 1 : start + 1], a))


@st.composite
def flag(draw: st.DrawFn, depth: int = 3) -> Both:
    """A condition, with its three values."""
    kinds = ("column", "compared", "texts", "and", "or", "not", "null", "in", "between", "like")
    kind = draw(st.sampled_from(kinds)) if depth else "column"
    if kind == "column":
        return draw(_column(FLAGS))
    if kind in ("and", "or", "not"):
        a, b = draw(flag(depth - 1)), draw(flag(depth - 1))
        if kind == "not":
            return Both(f"(NOT {a.text})", _strict(lambda x: not x, a))
        together = _and if kind == "and" else _or
        return Both(f"({a.text} {kind.upper()} {b.text})", lambda row: together(a.of(row), b.of(row)))
    of_kind = text(min(2, depth - 1)) if kind in ("texts", "like") else number(depth - 1)
    a, b = draw(of_kind), draw(of_kind)
    if kind in ("compared", "texts"):
        sign = draw(st.sampled_from(list(_COMPARED)))
        return Both(f"({a.text} {sign} {b.text})", _strict(_COMPARED[sign], a, b))
    if kind == "null":
        return Both(f"({a.text} IS NULL)", lambda row: a.of(row) is None)
    if kind == "in":
        found = draw(st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=3))
        words = ", ".join("NULL" if value is None else str(value) for value in found)
        return Both(f"({a.text} IN ({words}))", lambda row: _in(a.of(row), found))
    if kind == "between":
        low = _strict(_COMPARED[">="], a, b)
        high = _strict(lambda value: value <= 3, a)
        return Both(f"({a.text} BETWEEN {b.text} AND 3)", lambda row: _and(low(row), high(row)))
    pattern = draw(st.text("ab%_", max_size=4))
    return Both(f"({a.text} LIKE '{pattern}')", _strict(lambda value: _is_like(value, pattern), a))


def _is_like(value: str, pattern: str) -> bool:
    if not pattern:
        return not value
    if pattern[0] == "%":
        return any(_is_like(value[n:], pattern[1:]) for n in range(len(value) + 1))
    return bool(value) and pattern[0] in ("_", value[0]) and _is_like(value[1:], pattern[1:])


def _resolve(node: exp.Column) -> Typed:
    return column(node.name, TYPES[node.name])


def _check(both: Both, frame: pl.DataFrame) -> None:
    """What the translation gives is what the rules give, in the type that it says."""
    select = parse(f"SELECT {both.text} AS x FROM t")
    typed = Expressions(_resolve).of(select.expressions[0].this)
    found = frame.with_columns(typed.expr.alias("x"))["x"]
    assert found.to_list() == [both.of(row) for row in frame.to_dicts()]
    assert found.dtype == typed.type


@pytest.mark.slow
@settings(max_examples=100)
@given(st.one_of(number(), text(), flag()), st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=6))
def test_an_expression_is_of_each_row_what_sql_says(both: Both, rows: list[Row]) -> None:
    """Values and nulls of whatever stands in whatever."""
    _check(both, pl.DataFrame(rows, schema=TYPES))


def test_operators_are_of_all_pairs_what_sql_says() -> None:
    """Each by itself, of small numbers and nulls, also of the greatest and the least."""
    some = [None, *range(-4, 5), 2**63 - 1, -(2**63)]
    frame = pl.DataFrame([{"a": a, "b": b} for a in some for b in some], schema={"a": pl.Int64, "b": pl.Int64})
    a, b = Both("a", lambda row: row["a"]), Both("b", lambda row: row["b"])
    for form, function in _ARITHMETIC.items():
        _check(Both(form.format("a", "b"), _strict(function, a, b)), frame)
        _check(Both(form.format("a", "3"), _strict(lambda x, of=function: of(x, 3), a)), frame)
    for sign, compare in _COMPARED.items():
        _check(Both(f"a {sign} b", _strict(compare, a, b)), frame)


def test_like_is_of_all_short_patterns_what_sql_says() -> None:
    """Those of up to three characters, for texts as long."""
    texts = ["".join(letters) for size in range(4) for letters in product("ab%", repeat=size)]
    frame = pl.DataFrame({"s": [None, *texts]})
    for size in range(4):
        for letters in product("a%_", repeat=size):
            pattern = "".join(letters)
            found = frame.select(like(exp.Null(), pl.col("s"), pattern, "\\", any_case=False))["s"]
            assert found.to_list() == [None, *(_is_like(text, pattern) for text in texts)], pattern
