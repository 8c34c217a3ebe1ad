"""Late rows: how far event time has advanced in each key group, and how rows behind it are dropped.

A row is late if the operator's watermark, which is the watermark of its slowest channel, has passed its time. Windows,
joins and rankings of event time count late rows, and most emit them to a side output (`set_aside`). Windows of
aggregates decide for themselves which rows are late (`tidegate/operators/windows/`).

`GroupMoments` stores a point of event time for each key group of a subtask, through restores and rescaling. Operators
whose results depend on the progress of event time keep it as state. It is kept by key group, because subtasks may have
different progress when a checkpoint comes (between two steps, or unaligned), and another parallelism redistributes
their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.combined_rows import is_combined, rows_behind
from tidegate.operators.user_metrics import Counter
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import IncompatibleStateError
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.snapshot import FrozenTable, StateTable

LATE = "late"
"""Name of the side output of late rows."""
LATE_RECORDS = "numLateRecordsDropped"
"""Name of the counter of late rows, as in Flink."""
LEFT_RECORDS = "numRecordsLeft"
"""Name of the counter of rows in windows that were not full when the input ended."""
_GROUP = "key_group"


def set_aside(
    batch: pa.RecordBatch,
    late: NDArray[np.bool_],
    count: Counter,
    emit_aside: Callable[[str, pa.RecordBatch], None],
    without: Sequence[str] = (),
) -> NDArray[np.int64]:
    """Counts the late rows and sends them to the side output. Returns the indices of the other rows.

    `without` are columns that the side output does not get. Combined rows are only counted: rows are combined only if
    the side output is not read.
    """
    if late.any():
        count.inc(rows_behind(batch, late))
        if not is_combined(batch.schema):
            emit_aside(LATE, batch.filter(pa.array(late)).drop_columns(list(without)))
    return np.flatnonzero(~late)


class GroupMoments:
    """Progress of event time for each key group of a subtask, from MIN_WATERMARK_MS on.

    `state` is the name of the state, and `column` the name of its time column. `owner` names the operator in errors.
    """

    def __init__(self, groups: range, state: str, column: str, owner: str) -> None:
        self._groups = groups
        self._state, self._column, self._owner = state, column, owner
        self._moments = np.full(len(groups), MIN_WATERMARK_MS, dtype=np.int64)

    @property
    def least_ms(self) -> int:
        """Returns the time, in ms, that all groups have reached."""
        return int(self._moments.min())

    @property
    def greatest_ms(self) -> int:
        """Returns the greatest time, in ms, that any group has reached."""
        return int(self._moments.max())

    def runs(self) -> Iterator[tuple[range, int]]:
        """Yields runs of adjacent groups with the same time, and that time. There are several runs only for a while
        after a restore.
        """
        bounds = [0, *(np.flatnonzero(np.diff(self._moments)) + 1).tolist(), len(self._groups)]
        for start, stop in pairwise(bounds):
            yield self._groups[start:stop], int(self._moments[start])

    def of_keys(self, keys: pa.RecordBatch, max_parallelism: int) -> NDArray[np.int64] | int:
        """Returns the time of the group of each row of some key columns, or a single time if it is the same for all."""
        runs = [*self.runs()]
        if len(runs) == 1:
            return runs[0][1]
        groups = key_groups_of(hash_columns(keys, keys.schema.names), max_parallelism)
        return self._moments[groups.astype(np.int64) - self._groups.start]

    def advance(self, groups: range, moment_ms: int) -> None:
        """Advances these groups to this time."""
        part = self._moments[groups.start - self._groups.start : groups.stop - self._groups.start]
        assert bool((part <= moment_ms).all()), "event time goes back"
        part[:] = moment_ms

    def freeze(self) -> FrozenTable:
        """Returns the times as UNION state: at a restore every subtask gets all of them, and uses those for its own
        groups.
        """
        rows = self._rows()
        return FrozenTable(self._state, StateKind.UNION, lambda: rows)

    def load(self, table: StateTable) -> None:
        """Loads the times of a former subtask. Raises IncompatibleStateError for another state."""
        rows = table.rows
        if table.state != self._state or rows.schema.names != self._rows().schema.names:
            raise IncompatibleStateError(
                f"state {table.state!r} with columns {rows.schema.names} does not belong to {self._owner}; restore "
                "with the operators that wrote it, or change the uid"
            )
        groups = rows.column(_GROUP).to_numpy()
        own = (groups >= self._groups.start) & (groups < self._groups.stop)
        self._moments[groups[own] - self._groups.start] = rows.column(self._column).to_numpy()[own]

    def _rows(self) -> pa.RecordBatch:
        groups = pa.array(np.arange(self._groups.start, self._groups.stop, dtype=np.int32))
        return pa.RecordBatch.from_arrays([groups, pa.array(self._moments.copy())], names=[_GROUP, self._column])
