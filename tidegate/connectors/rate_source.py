"""`RateSource`: generates numbered rows with timestamps at a given rate, for demos and benchmarks (Spark's rate
source).

Rules:

- Row `i` has value `i`, and the timestamp at which it is due. Replay is exact, because rows depend on their number
  only.
- The first timestamp is the time of the submission. The payload of each split contains it, so a restored job keeps it.
- A row is never returned before it is due. Overdue rows, after a restore or a pause, are returned as fast as they are
  read.
- Rows become due in steps of TICK_MS, so that a high rate produces large batches instead of many small ones. At a low
  rate all rows of a step are in one split, and the rows of the next step in the next split, because the cost of a batch
  hardly depends on its number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError

TICK_MS = 20
ROWS_A_BATCH = 16
"""Minimum number of rows of a split in one step; with fewer, all rows of a step are in one split."""
_MS = 1_000


@dataclass(frozen=True, slots=True)
class RateSource:
    """A source of `rows` rows (None: endless) at `rows_per_second` (None: no limit, dated 1 ms apart).

    Rows are distributed over the splits round-robin in blocks of `block` rows; the first block has one row. `clock`
    returns the time in milliseconds since 1970.
    """

    rows_per_second: float | None
    rows: int | None
    split_count: int
    clock: Callable[[], int] = field(default=now_ms, compare=False)
    unbounded: Literal[True] = True

    def __post_init__(self) -> None:
        wrong = None
        rate = self.rows_per_second
        counts = [self.split_count, *(() if self.rows is None else (self.rows,))]
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < float("inf")):
            wrong = f"rows_per_second={rate!r}: give a positive number, or None for no limit"
        elif not all(isinstance(count, int) for count in counts):
            wrong = f"rows={self.rows!r}, splits={self.split_count!r}: give whole numbers"
        elif self.rows is not None and self.rows < 0:
            wrong = f"rows={self.rows}: give the number of rows, or None for rows without end"
        elif self.split_count < 1:
            wrong = f"splits={self.split_count}: must be at least 1"
        if wrong is not None:
            raise ConfigurationError(f"from_rate: {wrong}")

    @property
    def ends(self) -> bool:
        """Returns True if the source has a last row."""
        return self.rows is not None

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of Spark's rate source: the time at which the row was due, and its number."""
        return pa.schema([("timestamp", pa.timestamp("ms", "UTC")), ("value", pa.int64())])

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the splits. Each has every `split_count`-th block of rows.

        The payload is the timestamp of row 0, and the rate.
        """
        payload = f"{self.clock()} {self._rate}".encode()
        return [
            SourceSplit(
                f"rows {number} of {self.split_count}", payload, -1 if self.rows is None else self.length(number)
            )
            for number in range(self.split_count)
        ]

    def length(self, number: int) -> int:
        """Returns the number of rows in split `number` of a bounded source."""
        assert self.rows is not None
        return _share(self.rows, number, self.split_count, self.block)

    @property
    def block(self) -> int:
        """Returns the number of consecutive rows in one split: 1, or the rows of one step at a low rate."""
        a_step = 0 if self.rows_per_second is None else math.ceil(self.rows_per_second * TICK_MS / _MS)
        return a_step if 1 <= a_step < ROWS_A_BATCH * self.split_count else 1

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if the rate, the number of rows or the number of splits has changed.

        Timestamps of rows, and the split of a row, depend on these.
        """
        now = {split.split_id: split.rows for split in self.splits()}
        rates = {split.payload.split()[1].decode() for split in splits}
        changed = [split.split_id for split in splits if now.get(split.split_id) != split.rows]
        if changed or rates - {self._rate}:
            raise ConfigurationError(
                f"from_rate: {changed[0] if changed else 'rows_per_second'!r} has changed; give the rows_per_second, "
                "rows and splits of the checkpoint, or start without restore"
            )

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _RateReader(self.rows_per_second, self.split_count, self.block, self.schema, self.clock)

    @property
    def _rate(self) -> str:
        return "unlimited" if self.rows_per_second is None else f"{float(self.rows_per_second)}"


@dataclass(frozen=True, slots=True)
class _RateReader:
    rows_per_second: float | None
    splits: int
    block: int
    schema: pa.Schema
    clock: Callable[[], int]

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the rows of a split that are due, from row `offset` of the split."""
        number = int(split.split_id.split()[1])
        first_ms = int(split.payload.split()[0])
        stop = offset + rows_max
        if self.rows_per_second is not None:
            now_ms = self.clock()
            at_ms = now_ms - (now_ms - first_ms) % TICK_MS
            due = int((at_ms - first_ms) * self.rows_per_second / _MS) + 1 if at_ms >= first_ms else 0
            stop = min(stop, _share(due, number, self.splits, self.block))
        if split.rows >= 0:
            stop = min(stop, split.rows)
        at_end = 0 <= split.rows <= max(stop, offset)
        if stop <= offset:
            return ReadResult(None, offset, at_end)
        shift = self.block - 1
        blocks, within = np.divmod(np.arange(offset, stop, dtype=np.int64) + (0 if number else shift), self.block)
        values = (blocks * self.splits + number) * self.block + within - shift
        apart_ms = 1.0 if self.rows_per_second is None else _MS / self.rows_per_second
        times = first_ms + np.floor(values * apart_ms).astype(np.int64)
        columns = [pa.array(times).cast(self.schema.field(0).type), pa.array(values)]
        return ReadResult(pa.RecordBatch.from_arrays(columns, schema=self.schema), stop, at_end)

    def close(self) -> None:
        """Does nothing: the reader holds no resources."""


def _share(rows: int, number: int, splits: int, block: int) -> int:
    """Returns the number of rows in split `number` among the first `rows` rows.

    The first block has one row, which is due at once. The rows of each later step are then one block.
    """
    if not rows:
        return 0
    blocks, rest = divmod(rows + block - 1, block)
    whole = max(0, (blocks - number + splits - 1) // splits)
    return whole * block + (rest if blocks % splits == number else 0) - (0 if number else block - 1)
