"""Combined rows: what the rows of one batch come to, for each key (and slice), before they are sent to its owner.

A sender makes them (`local_aggregation/combiner.py`), the aggregate behind the exchange merges them. A batch has either
rows or combined rows, and says which by its columns, so a checkpoint with either in flight is restored under any
setting:

- the key columns and, for windows of event time, the column of time, as in the first of the rows;
- what accumulators hold of the rows: a column `_tidegate_combined.<name>` for each column of the state;
- how many rows they are, `_tidegate_combined`, the last column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.schemas.reserved_names import own_name

COMBINED = own_name("combined")
"""The column that says how many rows a combined row stands for."""
_STATE = f"{COMBINED}."


class _Accumulator(Protocol):
    def update(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None: ...

    def merge(self, slots: NDArray[np.int32], parts: Sequence[pa.Array]) -> None: ...


def is_combined(schema: pa.Schema) -> bool:
    """Whether batches of this schema have combined rows."""
    return len(schema) > 0 and schema.names[-1] == COMBINED


def combined_rows(heads: pa.RecordBatch, state: Mapping[str, pa.Array], counts: pa.Array) -> pa.RecordBatch:
    """A batch of combined rows. `heads`: keys and time; `state`: columns of accumulators; `counts`: the last column."""
    names = [*heads.schema.names, *(_STATE + name for name in state), COMBINED]
    return pa.RecordBatch.from_arrays([*heads.columns, *state.values(), counts], names=names)


def state_of(schema: pa.Schema) -> list[pa.Field]:
    """The columns of accumulators in a schema of combined rows, called as in the state."""
    return [field.with_name(field.name.removeprefix(_STATE)) for field in schema if field.name.startswith(_STATE)]


def take_in(
    accumulator: _Accumulator, fields: Sequence[pa.Field], batch: pa.RecordBatch, slots: NDArray[np.int32]
) -> None:
    """Add a batch to an accumulator that has these columns in the state, whatever kind of rows the batch has."""
    if is_combined(batch.schema):
        accumulator.merge(slots, [batch.column(_STATE + field.name) for field in fields])
    else:
        accumulator.update(batch, slots)


def rows_behind(batch: pa.RecordBatch, chosen: NDArray[np.bool_]) -> int:
    """How many rows some rows of a batch stand for."""
    if not is_combined(batch.schema):
        return int(np.count_nonzero(chosen))
    return int(batch.column(COMBINED).to_numpy()[chosen].sum())
