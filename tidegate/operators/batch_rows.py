"""`BatchRows`: the smallest and the largest number of rows that a user's function gets in one call (option
`batch_rows`).

Rules:

- A call never gets more than `most` rows.
- A task cuts input into smaller batches when they take too long, but never below `least` rows. An input batch with
  fewer rows is passed on as it is: no rows are buffered to fill it.
- Chained operators process the same batches. The largest `least` and the smallest `most` of them apply. If they
  conflict, `least` wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidegate.storage.errors import ConfigurationError

OUTPUT_ROWS_MAX = 65_536
"""Greatest number of rows in a batch that an operator emits from results of functions, or from its state at the end of
the input.
"""


class BatchRows(NamedTuple):
    """The smallest (`least`) and the largest (`most`) number of rows that a function gets in one call."""

    least: int
    most: int


def check_batch_rows(name: str, batch_rows: object) -> BatchRows | None:
    """Returns the `batch_rows=` argument of the step `name` as `BatchRows`, or None if it is None.

    Raises ConfigurationError if it is not a pair of row counts.
    """
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
    """Returns the bounds on the rows of a batch that chained operators process together.

    `rows_max` limits both bounds.
    """
    given = [bound for bound in bounds if bound is not None]
    least = min(rows_max, max((bound.least for bound in given), default=1))
    most = min((bound.most for bound in given), default=rows_max)
    return BatchRows(least, max(least, min(most, rows_max)))
