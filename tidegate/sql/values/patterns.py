"""LIKE: patterns of SQL as tests of text. The simple ones need no regular expression."""

from __future__ import annotations

import re

import polars as pl
from sqlglot import exp

from tidegate.sql.text.places import refused


def like(node: exp.Expr, text: pl.Expr, pattern: str, escape: str, any_case: bool) -> pl.Expr:
    """Whether a text is like a pattern. ConfigurationError for one that ends in an escape."""
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
    """Texts as they are, None for any text, and an empty text for any character."""
    found: list[str | None] = []
    letters, kept = iter(pattern), ""
    for letter in letters:
        if letter not in (escape, "%", "_"):
            kept += letter
            continue
        if letter == escape:
            following = next(letters, None)
            if following is None:
                raise refused(node, f"the pattern ends in the escape {escape!r}")
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
