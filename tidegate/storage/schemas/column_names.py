"""Names of columns: the namespace of tidegate's own columns, and columns as text for errors.

A column that tidegate adds to state, to combined rows, to rows of timers or to files of tables has a name that begins
with `_tidegate_`. No column of a user may begin so. A user's column therefore never meets one of tidegate's, and there
is no list of reserved words:

- `own_name` names a column that an operator adds, such as the number of a slice.
- `part_name` names a part of what is stored for one column of a user, such as the sum of a mean. It contains a dot,
  which the names of `own_name` do not contain, and dots of the user's name are escaped. Two different pairs therefore
  never get the same name.

`Program` checks the columns of each operator, `check_keys` checks keys, and the steps that aggregate check the names of
aggregates, also where columns are known only when the job runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

RESERVED_PREFIX = "_tidegate_"


def own_name(word: str) -> str:
    """Returns the name of a column that tidegate adds. `word` must not contain a dot."""
    assert "." not in word, f"{word!r} would look like a part of a column"
    return f"{RESERVED_PREFIX}{word}"


VERSION_COLUMN = own_name("version")
"""Hidden int64 column of an upsert table's files: a later row of a key has a higher value."""
DELETED_COLUMN = own_name("deleted")
"""Hidden boolean column of an upsert table that allows deletions: whether the row deletes its key."""


def part_name(column: str, suffix: str) -> str:
    """Returns the name of a part of a user's column, such as `_tidegate_price.sum`. `suffix` begins with a dot.

    Without a suffix the column is its only part, and keeps its name.
    """
    if not suffix:
        return column
    assert suffix[0] == ".", f"the suffix {suffix!r} begins without a dot"
    return f"{RESERVED_PREFIX}{column.replace('%', '%25').replace('.', '%2E')}{suffix}"


def is_reserved(name: str) -> bool:
    """Returns whether a column of this name is one of tidegate's own."""
    return name.startswith(RESERVED_PREFIX)


def check_not_reserved(names: Iterable[str], where: str) -> None:
    """Raises ConfigurationError, which begins with `where`, for a name in tidegate's own namespace.

    Names with a null character are refused as well: Arrow cannot pass them to polars.
    """
    for name in names:
        if "\0" in name:
            raise ConfigurationError(f"{where}: column {name!r} has a null character in its name; rename the column")
        if is_reserved(name):
            raise ConfigurationError(
                f"{where}: column {name!r}: names that begin with {RESERVED_PREFIX!r} are tidegate's own; rename the "
                "column where the rows are made, or drop it"
            )


def columns_text(fields: Iterable[pa.Field]) -> str:
    """Returns the columns of a schema, or some fields, as text for errors: `(user: string, n: int64)`."""
    return "(" + ", ".join(f"{field.name}: {field.type}" for field in fields) + ")"
