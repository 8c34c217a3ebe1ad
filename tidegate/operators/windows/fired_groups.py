"""`FiredGroups`: up to which moment of event time windows have fired, for each key group of a subtask.

A window that shares its slices with others leaves no trace when it fires. So this moment is state: without it a restore
would fire windows again, or open some that are over.

It also tells the type of event time, which a restored operator must know before the first row.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.operators.watermarks.group_moments import GroupMoments
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.schemas.reserved_names import own_name
from tidegate.storage.state.snapshot import StateTable

FIRED_STATE = own_name("fired")
_TIME = "time"


class FiredGroups(GroupMoments):
    """For each of some key groups, the last moment up to which windows have fired."""

    def __init__(self, groups: range) -> None:
        super().__init__(groups, FIRED_STATE, "fired_ms", "windows")
        self._now_ms = MIN_WATERMARK_MS
        self.time_type: pa.DataType | None = None
        """The type of the column of event time; None before the first row."""

    def steady(self, now_ms: int) -> int:
        """The processing time, for windows of which: it never goes back, also not before what has fired."""
        self._now_ms = max(self._now_ms, now_ms, self.greatest_ms + 1)
        return self._now_ms

    def load(self, table: StateTable) -> None:
        """Take what a former subtask has stored. CorruptionError if it is something else."""
        super().load(table)
        time_type = table.rows.schema.field(_TIME).type
        if not pa.types.is_null(time_type):
            self.time_type = time_type

    def _rows(self) -> pa.RecordBatch:
        rows = super()._rows()
        return rows.append_column(_TIME, pa.nulls(rows.num_rows, self.time_type or pa.null()))
