"""Dead letters: records of a source that cannot be read, with their bytes, place and reason.

Rules:

- `bad_rows` of a source decides: "fail" fails the job at the first one, "skip" drops them, "side" sends them to
  the stream `bad_rows()`.
- A reader returns dead letters with the rows around them (`ReadResult.bad`). They count together with these rows, so
  each is emitted once, also after restarts.
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
    """Checks a user's `bad_rows`. Raises ConfigurationError for an unknown value."""
    known = get_args(BadRows)
    if bad_rows not in known:
        raise ConfigurationError(f"{method}(bad_rows={bad_rows!r}): give one of {', '.join(map(repr, known))}")
    return bad_rows  # type: ignore[return-value]


class BadRowsLog:
    """Logs the dead letters of one reader, the first ones and then few."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seen = 0

    def add(self, letters: pa.RecordBatch, place: str) -> pa.RecordBatch:
        """Logs some of them, and returns all as they leave their reader: without marks of values (`user_values.py`).

        `place` is a format string with the columns of a letter, such as "line {line} of {file}".
        """
        for number in range(letters.num_rows):
            self._seen += 1
            if self._seen <= LOGGED_MAX or self._seen % LOGGED_EVERY == 0:
                letter = {name: letters.column(name)[number].as_py() for name in letters.schema.names if name != "raw"}
                self._log.warning(
                    "%s is skipped (bad row %d of this reader): %s",
                    place.format(**letter),
                    self._seen,
                    logged_text(letter["error"]),
                )
        at = letters.schema.get_field_index("error")
        reasons = [unmarked(text) for text in letters.column(at).to_pylist()]
        return letters.set_column(at, letters.schema.field(at), pa.array(reasons, pa.string()))
