"""`TopN` stores the first `n` rows of each key in a given order, and emits the changes that new rows make.

Rules:

- Rows are ordered by columns, each ascending or descending. Of rows that are equal in all of them the first to arrive
  comes first (Flink's and SQL's `ROW_NUMBER`). Minus zero equals zero, and NaN is greater than any number. Nulls come
  before all values or after them, and equal each other.
- State is at most `n` rows of each key (and window). A row that is not among them is not stored.
- A batch changes each rank once. With a rank column, a row whose rank has changed is emitted under its new rank and, in
  a stream of changes, retracted under the old rank. Without a rank column a row is emitted when it enters and when it
  leaves the first `n`.
- With a time to live (event time), a key is removed without output when the event time of its newest row is at least
  the time to live behind the watermark. Rows that were emitted stay valid, and later rows start a new ranking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.changes import CHANGE, DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE, with_kind
from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.ranking.ranks import Positions, RankWords, check_order_column, placed_words, ranks_of
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.watermarks.watermark_generator import check_timestamp_column, event_times_ms
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.column_names import own_name

STATE_NAME = "top"
MOMENT = own_name("top_time_ms")
"""Name of the stored column with the event time of the row, or 0 without a time to live."""

N_MAX = 100_000
_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Ranking:
    """Describes a ranking: the number `n` of rows to keep, the order columns `by`, and which columns the output has."""

    keys: tuple[str, ...]
    n: int
    by: tuple[str, ...]
    descending: tuple[bool, ...]
    rank: str | None = None
    """Name of the column with the rank, which counts from 1. None if ranks are not emitted."""
    changes: bool = True
    """True if the output is a stream of changes.

    If False, an emitted row replaces the previous row with its key and rank.
    """
    final: bool = False
    """True if the rows of a key are emitted once, when the window ends."""
    nulls_last: tuple[bool, ...] | None = None
    """For each order column, True if nulls come after all values.

    None means after all values only where the order is descending, as in Spark.
    """
    ties: bool = False
    """True if rows that are equal in all order columns share a rank.

    More than `n` rows may then be among the first `n`.
    """

    def __post_init__(self) -> None:
        if not self.keys:
            raise ConfigurationError("top_n needs at least one key column: key_by(...)")
        if not 1 <= self.n <= N_MAX:
            raise ConfigurationError(f"top_n({self.n}): n must be between 1 and {N_MAX}")
        if not self.by or len(self.by) != len(self.descending):
            raise ConfigurationError(
                f"top_n(by={list(self.by)}, descending={list(self.descending)}): by= needs at least one column, "
                "and descending= one boolean, or one for each column"
            )
        if len(self.nulls_behind) != len(self.by):
            raise ConfigurationError(
                f"top_n(by={list(self.by)}, nulls_last={list(self.nulls_behind)}): nulls_last= takes one boolean, "
                "or one for each column of by="
            )
        if self.ties and not self.final:
            raise ConfigurationError(
                "top_n(ties=True): which rows share a rank is only known when a window ends; rank the rows of a "
                'window, with emit="final"'
            )
        if not self.changes and self.rank is None and not self.final:
            raise ConfigurationError(
                'top_n(emit="update"): an update replaces the row with the same key and rank, so the result needs a '
                'column with the rank; give rank="rank", or use emit="changes"'
            )

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        """Returns the columns of the result for an input schema.

        Raises ConfigurationError for a column that is missing, cannot order rows, or would occur twice.
        """
        for column in self.by:
            check_order_column(schema, column, "top_n")
        keys = key_schema(schema, self.keys)
        fields = [keys.field(f.name) if f.name in keys.names else f.with_type(decoded_type(f.type)) for f in schema]
        found = pa.schema([field.remove_metadata() for field in fields])
        if self.rank is not None:
            found = found.append(pa.field(self.rank, pa.int64()))
        found = with_kind(found) if self.changes else found
        doubles = sorted({name for name in found.names if found.names.count(name) > 1})
        if doubles or CHANGE in schema.names:
            twice = doubles or [CHANGE]
            raise ConfigurationError(f"top_n: {twice} would be in the result twice; rename it with select")
        return found

    def columns_of(self, batch: pa.RecordBatch, declared: pa.Schema) -> pa.RecordBatch:
        """Returns the columns of a batch in stored form.

        Raises TypeError for a column of another type than `declared`.
        """
        keys = key_columns(batch, self.keys)
        columns = []
        for field in declared:
            column = keys.column(field.name) if field.name in keys.schema.names else batch.column(field.name)
            column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            if column.type != field.type:
                raise TypeError(
                    f"column {field.name!r} is {column.type}; the stream was declared with {field.type}"
                    "; cast it with with_columns before this step"
                )
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=declared)

    @property
    def nulls_behind(self) -> tuple[bool, ...]:
        """Returns, for each order column, whether nulls come after all values."""
        return self.descending if self.nulls_last is None else self.nulls_last

    def words(self, rows: pa.RecordBatch) -> RankWords:
        """Returns integers (`RankWords`) that sort as the order columns do. Rows with smaller ones come first in
        the ranking.
        """
        columns = zip(self.by, self.descending, self.nulls_behind, strict=True)
        found = [placed_words(rows, column, down, last) for column, down, last in columns]
        return RankWords([words for words, _ in found], [nulls for _, nulls in found])


@dataclass(frozen=True, slots=True)
class Ranked:
    """Ranks of rows within their groups, counted from 0.

    Has the ranks of the stored rows before a batch, and the ranks of the stored and new rows after the batch.
    """

    before: Positions
    after: Positions
    """Ranks after the batch: of the stored rows, followed by the new rows."""


def ranked(groups: NDArray[np.int64], words: RankWords, there: int) -> Ranked:
    """Returns the ranks of rows within their groups, before and after a batch.

    The first `there` rows were stored before, the other rows are new.
    """
    sorting = words.sorting
    return Ranked(ranks_of(groups[:there], [w[:there] for w in sorting]), ranks_of(groups, sorting))


class TopN(RowsOperator):
    """Emits the changes of the first rows of each key. `schema` is the input schema.

    `time` is the event-time column, which a time to live of `ttl_ms` needs.
    """

    def __init__(self, ranking: Ranking, schema: pa.Schema, time: str | None = None, ttl_ms: int | None = None) -> None:
        self.ranking = ranking
        self.output = ranking.output_schema(schema)
        if ttl_ms is not None:
            if ttl_ms <= 0:
                raise ConfigurationError(
                    'top_n: ttl must be greater than 0, such as ttl="1h"; to keep rows without a limit remove ttl='
                )
            if time is None:
                raise ConfigurationError(
                    "top_n: ttl is event time, and the stream has none: call assign_timestamps before key_by"
                )
            check_timestamp_column(schema, time)
        self._time, self._ttl_ms = time, ttl_ms
        self._columns = pa.schema([self.output.field(name) for name in schema.names])
        values = pa.schema([field for field in self._columns if field.name not in ranking.keys])
        super().__init__(key_schema(schema, ranking.keys), {STATE_NAME: values.append(pa.field(MOMENT, pa.int64()))})
        self._swept_ms: int | None = None

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Ranks the rows of a batch and emits the changes. Raises OperatorError for a row without a time."""
        with blame(self.context, batch):
            rows, moments = self._taken(batch)
            words = self.ranking.words(rows)
        keys = rows.select(self.keys.names)
        index = KeyIndex(tuple(self.keys.names))
        upserted = index.upsert(keys)
        self.check_owner(keys.take(pa.array(upserted.first_rows)))
        table, groups = self.tables[0], upserted.slots.astype(np.int64)
        found = table.find(keys.take(pa.array(upserted.first_rows)))  # key number i is slot i: first rows ascend
        stored = table.take(found.refs).select(self._columns.names)
        of_stored, words_there = found.keys, self.ranking.words(stored)
        hopeful = self._hopeful(of_stored, words_there, groups, words, index.size)
        if hopeful is not None:
            rows, groups, words = rows.take(pa.array(hopeful)), groups[hopeful], words.take(hopeful)
            moments = moments[hopeful]
        if rows.num_rows:
            all_rows = one_batch(pa.Table.from_batches([stored, rows]), "top_n")
            all_groups = np.concatenate((of_stored, groups))
            ranks = ranked(all_groups, words_there.then(words), len(of_stored))
            there, n = len(of_stored), self.ranking.n
            table.remove(found.refs[ranks.after[:there] >= n])
            came = np.flatnonzero(ranks.after[there:] < n)
            self._keep(rows.take(pa.array(came)), moments[came])
            per_group = np.bincount(of_stored, minlength=index.size)
            self._emit_changes(all_rows, all_groups, ranks, per_group, emit)
        table.done()

    @property
    def waits_for_event_time(self) -> bool:
        """Returns True if keys expire in event time."""
        return self._ttl_ms is not None

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Removes expired keys if enough event time has passed since the last cleanup."""
        if self._ttl_ms is not None and watermark_ms != MAX_WATERMARK_MS:
            due = self._swept_ms is None or watermark_ms - self._swept_ms >= max(1, self._ttl_ms // _SWEEPS)
            if due:
                self._swept_ms = watermark_ms
                self.forget_idle_keys(MOMENT, watermark_ms - self._ttl_ms)
        return iter(())

    def _taken(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Returns the columns of a batch in stored form, and the event times of its rows in ms (0 without a time to
        live).

        Raises ValueError for a row without a time.
        """
        moments = np.zeros(batch.num_rows, dtype=np.int64)
        if self._ttl_ms is not None:
            assert self._time is not None
            found = event_times_ms(batch, self._time)
            if found.null_count:
                raise ValueError(
                    f"column {self._time!r} is null in a row, but event time needs a value; filter such rows out before"
                )
            moments = found.to_numpy(zero_copy_only=False)
        return self.ranking.columns_of(batch, self._columns), moments

    def _hopeful(
        self, of_stored: Positions, there: RankWords, groups: Positions, words: RankWords, size: int
    ) -> Positions | None:
        """Returns the indices of the new rows that may be among the first `n` of their key, judged only by the first
        order column. None means all rows.

        `of_stored` and `groups` have the key number of each stored and new row, `there` and `words` their order words.
        `size` is the number of keys.
        """
        full = np.bincount(of_stored, minlength=size) >= self.ranking.n
        if not full.any():
            return None
        last = np.full(size, np.iinfo(np.int64).min, dtype=np.int64)
        np.maximum.at(last, of_stored, there.values[0])
        hopeful = ~full[groups] | (words.values[0] <= last[groups])
        return None if hopeful.all() else np.flatnonzero(hopeful)

    def _keep(self, rows: pa.RecordBatch, moments: NDArray[np.int64]) -> None:
        if rows.num_rows:
            values = [rows.column(name) for name in rows.schema.names if name not in self.keys.names]
            self.append(0, rows.select(self.keys.names), [*values, pa.array(moments)])

    def _emit_changes(
        self, rows: pa.RecordBatch, groups: Positions, ranks: Ranked, per_group: Positions, emit: Emit
    ) -> None:
        """Emits the changes of the first `n` rows, retractions before additions.

        `rows` are the stored rows followed by the new rows.
        """
        there, n = len(ranks.before), self.ranking.n
        after = ranks.after
        if self.ranking.rank is None:
            self._emit(rows, np.flatnonzero(after[:there] >= n), None, DELETE, emit)
            self._emit(rows, there + np.flatnonzero(after[there:] < n), None, INSERT, emit)
            return
        before = np.concatenate((ranks.before, np.full(len(after) - there, n, dtype=np.int64)))
        moved = np.flatnonzero((after < n) & (after != before))
        if self.ranking.changes:
            # A rank that was taken is taken still: rows never leave but for others.
            self._emit(rows, np.flatnonzero((before < n) & (after != before)), before, UPDATE_BEFORE, emit)
            replaces = after[moved] < per_group[groups[moved]]
            self._emit(rows, moved[replaces], after, UPDATE_AFTER, emit)
            self._emit(rows, moved[~replaces], after, INSERT, emit)
        else:
            self._emit(rows, moved, after, None, emit)

    def _emit(
        self, rows: pa.RecordBatch, picked: Positions, ranks: Positions | None, kind: str | None, emit: Emit
    ) -> None:
        if len(picked):
            columns = rows.take(pa.array(picked)).columns
            columns += [] if ranks is None else [pa.array(ranks[picked] + 1)]
            columns += [] if kind is None else [pa.repeat(kind, len(picked))]
            emit(pa.RecordBatch.from_arrays(columns, schema=self.output))
