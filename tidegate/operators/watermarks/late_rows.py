"""Late rows: how far event time has advanced in each key group, and how rows behind it are dropped.

A row is late if the operator's watermark, which is the watermark of its slowest channel, has passed its time. Windows,
joins and rankings of event time count late rows, and most emit them to a side output (`set_aside`). Windows of
aggregates decide for themselves which rows are late (`tidegate/operators/windows/`).

`GroupMoments` stores, for each key group of a subtask, the watermark that the group has reached. Operators whose
results depend on this watermark keep it as state, so that it survives restores and rescaling. It is stored for each key
group, because subtasks may have reached different watermarks when a checkpoint is taken (between two steps, or
unaligned), and a change of parallelism moves groups between subtasks.
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
"""Name of the metric that counts dropped late rows, as in Flink."""
LEFT_RECORDS = "numRecordsLeft"
"""Name of the metric that counts the rows in count windows that were not full when the input ended."""
_GROUP = "key_group"


def set_aside(
    batch: pa.RecordBatch,
    late: NDArray[np.bool_],
    count: Counter,
    emit_aside: Callable[[str, pa.RecordBatch], None],
    without: Sequence[str] = (),
) -> NDArray[np.int64]:
    """Counts the rows of a batch where the mask `late` is True, and sends them to the side output. Returns the indices
    of the rows that are not late.

    The columns `without` are not sent to the side output. Combined rows are only counted, because rows are combined
    only if no step reads the side output.
    """
    if late.any():
        count.inc(rows_behind(batch, late))
        if not is_combined(batch.schema):
            emit_aside(LATE, batch.filter(pa.array(late)).drop_columns(list(without)))
    return np.flatnonzero(~late)


class GroupMoments:
    """The watermark, in ms, that each key group of a subtask has reached. `MIN_WATERMARK_MS` before the first
    watermark.

    `groups` are the key groups. `state` is the name of the stored state, and `column` the name of its time column.
    `owner` names the operator in errors.
    """

    def __init__(self, groups: range, state: str, column: str, owner: str) -> None:
        self._groups = groups
        self._state, self._column, self._owner = state, column, owner
        self._moments = np.full(len(groups), MIN_WATERMARK_MS, dtype=np.int64)

    @property
    def least_ms(self) -> int:
        """Returns the lowest watermark of the key groups, in ms, which all of them have reached."""
        return int(self._moments.min())

    @property
    def greatest_ms(self) -> int:
        """Returns the highest watermark that any of the key groups has reached, in ms."""
        return int(self._moments.max())

    def runs(self) -> Iterator[tuple[range, int]]:
        """Yields ranges of adjacent key groups with the same watermark, and this watermark in ms.

        There is more than one range only for a while after a restore.
        """
        bounds = [0, *(np.flatnonzero(np.diff(self._moments)) + 1).tolist(), len(self._groups)]
        for start, stop in pairwise(bounds):
            yield self._groups[start:stop], int(self._moments[start])

    def of_keys(self, keys: pa.RecordBatch, max_parallelism: int) -> NDArray[np.int64] | int:
        """Returns the watermark, in ms, that the key group of each row of `keys` has reached, or a single number if it
        is equal for all.
        """
        runs = [*self.runs()]
        if len(runs) == 1:
            return runs[0][1]
        groups = key_groups_of(hash_columns(keys, keys.schema.names), max_parallelism)
        return self._moments[groups.astype(np.int64) - self._groups.start]

    def advance(self, groups: range, moment_ms: int) -> None:
        """Records that these key groups have reached the watermark `moment_ms`. It must not be less than before."""
        part = self._moments[groups.start - self._groups.start : groups.stop - self._groups.start]
        assert bool((part <= moment_ms).all()), "event time goes back"
        part[:] = moment_ms

    def freeze(self) -> FrozenTable:
        """Returns a snapshot of the watermarks, as UNION state: after a restore every subtask gets all watermarks, and
        uses the entries of its own key groups.
        """
        rows = self._rows()
        return FrozenTable(self._state, StateKind.UNION, lambda: rows)

    def load(self, table: StateTable) -> None:
        """Restores the watermarks of this subtask's key groups from the table of an earlier subtask.

        Raises IncompatibleStateError for a table of another state.
        """
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
