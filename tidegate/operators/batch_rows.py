"""`BatchRows`: the least and the most rows that a user's function gets in one call (the option `batch_rows`).

Rules:

- A call never gets more than `most` rows.
- The time limit of a turn never cuts a batch below `least`. A batch that comes in smaller stays so: no rows are held
  back to fill it.
- Chained operators share a turn. It has the greatest `least` of them, and the smallest `most`, but no less than that
  `least`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidegate.storage.errors import ConfigurationError

OUTPUT_ROWS_MAX = 65_536
"""Limit of rows in a batch that an operator emits, from results of functions or from its state at the end."""


class BatchRows(NamedTuple):
    """The least and the most rows of a call."""

    least: int
    most: int


def check_batch_rows(name: str, batch_rows: object) -> BatchRows | None:
    """Checks the `batch_rows=` of the operator `name`. Raises ConfigurationError if it is not a pair of row counts."""
    if batch_rows is None:
        return None
    rows = tuple(batch_rows) if isinstance(batch_rows, tuple | list) else ()
    if len(rows) != 2 or not all(type(bound) is int for bound in rows):
        raise ConfigurationError(
            f"{name}: batch_rows={batch_rows!r} is not a pair of row counts; give the least and the most rows of a "
            "call, as in batch_rows=(100, 5_000)"
        )
    least, most = rows
    if not 1 <= least <= most:
        raise ConfigurationError(
            f"{name}: batch_rows=({least}, {most}): the least rows of a call must be 1 or more, and the most no fewer "
            "than the least"
        )
    return BatchRows(least, most)


def rows_of_a_turn(bounds: Iterable[BatchRows | None], rows_max: int) -> BatchRows:
    """Returns the bounds on the rows of a turn that chained operators share, limited to `rows_max` rows."""
    given = [bound for bound in bounds if bound is not None]
    least = min(rows_max, max((bound.least for bound in given), default=1))
    most = min((bound.most for bound in given), default=rows_max)
    return BatchRows(least, max(least, min(most, rows_max)))
