"""What a program's filters say about the rows of a source, so that a source need not read those that they drop.

Rules:

- The filter stays where it is in the program. A source leaves out only rows that it knows the filter would drop. So it
  may take such a row for one that counts, but never the other way round.
- Constants are kept as polars writes them down. Nothing is concluded from them here: polars compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

ALTERNATIVES_MAX = 16
"""Of a stream with more readers than this, all rows count."""


@dataclass(frozen=True, slots=True)
class ColumnTest:
    """`column test constant`, where the constant is as polars writes it down; empty for tests of null."""

    column: str
    test: str
    constant: bytes = b""


Rows: TypeAlias = tuple[tuple[ColumnTest, ...], ...] | None
"""Rows that count: those for which all tests of one of these groups hold. None: all rows."""


def either(first: Rows, second: Rows) -> Rows:
    """The rows that count for one reader of a stream or the other."""
    if first is None or second is None or len(first) + len(second) > ALTERNATIVES_MAX:
        return None
    return first + tuple(tests for tests in second if tests not in first)


def rows_renamed(columns: dict[str, str], after: Rows) -> Rows:
    """The rows that count before a step which only copies columns: name in its output to name in its input."""
    if after is None or any(test.column not in columns for tests in after for test in tests):
        return None
    return tuple(tuple(replace(test, column=columns[test.column]) for test in tests) for tests in after)
