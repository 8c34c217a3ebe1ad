"""Names that no column of a user may have, because columns of tidegate's own are called so.

One rule for all of them: those in files of tables, those of combined rows, and those that are to come. `Program` asks
for the columns of each operator, `check_keys` for keys, where columns are known only when the job runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.storage.errors import ConfigurationError

RESERVED_PREFIX = "_tidegate_"


def check_not_reserved(names: Iterable[str], where: str) -> None:
    """Raise ConfigurationError, which begins with `where`, for a name that begins as tidegate's own columns do."""
    for name in names:
        if name.startswith(RESERVED_PREFIX):
            raise ConfigurationError(
                f"{where}: column {name!r}: names that begin with {RESERVED_PREFIX!r} are tidegate's own; rename the "
                "column where the rows are made, or leave it out"
            )
