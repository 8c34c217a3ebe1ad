"""The contract of row tables: many rows of any Arrow columns for each key, changed a batch at a time.

Joins buffer their inputs in them, and so does what keeps whole rows. Rules:
- A row never changes. It is appended, found by its key or by a scan, and removed. To change one is to remove it and to
  append another.
- A row is stored under its key and a number (`ROW_SEQUENCE`), which only grows. So rows of a key are found in the order
  in which they came, also after a restore, and two rows may be equal.
- Key group, checkpoints, layers and undoing are those of the key, as for any other state.
- A ref stands for a row until `done`, whatever is appended, found or removed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of some keys that were asked for: `refs[i]` is a row of key number `keys[i]`. `keys` ascends."""

    keys: NDArray[np.int64]
    refs: NDArray[Any]


class RowTable(Protocol):
    """Many rows for each key."""

    @property
    def rows(self) -> int:
        """How many rows there are. An estimate if the backend does not count."""
        ...

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Append a row for each row of `keys` (stored key columns), with the value columns of the table."""
        ...

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """All rows of these keys; of each in the order in which they came. A key may be asked for several times."""
        ...

    def take(self, refs: NDArray[Any], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows in the order of `refs`: key and value columns, or those of them that `columns` names."""
        ...

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All rows, in batches with their refs: key or value columns by name. Those of a key in the order they came in.

        Until the last batch is drawn only `take` and `remove` may be called: others may see a row twice.
        """
        ...

    def remove(self, refs: NDArray[Any]) -> None:
        """Remove rows. One that is gone already stays gone."""
        ...

    def done(self) -> None:
        """End the batch: refs are invalid from now on."""
        ...
