"""Dead letters: the records of a source that are no rows, with their bytes, their place and the reason.

Rules:

- `bad_rows` of a source decides: "fail" fails the job at the first one, "skip" leaves them out, "side" gives them to
  the stream `bad_rows()`.
- A reader gives dead letters with the rows between which they stand (`ReadResult.bad`). They count when these rows do,
  so each comes once, whatever is restarted.
- They are counted (`numRecordsInErrors`) and logged, at most LOGGED_MAX of a reader in a row and then one in a
  thousand.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import logged_text, unmarked


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Some rows of a file: `rows` of them, of which `bad` are dead letters."""

    batch: pa.RecordBatch | None
    bad: pa.RecordBatch | None
    rows: int


BadRows = Literal["fail", "skip", "side"]
BAD_ROWS = "bad_rows"
"""The side output of a source that has dead letters."""
RECORDS_LOST = "numRecordsLost"
"""The metric of records that were deleted before a source could read them."""
LOGGED_MAX = 20
LOGGED_EVERY = 1_000


def check_bad_rows(bad_rows: object, method: str) -> BadRows:
    """What a user has given for `bad_rows`. Raises ConfigurationError for anything else."""
    known = get_args(BadRows)
    if bad_rows not in known:
        raise ConfigurationError(f"{method}(bad_rows={bad_rows!r}): it is one of {', '.join(map(repr, known))}")
    return bad_rows  # type: ignore[return-value]


class BadRowsLog:
    """Logs the dead letters of one reader, the first ones and then few."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seen = 0

    def add(self, letters: pa.RecordBatch, place: str) -> pa.RecordBatch:
        """Log some, and return them as they leave their reader: without marks of values (`user_values.py`).

        `place` is a format that takes the columns of a letter, such as "line {line} of {file}".
        """
        for number in range(letters.num_rows):
            self._seen += 1
            if self._seen <= LOGGED_MAX or self._seen % LOGGED_EVERY == 0:
                letter = {name: letters.column(name)[number].as_py() for name in letters.schema.names if name != "raw"}
                self._log.warning(
                    "%s is left out (bad row %d of this reader): %s",
                    place.format(**letter),
                    self._seen,
                    logged_text(letter["error"]),
                )
        at = letters.schema.get_field_index("error")
        reasons = [unmarked(text) for text in letters.column(at).to_pylist()]
        return letters.set_column(at, letters.schema.field(at), pa.array(reasons, pa.string()))
