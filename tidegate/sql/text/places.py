"""Where something stands in a query, and the errors that say it.

sqlglot knows the places of names, calls and stars. Anything else stands where the first of these in it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlglot import exp

from tidegate.storage.errors import ConfigurationError

_SHOWN = 80


def place(node: exp.Expr) -> str:
    """`line 1, column 8`; empty where nothing tells."""
    metas = [each.meta for each in node.find_all(exp.Expr) if "line" in each.meta]
    if not metas:
        return place(node.parent) if node.parent is not None else ""
    first = min(metas, key=lambda meta: int(meta["start"]))
    column = int(first["col"]) - (int(first["end"]) - int(first["start"]))
    return f"line {first['line']}, column {max(1, column)}"


def shown(node: exp.Expr) -> str:
    """The part of the query, in one line and not too long."""
    spark = None if isinstance(node, exp.Unnest | exp.Join) else "spark"  # which writes UNNEST as EXPLODE
    text = node.sql(dialect=spark)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def refused(node: exp.Expr, why: str) -> ConfigurationError:
    """The error for a part of a query: where it is, what it is, and `why`, with what to write instead."""
    return ConfigurationError(f"SQL, {place(node) or 'here'}: {shown(node)}: {why}")


def check_only(node: exp.Expr, *words: str) -> None:
    """Raise ConfigurationError for a clause of a node that is not among these: nothing is passed over in silence."""
    for word, found in node.args.items():
        if found and word not in words:
            parts = [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, exp.Expr)]
            name = word.rstrip("_").replace("_", " ").upper()
            raise refused(parts[0] if parts else node, f"{name} is not covered here; docs/sql.md says what is")


@contextmanager
def standing_at(node: exp.Expr) -> Iterator[None]:
    """Errors of steps that are made of this part of a query say where it stands."""
    try:
        yield
    except ConfigurationError as error:
        if str(error).startswith("SQL"):
            raise
        raise ConfigurationError(f"SQL, {place(node) or 'here'}: {error}") from error
