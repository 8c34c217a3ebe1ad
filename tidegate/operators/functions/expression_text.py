"""Writes a polars expression as canonical text, by its structure: what checkpoints say of the meaning of state.

The text is made of the tree that polars serialises, and not of how polars displays an expression, which differs between
versions. Two expressions with one text compute the same. A function of the user in an expression has no comparable
meaning, and is written as `python(...)` with its inputs. The name that an expression gives its result has no part in
it.
"""

from __future__ import annotations

import io
import json
from typing import Any, TypeAlias

import polars as pl

Node: TypeAlias = Any


def expression_text(expression: pl.Expr) -> str:
    """The canonical text of an expression. For one that polars cannot serialise: the columns that it reads."""
    try:
        node = json.loads(expression.meta.serialize(format="json"))
    except (pl.exceptions.PolarsError, ValueError):
        return f"python({', '.join(map(column_text, sorted(expression.meta.root_names())))})"
    while isinstance(node, dict) and list(node) == ["Alias"]:
        node = node["Alias"][0]
    return _text(node)


def column_text(name: str) -> str:
    """The canonical text of a column. A name that is no identifier is quoted, so that no name looks like a call."""
    return name if name.isidentifier() else f"col({json.dumps(name)})"


def _text(node: Node) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(_text, node))}]"
    if not isinstance(node, dict):
        return json.dumps(node)
    if len(node) == 1:
        ((kind, inner),) = node.items()
        match kind:
            case "Column":
                return column_text(str(inner))
            case "Literal":
                return _literal(node, inner)
            case "BinaryExpr" if isinstance(inner, dict) and {"left", "op", "right"} <= inner.keys():
                return f"({_text(inner['left'])} {_flat(inner['op'])} {_text(inner['right'])})"
            case "Ternary" if isinstance(inner, dict) and {"predicate", "truthy", "falsy"} <= inner.keys():
                when, then, otherwise = (_text(inner[part]) for part in ("predicate", "truthy", "falsy"))
                return f"when({when}).then({then}).otherwise({otherwise})"
            case "AnonymousFunction":
                return f"python({_inputs(inner)})"
            case "Function" if isinstance(inner, dict) and {"input", "function"} <= inner.keys():
                return f"{_flat(inner['function'])}({_inputs(inner)})"
            case "Alias":
                return f"{_text(inner[0])} as {json.dumps(inner[1])}"
        return f"{kind}({_text(inner)})"
    return "{" + ", ".join(f"{name}: {_text(part)}" for name, part in sorted(node.items()) if name != "fmt_str") + "}"


def _inputs(node: Node) -> str:
    return ", ".join(map(_text, node.get("input", [])))


def _flat(function: Node) -> str:
    """`Boolean.IsNull` of `{"Boolean": "IsNull"}`, with the options of a function in braces behind it."""
    if isinstance(function, str):
        return function
    if isinstance(function, dict) and len(function) == 1:
        ((name, inner),) = function.items()
        return f"{name}.{_flat(inner)}" if isinstance(inner, str | dict) else f"{name}{_text(inner)}"
    return _text(function)


def _literal(node: Node, inner: Node) -> str:
    """A value. Values of one kind are written alike, whatever polars serialises for them."""
    if isinstance(inner, dict) and list(inner) == ["Dyn"]:
        ((_, value),) = inner["Dyn"].items()
        return json.dumps(value)
    try:
        made = pl.select(pl.Expr.deserialize(io.StringIO(json.dumps(node)), format="json").alias("")).to_series()
    except (pl.exceptions.PolarsError, ValueError):
        return f"lit({json.dumps(inner, sort_keys=True)})"
    if made.dtype == pl.String and len(made) == 1:
        return json.dumps(made.item())
    return "null" if made.dtype == pl.Null else f"lit({made.dtype!r}, {made.to_list()!r})"
