"""Operators around polars expressions: vectorised, picklable, and without copying the input.

Rules:

- An expression must work row by row. `check_row_wise` refuses expressions that depend on other rows (`sum`, `shift`,
  `over`), because batches are cut differently on every run, also when rows are replayed after a failure. Polars reports
  for each function whether it is row separable and whether it keeps the number of rows. An expression is row-wise if
  all its parts are. Nothing is evaluated, because functions of users inside it must not receive made-up rows.
  Expressions that polars cannot judge are refused.
- Columns that no expression computes pass unchanged, and polars receives only the columns that an expression reads
  (`projection.py`).
- `expression_text` writes an expression as canonical text, which checkpoints store with the meaning of state. The text
  is made from the tree that polars serialises, because the display form differs between polars versions. Two
  expressions with the same text compute the same values. Functions of users cannot be compared, and are written as
  `python(...)` with their input columns. The output name is not part of the text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from tidegate.connectors.pushed_filters import Rows, rows_kept, rows_renamed
from tidegate.operators.functions.projection import Projection, columns_read, computed, frame_of
from tidegate.operators.operator import Columns, Emit, Operator, together
from tidegate.operators.operator_errors import blame
from tidegate.storage.errors import ConfigurationError


class FilterExpr(Operator):
    """Keeps the rows for which a boolean expression is true; false and null are dropped."""

    def __init__(self, expression: pl.Expr) -> None:
        if not isinstance(expression, pl.Expr):
            raise ConfigurationError(f"filter needs a polars expression or a function, not {type(expression).__name__}")
        check_row_wise(expression, "filter")
        self._expression = expression
        self._reads = columns_read((expression,))

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that this filter and the later steps (`after`) read."""
        return together(after, columns_read((self._expression,)))

    def needed_rows(self, after: Rows) -> Rows:
        """Returns the filter that a source may apply: the condition of this step combined with the filter of later
        steps (`after`), as far as sources support it.
        """
        return rows_kept(self._expression, after)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows for which the condition is true. Raises OperatorError if the expression cannot be evaluated or
        is not boolean.
        """
        with blame(self.context, batch):
            mask = _one_column(computed(frame_of(batch, self._reads), (self._expression,)))
            if mask.dtype != pl.Boolean:
                raise TypeError(
                    f"the condition {self._expression} is {mask.dtype}, and not boolean; compare it with a value, "
                    'as in pl.col("n") > 0'
                )
            kept = batch if mask.all(ignore_nulls=False) else batch.filter(mask.rechunk().to_arrow())
        if kept.num_rows:
            emit(kept)


class WithColumns(Operator):
    """Adds columns, or replaces columns of the same name. The other columns pass unchanged."""

    def __init__(self, *expressions: pl.Expr) -> None:
        self._expressions = _checked(expressions, "with_columns")
        self._projection = Projection(self._expressions)

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that are needed: the columns that later steps (`after`) read, without the computed
        ones, plus the columns that the expressions read.

        None for all columns.
        """
        names = [expression.meta.output_name(raise_if_undetermined=False) for expression in self._expressions]
        if after is None or None in names:
            return None
        return together(after - {name for name in names if name is not None}, columns_read(self._expressions))

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the batch with the computed columns. Raises OperatorError if an expression cannot be evaluated."""
        with blame(self.context, batch):
            added = self._projection.of(batch)
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns.update(zip(added.schema.names, added.columns, strict=True))
            result = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        emit(result)


class Select(Operator):
    """Replaces the columns by the results of the expressions (or names)."""

    def __init__(self, *expressions: pl.Expr | str) -> None:
        columns = tuple(pl.col(item) if isinstance(item, str) else item for item in expressions)
        self._expressions = _checked(columns, "select")
        self._projection = Projection(self._expressions)

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the columns that the expressions read.

        All expressions are computed, even if later steps ignore some results.
        """
        return columns_read(self._expressions)

    def needed_rows(self, after: Rows) -> Rows:
        """Returns the filter of later steps (`after`) in terms of the input columns.

        None if an expression computes a value instead of copying a column.
        """
        columns: dict[str, str] = {}
        for expression in self._expressions:
            name = expression.meta.output_name(raise_if_undetermined=False)
            bare = expression.meta.undo_aliases()
            if name is None or not bare.meta.is_column():
                return None
            columns[name] = bare.meta.output_name()
        return rows_renamed(columns, after)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the selected columns. Raises OperatorError if an expression cannot be evaluated."""
        with blame(self.context, batch):
            result = self._projection.of(batch)
        emit(result)


def _checked(expressions: tuple[pl.Expr, ...], method: str) -> tuple[pl.Expr, ...]:
    if not expressions:
        raise ConfigurationError(f"{method} needs at least one expression; give one")
    for expression in expressions:
        if not isinstance(expression, pl.Expr):
            raise ConfigurationError(
                f"{method} needs polars expressions (pl.col(...)), not {type(expression).__name__}"
            )
        check_row_wise(expression, method)
    return expressions


def _one_column(frame: pl.DataFrame) -> pl.Series:
    if frame.width != 1:
        raise TypeError(
            f"filter needs one boolean column; the expression gives {frame.columns}; give an expression with one result"
        )
    return frame.to_series()


Node: TypeAlias = Any


def expression_text(expression: pl.Expr) -> str:
    """Returns the canonical text of an expression. If polars cannot serialise the expression, the text is `python(...)`
    with the columns that it reads.
    """
    try:
        node = json.loads(expression.meta.serialize(format="json"))
    except (pl.exceptions.PolarsError, ValueError):
        return f"python({', '.join(map(column_text, sorted(expression.meta.root_names())))})"
    while isinstance(node, dict) and list(node) == ["Alias"]:
        node = node["Alias"][0]
    return _text(node)


def column_text(name: str) -> str:
    """Returns the canonical text of a column name.

    A name that is not an identifier is quoted, because it could look like a call.
    """
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
    """Returns the name of a serialised function, such as `Boolean.IsNull` for `{"Boolean": "IsNull"}`, followed by its
    options in braces.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, dict) and len(function) == 1:
        ((name, inner),) = function.items()
        return f"{name}.{_flat(inner)}" if isinstance(inner, str | dict) else f"{name}{_text(inner)}"
    return _text(function)


def _literal(node: Node, inner: Node) -> str:
    """Returns the canonical text of a serialised literal. Different serialisations of equal values give the same
    text.
    """
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


"""A part of an expression as polars serialises it: a string, or a dict with one entry, whose key is the kind of the
part.
"""

_COLUMN: Node = {"Column": "column"}
_ANY_VALUE: Node = {"Literal": {"Dyn": {"Int": 0}}}
_SAFE_DEPTH = 30
"""Depth of nested operands up to which polars can read an expression back.

Its reader stops at 128 levels of JSON, and an operand takes 2 to 4 levels.
"""
_RANDOM = frozenset({"Random", "ListExpr.Sample", "ArrayExpr.Sample"})
_LOOKED_UP = frozenset({"Boolean.IsIn", "Replace", "ReplaceStrict"}) | {
    f"StringExpr.{name}" for name in ("ContainsAny", "ReplaceMany", "ExtractMany", "FindMany")
}
"""Functions that polars reports as row separable, although a row's result depends on all values of their second and
later inputs.
"""
_HOLIDAYS = frozenset({f"Business.{name}" for name in ("AddBusinessDay", "BusinessDayCount", "IsBusinessDay")})
"""Functions with a list as their last input, which polars reports as a column."""
_FAMILIES = frozenset({"Boolean", "Business", "StringExpr", "ListExpr", "ArrayExpr", "StructExpr", "BinaryExpr"})
"""Families of functions that have members in `_LOOKED_UP` or `_HOLIDAYS`."""
_ADVICE = (
    "an expression must work row by row, because batches are cut differently on every run. Use "
    "key_by(...).aggregate(...) for sums and counts, key_by(...).process(...) to remember rows, flat_map to make "
    "several rows of one, and map_batches(lambda batch: ...) if it is meant for each batch by itself"
)


class _NotRowWiseError(Exception):
    """Raised with the reason why an expression is not row-wise."""


def check_row_wise(expression: pl.Expr, method: str) -> None:
    """Raises ConfigurationError for an expression that depends on other rows, changes the number of rows, or is
    random.
    """
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
            f"{method}({_shown(expression)}): polars cannot determine whether this works row by row ({error}); "
            f"{_ADVICE}"
        ) from error


def _is_deep(expression: pl.Expr) -> bool:
    """Returns whether an expression is nested so deeply that polars may be unable to read it back."""
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
    """Returns a serialised expression in which a plain column replaces each part that polars can check only with a
    schema.
    """
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
                    raise _NotRowWiseError("cumulative_eval looks at the rows before each row")
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
        raise _NotRowWiseError(f"{name.rpartition('.')[2]} is random, so that a replay gives other rows")
    first, *others = node["input"]
    if name in (
        "Reinterpret",
        "BinaryExpr.Reinterpret",
        "StructExpr.SelectFields",
    ):  # polars cannot judge these without the schema
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
        raise _NotRowWiseError("str.strptime without format= parses text by the first rows of each batch; pass format=")
    return {"Function": {**node, "input": _simple(node["input"]), "function": _finite(node["function"])}}


def _name(function: Node) -> str:
    """Returns the name of a serialised function with its family: `Boolean.IsIn` for `{"Boolean": {"IsIn": {...}}}`.

    Functions of two families may have the same name, such as `replace`, `str.replace` and `dt.replace`. Deeper names,
    such as the name of a field, are not functions and are ignored.
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
    """Returns whether a serialised literal is a single value. Polars also writes a series and a type as a literal."""
    return isinstance(literal, dict) and not {"Dyn", "Scalar"}.isdisjoint(literal)


def _finite(function: Node) -> Node:
    """Returns a serialised function whose options have 0 in place of infinity and NaN, which JSON cannot represent and
    polars writes as null.
    """
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
            "the expression calls a function of yours with all rows of the batch; pass is_elementwise=True if it "
            "works row by row"
        )


def _check_not_random(node: Node) -> None:
    if any(_name(function) in _RANDOM for function in _functions(node)):
        raise _NotRowWiseError("the expression in eval is random, so that a replay gives other rows")


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
