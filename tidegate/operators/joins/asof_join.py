"""`AsOfJoin` joins each row with the version of its key that was valid at the event time of the row.

The right input is a versioned stream: each row is valid from its event time until the time of the next row of its key.
Rules:

- A row waits until the watermark of both inputs has passed its time. All versions up to that time have then arrived,
  and the row is joined with the newest version that is not later than the row. Of several versions with the same time
  the last to arrive counts.
- A version is obsolete when a newer version is valid at the watermark. Obsolete versions are removed whenever the
  number of stored versions has doubled.
- Left rows whose time the watermark has already passed are dropped and counted in `numLateRecordsDropped`. A late
  version is stored, because it may still be valid.
- A left row with a null key is joined with no version.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.joins.join_operator import LEFT, MOMENT, RIGHT, JoinHow, JoinOperator, JoinSides, without_nulls
from tidegate.operators.operator import Emit
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

SWEPT_VERSIONS_MIN = 10_000
"""Obsolete versions are removed only after at least this number of new versions has arrived."""
_SCANNED_ROWS = 131_072
_NONE = -1


class AsOfJoin(JoinOperator):
    """Joins each left row with the right row (version) that is valid at its event time. `how` is `inner` or `left`.

    Raises ConfigurationError for another kind of join, and for columns that `JoinSides` refuses.
    """

    def __init__(self, sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema], how: JoinHow = "left") -> None:
        if how not in ("inner", "left"):
            raise ConfigurationError(f'join_asof: how={how!r}: must be "inner" or "left"; give one of them')
        super().__init__(sides, schemas, how)
        self._first_ms: int | None = None
        """A lower bound of the times of waiting rows, in ms, or None if unknown."""
        self._came = 0
        """Number of versions that arrived since obsolete versions were last removed."""

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Stores the rows of a batch of the left (0) or right (1) input.

        Raises OperatorError for rows without a time.
        """
        keys, times, values = self.rows_of(index, batch)
        wanted = times > self.reached(keys) if index == LEFT else without_nulls(keys)
        if index == LEFT and not wanted.all():
            self.late.inc(int(len(times) - wanted.sum()))
        if not wanted.all():
            picked = pa.array(np.flatnonzero(wanted))
            keys, times, values = keys.take(picked), times[wanted], [value.take(picked) for value in values]
        if not len(times):
            return
        self.keep(index, keys, times, values)
        self.tables[index].done()
        if index == RIGHT:
            self._came += len(times)
        elif self._first_ms is not None:
            self._first_ms = min(self._first_ms, int(times.min()))

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Joins and emits the left rows whose time the watermark has passed. Yields between two steps."""
        self.reach(watermark_ms)
        waiting, versions = self.tables
        while self._first_ms is None or self._first_ms <= watermark_ms:
            due, first = [np.zeros(0, dtype=np.int64)], np.iinfo(np.int64).max
            for rows, refs in waiting.scan([MOMENT], _SCANNED_ROWS):
                times = rows.column(MOMENT).to_numpy()
                ready = times <= watermark_ms
                due.append(refs[ready])
                if not ready.all():
                    first = min(first, int(times[~ready].min()))
            refs = np.concatenate(due)
            some, more = refs[:OUTPUT_ROWS_MAX], len(refs) > OUTPUT_ROWS_MAX
            if len(some):
                self._join(waiting.take(some), emit)
                waiting.remove(some)
            waiting.done()
            versions.done()
            self._first_ms = None if more else first
            if not len(some):
                break
            yield
        if self._came >= max(SWEPT_VERSIONS_MIN, versions.rows // 2):
            self._came = 0
            self._sweep(watermark_ms)

    def _join(self, rows: pa.RecordBatch, emit: Emit) -> None:
        """Emits left rows, each joined with the version that is valid at its time."""
        index = KeyIndex(tuple(self.keys.names))
        upserted = index.upsert(rows.select(self.keys.names))
        versions = self.tables[RIGHT]
        found = versions.find(rows.select(self.keys.names).take(pa.array(upserted.first_rows)))
        since = versions.take(found.refs, [MOMENT]).column(MOMENT).to_numpy() if len(found.refs) else found.keys
        held = newest_versions(found.keys, since, upserted.slots.astype(np.int64), rows.column(MOMENT).to_numpy())
        held[~without_nulls(rows.select(self.keys.names))] = _NONE
        has = np.flatnonzero(held != _NONE)
        if len(has):
            emit(self.result(rows.take(pa.array(has)), versions.take(found.refs[held[has]]), len(has)))
        lonely = np.flatnonzero(held == _NONE)
        if self.how == "left" and len(lonely):
            emit(self.result(rows.take(pa.array(lonely)), None, len(lonely)))

    def _sweep(self, watermark_ms: int) -> None:
        """Removes row versions that are obsolete at the watermark."""
        index, versions = KeyIndex(tuple(self.keys.names)), self.tables[RIGHT]
        slots: list[NDArray[np.int64]] = []
        times: list[NDArray[np.int64]] = []
        refs: list[NDArray[np.int64]] = []
        for rows, some in versions.scan([*self.keys.names, MOMENT], _SCANNED_ROWS):
            slots.append(index.upsert(rows.select(self.keys.names)).slots.astype(np.int64))
            times.append(rows.column(MOMENT).to_numpy())
            refs.append(some)
        if refs:
            of, since = np.concatenate(slots), np.concatenate(times)
            newest = np.full(index.size, np.iinfo(np.int64).min, dtype=np.int64)
            holds = since <= watermark_ms
            np.maximum.at(newest, of[holds], since[holds])
            versions.remove(np.concatenate(refs)[since < newest[of]])
        versions.done()


def newest_versions(
    of_versions: NDArray[np.int64], since: NDArray[np.int64], of_rows: NDArray[np.int64], at: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns, for each row, the index of the newest version of its key that is not later than the row, or -1 if there
    is none.

    `of_versions` and `of_rows` have the keys as numbers, `since` and `at` the times in ms. If versions of a key have
    equal times, the last one is used.
    """
    count = len(of_versions)
    keys, times = np.concatenate((of_versions, of_rows)), np.concatenate((since, at))
    order = np.lexsort((times, keys))  # stable: versions stand before the rows of their time
    is_version = order < count
    places = np.maximum.accumulate(np.where(is_version, np.arange(len(order)), _NONE))
    latest = np.where(places == _NONE, _NONE, order[places])
    fits = (latest != _NONE) & (keys[latest] == keys[order])
    held = np.full(len(order), _NONE, dtype=np.int64)
    held[order] = np.where(fits, latest, _NONE)
    return held[count:]
