"""Formats rows for people: as a grid of text for terminals, and as an HTML table for notebooks.

Long values are cut. HTML in values is escaped, and line breaks in values are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import islice
from typing import Any

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

ROWS_SHOWN = 20
ROWS_IN_NOTEBOOK = 10
VALUE_CHARACTERS = 40
"""The largest number of characters of a value that are shown by default."""
COLUMNS_IN_NOTEBOOK = 50


def check_count(call: str, n: object) -> int:
    """Returns `n`, a number of rows.

    Raises ConfigurationError if it is not a whole number of at least 0. `call` is the name of the method for the error.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ConfigurationError(f"{call}: the number of rows must be a whole number from 0 on, not {n!r}")
    return n


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table as dicts. Converts one part of the table at a time to save memory."""
    for batch in table.to_batches(max_chunksize=1_024):
        yield from batch.to_pylist()


def grid(table: pa.Table, note: str = "", characters_max: int = VALUE_CHARACTERS) -> str:
    """Returns rows as a text grid with column names, numbers aligned to the right, and `note` below it."""
    lines = [list(table.column_names), *_texts(table, characters_max)]
    widths = [max(len(line[column]) for line in lines) for column in range(table.num_columns)]
    right = [_is_number(field.type) for field in table.schema]
    rule = "+" + "".join("-" * (width + 2) + "+" for width in widths)

    def drawn(line: Sequence[str]) -> str:
        cells = zip(line, widths, right, strict=True)
        return "|" + "".join(
            f" {text.rjust(width) if to_right else text.ljust(width)} |" for text, width, to_right in cells
        )

    head, *body = map(drawn, lines)
    return "\n".join([rule, head, rule, *body, *([rule] if body else []), *([note] if note else [])])


def html_rows(table: pa.Table, note: str = "") -> str:
    """Returns the first rows of a table as an HTML table, with column names and types above, and `note` below."""
    schema = pa.schema(list(islice(table.schema, COLUMNS_IN_NOTEBOOK)))
    shown = table.select(range(len(schema))).slice(0, ROWS_IN_NOTEBOOK)
    head = "".join(f"<th>{_bounded(field.name)}<br><small>{_bounded(str(field.type))}</small></th>" for field in schema)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>"
        for line in _texts(shown, VALUE_CHARACTERS)
    )
    if table.num_columns > len(schema):
        note = f"{note}; the first {len(schema)} of {table.num_columns:,} columns".removeprefix("; ")
    below = f"<p><small>{escape(note)}</small></p>" if note else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def html_facts(title: str, facts: Iterable[tuple[str, object]]) -> str:
    """Returns HTML with a title and a table of two columns: names and values."""
    lines = "".join(f"<tr><th>{_bounded(name)}</th><td>{_bounded(str(value), 400)}</td></tr>" for name, value in facts)
    return f"<p><strong>{_bounded(title)}</strong></p><table><tbody>{lines}</tbody></table>"


def html_columns(title: str, schema: pa.Schema | None) -> str:
    """Returns HTML with a title and the names and types of columns.

    `schema` is None if the columns are known only when the job runs.
    """
    if schema is None:
        return f"<p><strong>{_bounded(title)}</strong>: columns known when the job runs</p>"
    left = len(schema) - COLUMNS_IN_NOTEBOOK
    more = [("…", f"{left:,} more columns")] if left > 0 else []
    return html_facts(title, [*((field.name, field.type) for field in islice(schema, COLUMNS_IN_NOTEBOOK)), *more])


def _texts(table: pa.Table, characters_max: int) -> list[list[str]]:
    columns = [[_text(value, characters_max) for value in column.to_pylist()] for column in table.columns]
    return [list(line) for line in zip(*columns, strict=True)] if columns else [[] for _ in range(table.num_rows)]


def _text(value: object, characters_max: int) -> str:
    text = "null" if value is None else value if isinstance(value, str) else str(value)
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:1_000])
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def _bounded(text: str, characters_max: int = 80) -> str:
    return escape(_text(text, characters_max))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
