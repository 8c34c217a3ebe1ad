"""`RegularJoin` joins all rows of two inputs that have the same key, whatever their times are, and retracts outdated
results.

Rules:

- Each row is stored, and joined with all rows of its key on the other side. A row therefore has a partner while its key
  has any row on the other side, which needs no further state.
- In an outer join a row without a partner is emitted with nulls. This result is retracted when the key's first partner
  arrives, and emitted again when its last partner is retracted.
- An inner join of inputs without retractions emits plain rows. All other joins emit changes, retractions first.
- In a batch of changes, rows that are added and retracted cancel out. The remaining retractions are removed from the
  state.
- A null key has no partner. Such a row is not stored.
- With a time to live (event time), a key is removed on both sides without output when the event time of its newest row
  is at least the time to live behind the watermark. The state of a key is therefore complete or empty. If rows are
  never retracted, each row is removed individually.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.changes import CHANGE, DELETE, INSERT, rows_that_come, with_kind
from tidegate.operators.joins.join_operator import (
    LEFT,
    MOMENT,
    RIGHT,
    JoinHow,
    JoinOperator,
    JoinSides,
    Pairing,
    Times,
    without_nulls,
)
from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_schema
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.common.backend import FoundRows
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

HOWS = ("inner", "left", "right", "full")
_SCANNED_ROWS = 131_072
_SWEEPS = 4

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one input: `rows` has their keys and other columns, `times` their event times in ms."""

    rows: pa.RecordBatch
    times: Times

    def some(self, picked: Positions) -> _Rows:
        """Returns the rows with the indices `picked`, in this order."""
        return _Rows(self.rows.take(pa.array(picked)), self.times[picked])


class RegularJoin(JoinOperator):
    """Joins two inputs without windows, and stores all rows of both.

    `changing` has, for each input, whether it is a stream of changes. `ttl_ms` is the time to live in ms, or None.
    Raises ConfigurationError for columns that `JoinSides` refuses, and for a column `row_kind` of plain rows if the
    result has changes.
    """

    drops_late_rows = False

    def __init__(
        self,
        sides: JoinSides,
        schemas: tuple[pa.Schema, pa.Schema],
        how: JoinHow = "inner",
        changing: tuple[bool, bool] = (False, False),
        ttl_ms: int | None = None,
    ) -> None:
        if how not in HOWS:
            raise ConfigurationError(
                f"join: how={how!r}: a join without a window is one of {list(HOWS)}; give one of them"
            )
        if ttl_ms is not None and ttl_ms <= 0:
            raise ConfigurationError(
                'join: ttl must be greater than 0, such as ttl="1h"; to keep rows without a limit remove ttl='
            )
        plain = tuple(
            pa.schema([f for f in schema if f.name != CHANGE]) if changes else schema
            for schema, changes in zip(schemas, changing, strict=True)
        )
        super().__init__(sides, (plain[LEFT], plain[RIGHT]), how)
        for schema, changes in zip(plain, changing, strict=True):
            if changes:
                key_schema(schema, tuple(schema.names))  # a retracted row is found by all its columns
        self._changing = changing
        self._ttl_ms = ttl_ms
        self.retracts = how != "inner" or any(changing)
        """True if the result is a stream of changes."""
        if self.retracts and CHANGE in self.schema.names:
            raise ConfigurationError(
                f"join: a column of the rows is called {CHANGE!r}, but that column of the result has the kind of each "
                "change; rename it before the join with select"
            )
        self.output = with_kind(self.schema) if self.retracts else self.schema
        """The columns of the result."""
        self._keeps = (how in ("left", "full"), how in ("right", "full"))
        """For each side, whether its rows are also emitted when they have no partner."""
        self._swept_ms: int | None = None

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Joins the rows of a batch of the input `index`.

        Raises OperatorError for rows without a time, and for the retraction of a row that is not stored.
        """
        keys, times, values = self.rows_of(index, batch)
        rows = pa.RecordBatch.from_arrays(
            [*keys.columns, *values], names=[*self.keys.names, *self.values[index].values()]
        )
        came = _Rows(rows, times)
        gone = came.some(np.zeros(0, dtype=np.int64))
        matching = without_nulls(keys)
        lonely: tuple[_Rows, _Rows] = (gone, gone)
        if self._changing[index]:
            with blame(self.context, batch):
                comes = rows_that_come(batch)
            if not matching.all():
                taken, brought, *_ = _balance(came.rows.filter(pa.array(~matching)), comes[~matching])
                strangers = came.some(np.flatnonzero(~matching))
                lonely = (strangers.some(taken), strangers.some(brought))
                came, comes = came.some(np.flatnonzero(matching)), comes[matching]
            with blame(self.context, batch):
                gone, came = self._settled(index, came, comes)
        elif not matching.all():
            lonely = (gone, came.some(np.flatnonzero(~matching)))
            came = came.some(np.flatnonzero(matching))
        if self._keeps[index]:
            self._pad(index, lonely[0].rows, DELETE, emit)
            self._pad(index, lonely[1].rows, INSERT, emit)
        if len(gone.times) or len(came.times):
            self._join(index, gone, came, emit)

    @property
    def waits_for_event_time(self) -> bool:
        """Returns True if keys expire in event time."""
        return self._ttl_ms is not None

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Removes keys (or rows) that are older than the time to live, if enough event time has passed since the last
        cleanup.
        """
        if self._ttl_ms is not None and watermark_ms != MAX_WATERMARK_MS:
            due = self._swept_ms is None or watermark_ms - self._swept_ms >= max(1, self._ttl_ms // _SWEEPS)
            if due:
                self._swept_ms = watermark_ms
                if self.retracts:
                    self.forget_idle_keys(MOMENT, watermark_ms - self._ttl_ms)
                else:
                    self._forget_rows(watermark_ms - self._ttl_ms)
        return iter(())

    def _settled(self, index: int, rows: _Rows, comes: NDArray[np.bool_]) -> tuple[_Rows, _Rows]:
        """Applies the retractions of a batch to the state. Returns the removed rows and the rows to add.

        `comes` is True for rows that the batch adds. Rows that the batch both adds and retracts are in neither result.
        Raises ValueError for a retracted row that is not stored, unless it may have expired.
        """
        if comes.all():
            return rows.some(np.zeros(0, dtype=np.int64)), rows
        taken, brought, every, owed = _balance(rows.rows, comes)
        gone = rows.some(taken)
        if len(taken):
            gone = self._take_out(index, gone, every, owed)
        return gone, rows.some(brought)

    def _take_out(self, index: int, gone: _Rows, every: KeyIndex, owed: NDArray[np.int64]) -> _Rows:
        """Removes the rows `gone` from the state, and returns the removed rows. Among equal stored rows the oldest is
        removed.

        `every` is an index of all distinct rows, and `owed` has how often each distinct row is removed. Raises
        ValueError if a row is not stored and cannot have expired.
        """
        table = self.tables[index]
        unique = KeyIndex(tuple(self.keys.names)).upsert(gone.rows.select(self.keys.names)).first_rows
        found = table.find(gone.rows.select(self.keys.names).take(pa.array(unique)))
        stored = table.take(found.refs).select(gone.rows.schema.names)
        known = every.size
        ids = every.upsert(stored).slots if stored.num_rows else np.zeros(0, dtype=np.int32)
        wanted = np.concatenate((owed, np.zeros(every.size - known, dtype=np.int64)))
        picked = _among_first(ids, wanted)
        if len(picked) < len(gone.times) and self._ttl_ms is None:
            raise ValueError(
                "a row was retracted that never came, so the stream of changes contradicts itself. Functions before "
                "this join must return the same result for the same row, and must keep the order of the rows of a key"
            )
        times = table.take(found.refs[picked], [MOMENT]).column(MOMENT).to_numpy() if len(picked) else gone.times[:0]
        result = _Rows(stored.take(pa.array(picked)), times)
        table.remove(found.refs[picked])
        return result

    def _join(self, index: int, gone: _Rows, came: _Rows, emit: Emit) -> None:
        """Emits the changes caused by removed rows (`gone`) and added rows (`came`) of the input `index`, and stores
        the added rows.
        """
        mine, theirs = self.tables[index], self.tables[1 - index]
        parts = [side.rows.select(self.keys.names) for side in (gone, came) if len(side.times)]
        changed = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
        index_of = KeyIndex(tuple(self.keys.names))
        upserted = index_of.upsert(changed)
        slots, number = upserted.slots.astype(np.int64), index_of.size
        some_keys = changed.take(pa.array(upserted.first_rows))
        found = theirs.find(some_keys)  # key number i is slot i: first rows ascend
        per_key = np.bincount(found.keys, minlength=number)
        of_gone, of_came = slots[: len(gone.times)], slots[len(gone.times) :]
        in_state = np.zeros(0, dtype=np.int64)
        if self._keeps[1 - index]:
            in_state = np.bincount(mine.find(some_keys).keys, minlength=number)
        for rows, of, kind in ((gone, of_gone, DELETE), (came, of_came, INSERT)):
            if self._keeps[1 - index]:
                before, after = (in_state + np.bincount(rows_of, minlength=number) for rows_of in (of_gone, of_came))
                turned = (before == 0) & (after > 0) if kind == DELETE else (before > 0) & (after == 0)
                self.pad_stored(1 - index, found.refs[turned[found.keys]], kind, emit)
            self._pairs(index, rows.rows, of, found, per_key, kind, emit)
            if self._keeps[index]:
                self._pad(index, rows.rows.take(pa.array(np.flatnonzero(per_key[of] == 0))), kind, emit)
        self.keep(index, came.rows.select(self.keys.names), came.times, came.rows.columns[len(self.keys) :])
        mine.done()
        theirs.done()

    def _pairs(
        self,
        index: int,
        rows: pa.RecordBatch,
        of: Positions,
        found: FoundRows,
        per_key: Positions,
        kind: str,
        emit: Emit,
    ) -> None:
        """Emits each row of one input joined with the rows of its key on the other input.

        `of` has the key number of each row. `found` are the rows of the other input, and `per_key` the number of found
        rows of each key. `kind` is the kind of change.
        """
        starts = np.concatenate(([0], np.cumsum(per_key)))[:-1]
        every = np.arange(len(found.refs), dtype=np.int64)
        pairing = Pairing(every, starts[of], per_key[of], every[:0])
        table = self.tables[1 - index]
        # A stored row may meet many: it is read once, unless there are too many rows to hold them all.
        stored = table.take(found.refs) if 0 < len(every) <= OUTPUT_ROWS_MAX else None
        for mine, theirs in pairing.pairs(OUTPUT_ROWS_MAX):
            partners = table.take(found.refs[theirs]) if stored is None else stored.take(pa.array(theirs))
            one_each = len(mine) == rows.num_rows and bool((mine == np.arange(len(mine))).all())
            sides = [rows if one_each else rows.take(pa.array(mine)), partners]
            left, right = sides if index == LEFT else reversed(sides)
            self._emit(self.result(left, right, len(mine)), kind, emit)

    def pad_stored(self, side: int, refs: NDArray[Any], kind: str, emit: Emit) -> None:
        """Emits stored rows of one side, given by their references, with nulls for the other side."""
        for start in range(0, len(refs), OUTPUT_ROWS_MAX):
            self._pad(side, self.tables[side].take(refs[start : start + OUTPUT_ROWS_MAX]), kind, emit)

    def _pad(self, side: int, rows: pa.RecordBatch, kind: str, emit: Emit) -> None:
        """Emits rows of one side with nulls for the other side."""
        if rows.num_rows:
            left, right = (rows, None) if side == LEFT else (None, rows)
            self._emit(self.result(left, right, rows.num_rows), kind, emit)

    def _emit(self, rows: pa.RecordBatch, kind: str, emit: Emit) -> None:
        if self.retracts:
            rows = rows.append_column(self.output.field(CHANGE), pa.repeat(kind, rows.num_rows))
        emit(rows)

    def _forget_rows(self, since_ms: int) -> None:
        """Removes stored rows whose time is `since_ms` or earlier. Used if rows of the inputs are never retracted."""
        for table in self.tables:
            for rows, refs in table.scan([MOMENT], _SCANNED_ROWS):
                table.remove(refs[rows.column(MOMENT).to_numpy() <= since_ms])
            table.done()


def _balance(rows: pa.RecordBatch, comes: NDArray[np.bool_]) -> tuple[Positions, Positions, KeyIndex, Positions]:
    """Cancels additions against retractions of equal rows in one batch of changes. `comes` is True for added rows.

    Returns the indices of the remaining retractions, the indices of the remaining additions, an index of all distinct
    rows, and how often each distinct row is still retracted.
    """
    every = KeyIndex(tuple(rows.schema.names))
    ids = every.upsert(rows).slots
    balance = np.bincount(ids[comes], minlength=every.size) - np.bincount(ids[~comes], minlength=every.size)
    owed = np.maximum(-balance, 0)
    taken, brought = np.flatnonzero(~comes), np.flatnonzero(comes)
    taken = taken[_among_last(ids[taken], owed)]
    return taken, brought[_among_last(ids[brought], np.maximum(balance, 0))], every, owed


def _among_first(ids: NDArray[np.int32], wanted: Positions) -> Positions:
    """Returns, for each id, the indices of its first `wanted[id]` rows, in the order of ids."""
    order = np.argsort(ids, kind="stable")
    of_sorted = ids[order]
    counts = np.bincount(of_sorted, minlength=len(wanted))
    starts = np.cumsum(counts) - counts
    picked: Positions = order[np.arange(len(order)) - starts[of_sorted] < wanted[of_sorted]].astype(np.int64)
    return picked


def _among_last(ids: NDArray[np.int32], wanted: Positions) -> Positions:
    """Returns, for each id, the indices of its last `wanted[id]` rows. All indices are in ascending order."""
    return np.sort(len(ids) - 1 - _among_first(ids[::-1], wanted))
