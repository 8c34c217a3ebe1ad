"""`LatestJoin` joins the newest row of each key on one side with the newest row on the other side.

The newest row is the row that arrived last, whatever its event time is. (`AsOfJoin` compares event times.) Rules:

- State is at most one row of each key and side.
- Mode `complete` emits a result when both sides have a row of the key, and then removes the key. Each row is therefore
  in at most one result. If one side gets several rows before the other side has one, the last of them is used.
- Mode `always` emits each arriving row with the newest row of the other side, or with nulls if there is none, and
  stores it as the newest row of its own side.
- Rows of a batch are joined as if they arrived one by one, so results do not depend on how an input is cut into
  batches. The order between rows of the two inputs is undefined, as for all operators with two inputs.
- A null key has no partner. Such a row is not stored.
- With a time to live (event time), a key is removed on both sides without output when the event time of its newest row
  is at least the time to live behind the watermark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.joins.join_operator import MOMENT, JoinOperator, JoinSides, without_nulls
from tidegate.operators.operator import Emit
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

LatestEmit: TypeAlias = Literal["complete", "always"]
_SWEEPS = 4
_NONE = -1

Positions = NDArray[np.int64]


class LatestJoin(JoinOperator):
    """Joins the newest row of each key on one side with the newest row on the other side.

    `emit` is `complete` or `always`, `ttl_ms` the time to live in ms, or None. Raises ConfigurationError for another
    `emit`, and for columns that `JoinSides` refuses.
    """

    drops_late_rows = False

    def __init__(
        self,
        sides: JoinSides,
        schemas: tuple[pa.Schema, pa.Schema],
        emit: LatestEmit = "complete",
        ttl_ms: int | None = None,
    ) -> None:
        if emit not in get_args(LatestEmit):
            raise ConfigurationError(f'join_latest: emit={emit!r}: must be "complete" or "always"; give one of them')
        if ttl_ms is not None and ttl_ms <= 0:
            raise ConfigurationError(
                'join_latest: ttl must be greater than 0, such as ttl="1h"; to keep rows without a limit remove ttl='
            )
        super().__init__(sides, schemas, "full")
        self._always = emit == "always"
        self._ttl_ms = ttl_ms
        self._swept_ms: int | None = None

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Joins the rows of a batch of the input `index` with the newest rows of the other input.

        Raises OperatorError for rows without a time.
        """
        keys, times, values = self.rows_of(index, batch)
        rows = pa.RecordBatch.from_arrays(
            [*keys.columns, *values], names=[*self.keys.names, *self.values[index].values()]
        )
        matching = np.flatnonzero(without_nulls(keys))
        partners = np.full(len(times), _NONE, dtype=np.int64)
        stored: pa.RecordBatch | None = None
        joined = np.zeros(0, dtype=np.int64)
        if len(matching):
            known = KeyIndex(tuple(self.keys.names))
            upserted = known.upsert(keys.take(pa.array(matching)))
            slots = upserted.slots.astype(np.int64)
            some_keys = keys.take(pa.array(matching[upserted.first_rows]))
            mine, theirs = self.tables[index], self.tables[1 - index]
            found = theirs.find(some_keys)  # key number i is slot i: first rows ascend
            of_key = np.full(known.size, _NONE, dtype=np.int64)
            of_key[found.keys] = np.arange(len(found.keys))
            stored = theirs.take(found.refs) if len(found.refs) else None
            partners[matching] = of_key[slots]
            newest = matching[_last_of_each(slots, known.size)]
            if not self._always:
                joined = matching[upserted.first_rows][of_key != _NONE]
                theirs.remove(found.refs)
                newest = newest[(of_key == _NONE) | (np.bincount(slots, minlength=known.size) > 1)]
            mine.remove(mine.find(some_keys).refs)
            picked = pa.array(newest)
            self.keep(index, keys.take(picked), times[newest], [value.take(picked) for value in values])
            mine.done()
            theirs.done()
        if self._always:
            emit(self._beside(rows, partners, stored))
        elif len(joined):
            emit(self._beside(rows.take(pa.array(joined)), partners[joined], stored))

    @property
    def waits_for_event_time(self) -> bool:
        """Returns True if keys expire in event time."""
        return self._ttl_ms is not None

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Removes keys whose newest row is older than the time to live, if enough event time has passed since the last
        cleanup.
        """
        if self._ttl_ms is None or watermark_ms == MAX_WATERMARK_MS:
            return iter(())
        if self._swept_ms is None or watermark_ms - self._swept_ms >= max(1, self._ttl_ms // _SWEEPS):
            self._swept_ms = watermark_ms
            self.forget_idle_keys(MOMENT, watermark_ms - self._ttl_ms)
        return iter(())

    def _beside(self, rows: pa.RecordBatch, partners: Positions, stored: pa.RecordBatch | None) -> pa.RecordBatch:
        """Returns the result rows for `rows`, each with the columns of its partner, or nulls if it has none.

        `partners` has, for each row, the index of its partner in `stored`, the rows of the other side.
        """
        found = dict(zip(rows.schema.names, rows.columns, strict=True))
        if stored is not None:
            taken = stored.take(pa.array(partners, mask=partners == _NONE))
            found = {**dict(zip(taken.schema.names, taken.columns, strict=True)), **found}
        arrays = [found[f.name] if f.name in found else pa.nulls(rows.num_rows, f.type) for f in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _last_of_each(slots: Positions, number: int) -> Positions:
    """Returns, for each slot, the index of the last row that belongs to the slot. `slots` has the slot of each row, and
    `number` is the number of slots.
    """
    order = np.argsort(slots, kind="stable")
    last: Positions = order[np.cumsum(np.bincount(slots, minlength=number)) - 1].astype(np.int64)
    return last
