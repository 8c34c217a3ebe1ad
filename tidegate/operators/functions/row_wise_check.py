"""Tells whether a polars expression works row by row: what it computes for a row must not depend on the other rows.

Batches are cut differently on every run, also when rows are replayed after a failure, so an expression that looks at
other rows would give other results there. Polars says of each function whether it may be computed in parts (row
separable) and whether it keeps the number of rows. An expression is row-wise if all its parts are. Nothing is
evaluated: functions of the user in it must not see made-up rows. What polars cannot say is refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import polars as pl

from tidegate.storage.errors import ConfigurationError

Node: TypeAlias = Any
"""A part of an expression as polars writes it down: a string or a dict with one key, its kind."""

_COLUMN: Node = {"Column": "column"}
_ANY_VALUE: Node = {"Literal": {"Dyn": {"Int": 0}}}
_SAFE_DEPTH = 30
"""Levels of operands that polars surely reads back: its reader stops at 128 levels of JSON; an operand takes 2 to 4."""
_RANDOM = frozenset({"Random", "ListExpr.Sample", "ArrayExpr.Sample"})
_LOOKED_UP = frozenset({"Boolean.IsIn", "Replace", "ReplaceStrict"}) | {
    f"StringExpr.{name}" for name in ("ContainsAny", "ReplaceMany", "ExtractMany", "FindMany")
}
"""Functions that polars calls row separable, although they look at all inputs but the first as a whole."""
_HOLIDAYS = frozenset({f"Business.{name}" for name in ("AddBusinessDay", "BusinessDayCount", "IsBusinessDay")})
"""Functions whose last input is a list that polars takes for a column."""
_FAMILIES = frozenset({"Boolean", "Business", "StringExpr", "ListExpr", "ArrayExpr", "StructExpr", "BinaryExpr"})
"""Those that have functions which are told apart here."""
_ADVICE = (
    "an expression must work row by row, because batches are cut differently on every run. Use "
    "key_by(...).aggregate(...) for sums and counts, key_by(...).process(...) to remember rows, flat_map to make "
    "several rows of one, and map_batches(lambda batch: ...) if it is meant for each batch by itself"
)


class _NotRowWiseError(Exception):
    """Why an expression is not row-wise."""


def check_row_wise(expression: pl.Expr, method: str) -> None:
    """Raise ConfigurationError for an expression that looks beyond a row, changes the number of rows, or is random."""
    try:
        written = expression.meta.serialize(format="json")
        simple = _simple(json.loads(written))
        _walk(pl.Expr.deserialize(io.StringIO(json.dumps(simple)), format="json"))
    except _NotRowWiseError as reason:
        raise ConfigurationError(f"{method}({_shown(expression)}): {reason}; {_ADVICE}") from None
    except (pl.exceptions.PolarsError, ValueError, RecursionError) as error:
        if _is_deep(expression):
            raise ConfigurationError(
                f"{method}({_shown(expression)}): the expression is nested too deeply for polars to read back. Compute "
                "parts of it as columns of their own in with_columns(...) before"
            ) from None
        raise ConfigurationError(
            f"{method}({_shown(expression)}): it cannot be told whether this works row by row ({error}); {_ADVICE}"
        ) from error


def _is_deep(expression: pl.Expr) -> bool:
    """Returns whether an expression has so many levels of operands that polars may not read it back."""
    level = [expression]
    for _ in range(_SAFE_DEPTH):
        level = [operand for each in level for operand in each.meta.pop()]
    return bool(level)


def _walk(expression: pl.Expr) -> None:
    meta = expression.meta
    if not meta.is_row_separable():
        raise _NotRowWiseError(f"{_shown(expression)} looks at more than one row")
    if not (meta.is_length_preserving() or meta.is_scalar()):
        raise _NotRowWiseError(f"{_shown(expression)} changes the number of rows")
    for part in meta.pop():
        _walk(part)


def _simple(node: Node) -> Node:
    """The expression with a plain column for each part that polars can only judge when it knows the schema."""
    if isinstance(node, list):
        return [_simple(part) for part in node]
    if not isinstance(node, dict):
        return _COLUMN if node == "Element" else node
    if len(node) == 1:
        ((kind, inner),) = node.items()
        match kind:
            case "Literal":
                # JSON has no infinity and no NaN. Which single value it is does not matter here.
                return _ANY_VALUE if _is_one_value(inner) else node
            case "Selector" | "Field":
                return _COLUMN
            case "RenameAlias":
                return _simple(inner["expr"])
            case "Eval":  # within the list of one row; there it may look at all elements
                if "Cumulative" in inner["variant"]:
                    raise _NotRowWiseError("cumulative_eval looks at the rows before each one")
                _check_not_random(inner["evaluation"])
                return _simple(inner["expr"])
            case "StructEval":
                return _joined([inner["expr"], *inner["evaluation"]])
            case "AnonymousFunction":
                _check_function(inner)
                return _joined(inner["input"])
            case "Function":
                return _function(inner)
    return {name: _simple(part) for name, part in node.items()}


def _function(node: Node) -> Node:
    name = _name(node["function"])
    if name in _RANDOM:
        raise _NotRowWiseError("it is random, so that a replay gives other rows")
    first, *others = node["input"]
    if name in (
        "Reinterpret",
        "BinaryExpr.Reinterpret",
        "StructExpr.SelectFields",
    ):  # of which polars can tell nothing without the schema
        return _simple(first)
    if name in _HOLIDAYS and _is_literal(others[-1]):
        return _joined([first, *others[:-1]])
    if name in _LOOKED_UP:
        # After the old and the new values of replace_strict comes the default, which may be another column.
        lookups, rest = (others[:2], others[2:]) if name == "ReplaceStrict" else (others, [])
        if not all(map(_is_literal, lookups)):
            raise _NotRowWiseError(
                f"{name.rpartition('.')[2]} looks up values in all rows of a column; give it a list of values, or use "
                'pl.col("list").list.contains(...) where each row has a list of its own'
            )
        return _joined([first, *rest])
    if name == "StringExpr.Strptime" and node["function"]["StringExpr"]["Strptime"][1]["format"] is None:
        raise _NotRowWiseError("without format= the first rows of each batch decide how text is read; give format=")
    return {"Function": {**node, "input": _simple(node["input"]), "function": _finite(node["function"])}}


def _name(function: Node) -> str:
    """`Boolean.IsIn` of `{"Boolean": {"IsIn": {...}}}`: functions are written down below their family, or alone.

    Names of two families may be the same, as those of `replace`, `str.replace` and `dt.replace`; and what stands
    deeper, such as the name of a field, is none.
    """
    names: list[str] = []
    while isinstance(function, dict) and len(function) == 1 and len(names) < 2:
        ((name, function),) = function.items()
        names.append(name)
    if isinstance(function, str) and len(names) < 2:
        names.append(function)
    return ".".join(names if len(names) < 2 or names[0] in _FAMILIES else names[:1])


def _is_literal(node: Node) -> bool:
    return isinstance(node, dict) and "Literal" in node


def _is_one_value(literal: Node) -> bool:
    """Whether a literal is one value; a series has several, and a type is written as a literal, too."""
    return isinstance(literal, dict) and not {"Dyn", "Scalar"}.isdisjoint(literal)


def _finite(function: Node) -> Node:
    """The options of a function with 0 for numbers that JSON lacks: infinity and NaN are null in it."""
    match function:
        case {"Boolean": {"IsClose": given}}:
            tolerances = {name: 0.0 if value is None else value for name, value in given.items()}
            return {"Boolean": {"IsClose": tolerances}}
        case {"Cut": options}:
            breaks = [0.0 if value is None else value for value in options["breaks"]]
            return {"Cut": {**options, "breaks": breaks}}
    return function


def _check_function(node: Node) -> None:
    flags = str(node.get("options", {}).get("flags", ""))
    if not {"ROW_SEPARABLE", "LENGTH_PRESERVING"} <= {flag.strip() for flag in flags.split("|")}:
        raise _NotRowWiseError(
            "it calls a function of yours with all rows of the batch; say is_elementwise=True if it works row by row"
        )


def _check_not_random(node: Node) -> None:
    if any(_name(function) in _RANDOM for function in _functions(node)):
        raise _NotRowWiseError("it is random, so that a replay gives other rows")


def _functions(node: Node) -> Iterator[Node]:
    if isinstance(node, list):
        for part in node:
            yield from _functions(part)
    elif isinstance(node, dict):
        for kind, part in node.items():
            if kind == "Function":
                yield part["function"]
            if kind != "Literal":
                yield from _functions(part)


def _joined(parts: list[Node]) -> Node:
    return {"Function": {"input": _simple(parts), "function": "AsStruct"}}


def _shown(expression: pl.Expr) -> str:
    text = " ".join(str(expression).split())
    return text if len(text) <= 200 else text[:200] + "…"
