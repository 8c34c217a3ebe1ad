"""The namespace of tidegate's own columns: names that begin with `_tidegate_`, which no column of a user may have.

Every column that tidegate adds to state, to combined rows, to rows of timers and to files of tables has such a name, so
a user's column never meets one. There is no list of reserved words:

- `own_name` names a column that an operator adds, such as the number of a slice.
- `part_name` names a part of what is stored for one column of a user, such as the sum of a mean. It has a dot, which
  the names of `own_name` do not have, and dots of the user's name are escaped. So no two pairs have the same name.

`Program` checks the columns of each operator, `check_keys` the keys, and the steps that aggregate check the names of
aggregates, also where columns are known only when the job runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.storage.errors import ConfigurationError

RESERVED_PREFIX = "_tidegate_"


def own_name(word: str) -> str:
    """The name of a column that tidegate adds. `word` has no dot."""
    assert "." not in word, f"{word!r} would look like a part of a column"
    return f"{RESERVED_PREFIX}{word}"


def part_name(column: str, suffix: str) -> str:
    """The name of a part of a user's column; `suffix` begins with a dot: `_tidegate_price.sum`.

    Without a suffix the column is its only part, and keeps its name.
    """
    if not suffix:
        return column
    assert suffix[0] == ".", f"the suffix {suffix!r} begins without a dot"
    return f"{RESERVED_PREFIX}{column.replace('%', '%25').replace('.', '%2E')}{suffix}"


def is_reserved(name: str) -> bool:
    """Whether a column of this name is one of tidegate's own."""
    return name.startswith(RESERVED_PREFIX)


def check_not_reserved(names: Iterable[str], where: str) -> None:
    """Raise ConfigurationError, which begins with `where`, for a name that begins as tidegate's own columns do.

    Names with a null character are refused as well: Arrow cannot pass them to polars.
    """
    for name in names:
        if "\0" in name:
            raise ConfigurationError(f"{where}: column {name!r}: a name has no null character; rename the column")
        if is_reserved(name):
            raise ConfigurationError(
                f"{where}: column {name!r}: names that begin with {RESERVED_PREFIX!r} are tidegate's own; rename the "
                "column where the rows are made, or leave it out"
            )
