"""`FiredGroups`: up to which moment of event time windows have fired, for each key group of a subtask.

A window that shares its slices with others leaves no trace when it fires. So this moment is state: without it a restore
would fire windows again, or open some that are over. It is kept by key group, because subtasks may be at different
moments when a checkpoint comes (between two steps, or unaligned), and another parallelism deals their groups out anew.

It also tells the type of event time, which a restored operator must know before the first row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.hashing import hash_columns
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.snapshot import FrozenTable, StateTable

FIRED_STATE = "fired"
_GROUP, _MOMENT, _TIME = "key_group", "fired_ms", "time"


class FiredGroups:
    """For each of some key groups, the last moment up to which windows have fired."""

    def __init__(self, groups: range) -> None:
        self._groups = groups
        self._fired_ms = np.full(len(groups), MIN_WATERMARK_MS, dtype=np.int64)
        self._now_ms = MIN_WATERMARK_MS
        self.time_type: pa.DataType | None = None
        """The type of the column of event time; None before the first row."""

    @property
    def least_ms(self) -> int:
        """The moment up to which windows of all groups have fired."""
        return int(self._fired_ms.min())

    def runs(self) -> Iterator[tuple[range, int]]:
        """Neighbouring groups that are at one moment, and the moment. One run, but for a while after a restore."""
        bounds = [0, *(np.flatnonzero(np.diff(self._fired_ms)) + 1).tolist(), len(self._groups)]
        for start, stop in pairwise(bounds):
            yield self._groups[start:stop], int(self._fired_ms[start])

    def of_keys(self, keys: pa.RecordBatch, max_parallelism: int) -> NDArray[np.int64] | int:
        """Up to when windows have fired, for each row of some key columns; one moment if it is the same for all."""
        runs = [*self.runs()]
        if len(runs) == 1:
            return runs[0][1]
        groups = key_groups_of(hash_columns(keys, keys.schema.names), max_parallelism)
        return self._fired_ms[groups.astype(np.int64) - self._groups.start]

    def steady(self, now_ms: int) -> int:
        """The processing time, for windows of which: it never goes back, also not before what has fired."""
        self._now_ms = max(self._now_ms, now_ms, int(self._fired_ms.max()) + 1)
        return self._now_ms

    def advance(self, groups: range, moment_ms: int) -> None:
        """Windows of these groups have fired up to this moment."""
        part = self._fired_ms[groups.start - self._groups.start : groups.stop - self._groups.start]
        assert bool((part <= moment_ms).all()), "event time goes back"
        part[:] = moment_ms

    def freeze(self) -> FrozenTable:
        """As operator state of which every subtask gets all at a restore, and takes its own groups."""
        groups = pa.array(np.arange(self._groups.start, self._groups.stop, dtype=np.int32))
        moments = pa.array(self._fired_ms.copy())
        time = pa.nulls(len(self._groups), self.time_type or pa.null())
        rows = pa.RecordBatch.from_arrays([groups, moments, time], names=[_GROUP, _MOMENT, _TIME])
        return FrozenTable(FIRED_STATE, StateKind.UNION, lambda: rows)

    def load(self, table: StateTable) -> None:
        """Take what a former subtask has stored. CorruptionError if it is something else."""
        rows = table.rows
        if table.state != FIRED_STATE or rows.schema.names != [_GROUP, _MOMENT, _TIME]:
            raise CorruptionError(
                f"state {table.state!r} with columns {rows.schema.names} is not that of windows; restore with the "
                "operators that wrote it, or change the uid"
            )
        groups = rows.column(_GROUP).to_numpy()
        own = (groups >= self._groups.start) & (groups < self._groups.stop)
        self._fired_ms[groups[own] - self._groups.start] = rows.column(_MOMENT).to_numpy()[own]
        if not pa.types.is_null(rows.schema.field(_TIME).type):
            self.time_type = rows.schema.field(_TIME).type
