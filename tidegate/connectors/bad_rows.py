"""Dead letters: records of a source that cannot be parsed, with their bytes, position and the reason.

Rules:

- The option `bad_rows` of a source decides: "fail" fails the job at the first dead letter, "skip" drops them, "side"
  sends them to the stream `bad_rows()`.
- A reader returns dead letters together with the rows around them (`ReadResult.bad`), and its position covers both, so
  each is emitted once, also after restarts.
- Dead letters are counted (`numRecordsInErrors`) and logged: the first LOGGED_MAX of a reader, then one in a thousand.
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
    """The result of reading `rows` records of a file: a batch of good rows and a batch of dead letters (None if
    empty).
    """

    batch: pa.RecordBatch | None
    bad: pa.RecordBatch | None
    rows: int


BadRows = Literal["fail", "skip", "side"]
BAD_ROWS = "bad_rows"
"""Name of the side output with the dead letters of a source."""
RECORDS_LOST = "numRecordsLost"
"""Name of the metric that counts records which were deleted before the source could read them."""
LOGGED_MAX = 20
LOGGED_EVERY = 1_000


def check_bad_rows(bad_rows: object, method: str) -> BadRows:
    """Checks the value of a user's `bad_rows` option and returns it. Raises ConfigurationError for an unknown value."""
    known = get_args(BadRows)
    if bad_rows not in known:
        raise ConfigurationError(f"{method}(bad_rows={bad_rows!r}): give one of {', '.join(map(repr, known))}")
    return bad_rows  # type: ignore[return-value]


class BadRowsLog:
    """Logs the dead letters of one reader: each of the first 20, then one in a thousand."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seen = 0

    def add(self, letters: pa.RecordBatch, place: str) -> pa.RecordBatch:
        """Logs some of the dead letters, and returns all of them, with the marks of user values removed from the
        reasons.

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
