"""Names of columns: the reserved namespace of tidegate's columns, and columns as text for errors.

The name of a column that tidegate adds to state, to combined rows, to rows of timers or to files of tables begins with
`_tidegate_`. Names of user columns must not begin with it. User columns therefore never collide with tidegate's, and
there is no list of reserved words:

- `own_name` names a column that an operator adds, such as the number of a slice.
- `part_name` names one of several stored columns for a user's column, such as the sum of a mean. The name contains a
  dot, which the names of `own_name` do not contain, and dots of the user's name are escaped. Two different pairs of
  column and suffix therefore never get the same name.

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
"""Hidden boolean column of an upsert table that allows deletions: True in a row that deletes its key."""


def part_name(column: str, suffix: str) -> str:
    """Returns the name of one stored part of a user's column, such as `_tidegate_price.sum`.

    `suffix` begins with a dot. If it is empty, returns the name of the column.
    """
    if not suffix:
        return column
    assert suffix[0] == ".", f"the suffix {suffix!r} begins without a dot"
    return f"{RESERVED_PREFIX}{column.replace('%', '%25').replace('.', '%2E')}{suffix}"


def is_reserved(name: str) -> bool:
    """Returns whether a column name is in the namespace that is reserved for tidegate."""
    return name.startswith(RESERVED_PREFIX)


def check_not_reserved(names: Iterable[str], where: str) -> None:
    """Raises ConfigurationError, which begins with `where`, for a column name that is reserved for tidegate.

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
    """Returns fields as text for errors: `(user: string, n: int64)`."""
    return "(" + ", ".join(f"{field.name}: {field.type}" for field in fields) + ")"
