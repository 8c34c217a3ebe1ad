"""Settings of a database sink: mode, keys, and the handling of rows whose key exists already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tidegate.storage.errors import ConfigurationError

WriteMode = Literal["append", "upsert"]
OnConflict = Literal["error", "ignore", "update"]

TOKEN_TABLE = "tidegate_commits"
"""Default name of the table of commit tokens."""


@dataclass(frozen=True, slots=True)
class TableWrite:
    """The settings with which a sink writes to a database table.

    - `table`: its name, `table` or `schema.table`. `schema` is None for the default schema of the connection.
    - `deletes`: rows have the column `row_kind`, and a retracted row deletes its key.
    - `token_table`: the table of commit tokens, in the schema `token_schema`.
    """

    table: str
    schema: str | None
    mode: WriteMode
    keys: tuple[str, ...]
    on_conflict: OnConflict
    deletes: bool
    token_table: str
    token_schema: str | None

    @property
    def place(self) -> str:
        """Returns schema and name of the table as users write them, for errors."""
        return self.table if self.schema is None else f"{self.schema}.{self.table}"

    @property
    def token_place(self) -> str:
        """Returns schema and name of the table of tokens as users write them, for errors."""
        return self.token_table if self.token_schema is None else f"{self.token_schema}.{self.token_table}"


def table_write(
    where: str,
    table: str,
    mode: str,
    keys: Sequence[str],
    on_conflict: str | None,
    token_table: str,
    *,
    deletes: bool = False,
) -> TableWrite:
    """Checks the settings of a sink, and returns them. `where` names the step in errors. Raises ConfigurationError."""
    if mode not in get_args(WriteMode):
        raise ConfigurationError(f'{where}: mode must be "append" or "upsert", not {mode!r}')
    if mode == "append" and keys:
        raise ConfigurationError(f'{where}: keys={list(keys)} are for mode="upsert"; mode="append" inserts every row')
    if mode == "upsert" and not keys:
        raise ConfigurationError(
            f'{where}: mode="upsert" needs keys=[...], the columns of the primary key or of a unique index of the table'
        )
    allowed: tuple[OnConflict, ...] = ("error", "ignore") if mode == "append" else ("update", "ignore")
    chosen = allowed[0] if on_conflict is None else on_conflict
    if chosen not in allowed:
        raise ConfigurationError(
            f"{where}: on_conflict must be {' or '.join(map(repr, allowed))} with mode={mode!r}, not {on_conflict!r}"
        )
    if deletes and (mode == "append" or chosen == "ignore"):
        raise ConfigurationError(
            f'{where}: its rows are changes, and a retracted row deletes its key. Use mode="upsert" with keys=[...], '
            "and remove on_conflict="
        )
    schema, name = table_name(where, table)
    token_schema, token_name = table_name(f"{where}: token_table", token_table)
    return TableWrite(
        name,
        schema,
        "append" if mode == "append" else "upsert",
        tuple(keys),
        "error" if chosen == "error" else "ignore" if chosen == "ignore" else "update",
        deletes,
        token_name,
        schema if token_schema is None else token_schema,
    )


def table_name(where: str, table: object) -> tuple[str | None, str]:
    """Parses `table` or `schema.table`. Returns the schema (None if not given) and the name.

    A name with a dot is written in double quotes: `"my.table"`, `sales."my.table"`. Raises ConfigurationError.
    """
    if not isinstance(table, str) or not table or "\0" in table:
        raise ConfigurationError(f"{where}: table={table!r}; give the name of a table, or schema.table")
    parts, rest = [], table
    while True:
        part, rest, more = _first_part(rest)
        if not part:
            raise ConfigurationError(
                f"{where}: table={table!r} has an empty or unclosed name; give table or schema.table"
            )
        parts.append(part)
        if not more:
            break
    if len(parts) > 2:
        raise ConfigurationError(
            f'{where}: table={table!r} has more than a schema and a name; write a name with a dot as "my.table", in '
            "double quotes"
        )
    return (None, parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def _first_part(text: str) -> tuple[str, str, bool]:
    """Splits a dotted name. Returns its first part, the text after the dot, and whether there is a dot."""
    if not text.startswith('"'):
        name, dot, rest = text.partition(".")
        return ("" if '"' in name else name), rest, bool(dot)
    end = 1
    while (end := text.find('"', end)) >= 0 and text[end : end + 2] == '""':
        end += 2
    if end < 0 or text[end + 1 : end + 2] not in ("", "."):
        return "", "", False
    return text[1:end].replace('""', '"'), text[end + 2 :], end + 1 < len(text)
