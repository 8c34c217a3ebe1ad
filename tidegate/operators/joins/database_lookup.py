"""`DatabaseLookup` joins rows with a table of a database. It queries the rows of the keys in each batch.

Each subtask has a connection and a cache of its own. Rules:

- Keys of a batch that are not in the cache are queried, up to `keys_per_query` keys at a time. The task waits for the
  results.
- A query that fails because of the database is repeated after growing pauses, for up to `retry_ms`. Then the task
  fails.
- The cached rows of a key are valid for `ttl_ms` after its query began, also if there were none. Without `ttl_ms` the
  cache is emptied before each batch.
- Between batches the cache has at most `cache_rows` rows. A key without rows counts as one row. The cache has two
  generations. Rows are added to the young generation. When the young generation has half of the rows, the old
  generation is dropped and the young one takes its place. A key that is found in the old generation is copied to the
  young one, so frequent keys stay cached.
- Rows are joined only if their keys are exactly equal. Other rows that the database returns, because it compares by
  other rules such as ignoring case, are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.connectors.sql.client import DatabaseError
from tidegate.connectors.sql.lookup import KeyedTable, LookupLimits, LookupSession, key_parts
from tidegate.operators.functions.batch_functions import BatchContext
from tidegate.operators.joins.join_operator import Pairing, plain_values, without_nulls
from tidegate.operators.joins.lookup_join import Lookup, LookupJoin, Partners
from tidegate.operators.state.keys import key_columns
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.schemas.batches import one_batch

log = logging.getLogger(__name__)

CACHE_HITS = "lookupCacheHits"
"""Metric: number of keys in batches that were found in the cache."""
KEYS_READ = "lookupKeysRead"
"""Metric: number of keys for which the database was queried."""
QUERIES_REPEATED = "lookupQueriesRepeated"
FIRST_PAUSE_S = 0.1
PAUSE_S_MAX = 5.0

Positions = NDArray[np.int64]


class KeyedRows:
    """One generation of the cache of a database lookup: keys with their table rows, and the time at which each key
    expires.

    The rows of a key are stored together. Rows are stored in batches, each at least twice as large as the next newer
    one, so adding n rows one by one copies O(n log n) rows.
    """

    def __init__(self, keys: tuple[str, ...], schema: pa.Schema) -> None:
        self._index = KeyIndex(keys)
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._lonely = 0
        self.expires = np.empty(0, np.float64)
        """Time at which the key in each slot expires, in seconds of the clock.

        Minus infinity for a key whose rows are not stored.
        """
        self.starts = np.empty(0, np.int64)
        self.counts = np.empty(0, np.int64)

    @property
    def size(self) -> int:
        """Returns the number of stored rows, plus the number of keys without rows."""
        return self._rows + self._lonely

    def slots(self, keys: pa.RecordBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the slot of each key, and the index of the first row with each distinct key.

        New keys get new slots.
        """
        found = self._index.upsert(keys)
        if self._index.size > len(self.expires):
            more = max(self._index.size, 2 * len(self.expires)) - len(self.expires)
            self.expires = np.concatenate([self.expires, np.full(more, -np.inf)])
            self.starts = np.concatenate([self.starts, np.zeros(more, np.int64)])
            self.counts = np.concatenate([self.counts, np.zeros(more, np.int64)])
        return found.slots, found.first_rows

    def put(
        self, slots: NDArray[np.int32], expires: NDArray[np.float64] | float, rows: pa.RecordBatch, owners: Positions
    ) -> None:
        """Stores the rows of the keys in `slots`, which expire at `expires` (in seconds).

        `owners` has the slot of each row. Rows of other slots are dropped.
        """
        # Only these keys are looked at, not all slots, because most calls bring a small part of them.
        ascending = np.sort(slots)
        place = np.minimum(np.searchsorted(ascending, owners), len(ascending) - 1)
        kept = np.flatnonzero(ascending[place] == owners)
        kept = kept[np.argsort(place[kept], kind="stable")]
        counts = np.bincount(place[kept], minlength=len(ascending))
        self.expires[slots] = expires
        self.counts[ascending] = counts
        self.starts[ascending] = self._rows + np.cumsum(counts) - counts
        self._lonely += int(np.count_nonzero(counts == 0))
        if len(kept):
            self._append(rows.take(pa.array(kept)))

    def copy(
        self, slots: NDArray[np.int32], other: KeyedRows, of_other: NDArray[np.int32], chosen: NDArray[np.bool_]
    ) -> None:
        """Copies the rows and the expiry times of the `chosen` keys from another generation.

        `slots` and `of_other` have the slots of the keys in this and in the other generation.
        """
        slots, of_other = slots[chosen], of_other[chosen]
        counts = other.counts[of_other]
        begins = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(begins, counts)
        rows = other.take(np.repeat(other.starts[of_other], counts) + within)
        self.put(slots, other.expires[of_other], rows, np.repeat(slots, counts).astype(np.int64))

    def take(self, positions: Positions) -> pa.RecordBatch:
        """Returns the stored rows with these indices."""
        table = pa.Table.from_batches(self._batches, self._schema)
        return one_batch(table.take(pa.array(positions)), "lookup_join")

    def pairing(self, slots: NDArray[np.int32], asked: NDArray[np.bool_] | None = None) -> Pairing:
        """Returns which stored rows belong to each key of a batch, whose rows must all be stored.

        `slots` has the slots of the keys. `asked` is None or a mask: only keys where it is True have a slot, and other
        keys have no rows.
        """
        counts, starts = self.counts[slots], self.starts[slots]
        if asked is not None:
            counts, starts = _spread(counts, asked), _spread(starts, asked)
        order = np.arange(self._rows, dtype=np.int64)
        return Pairing(order, starts, counts, order[:0])

    def _append(self, rows: pa.RecordBatch) -> None:
        self._rows += rows.num_rows
        batches = self._batches
        batches.append(rows)
        while len(batches) > 1 and batches[-2].num_rows < 2 * batches[-1].num_rows:
            newest = batches.pop()
            batches[-1] = pa.concat_batches([batches[-1], newest])


class DatabaseLookup(LookupJoin):
    """Joins rows with a table of a database.

    `clock` returns the time in seconds, `pause` waits for a number of seconds.
    """

    def __init__(
        self,
        lookup: Lookup,
        table: KeyedTable,
        limits: LookupLimits,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(lookup)
        self._table = table
        self._limits = limits
        self._clock = clock
        self._pause = pause

    def open(self, context: BatchContext) -> None:
        """Prepares an empty cache and a database session. The session connects at the first query."""
        lookup = self._lookup
        names = lookup.sides.right_names(lookup.schema, lookup.table)
        columns = lookup.sides.output_schema(lookup.schema, lookup.table, "left")
        self._names = list(names)
        self._values = pa.schema([columns.field(name) for name in names.values()])
        self._session: LookupSession = self._table.session(lookup.sides.keys[1])
        self._young = self._new()
        self._old = self._new()
        self._hits = context.metrics.counter(CACHE_HITS)
        self._keys_read = context.metrics.counter(KEYS_READ)
        self._repeated = context.metrics.counter(QUERIES_REPEATED)

    def partners(self, keys: pa.RecordBatch) -> Partners:
        """Returns the rows of the table for the keys of a batch, from the cache or the database.

        Raises DatabaseError if the database does not answer, and ConfigurationError if it rejects the query.
        """
        asked = without_nulls(keys)
        whole = bool(asked.all())
        known = keys if whole else keys.filter(pa.array(asked))
        young = self._young
        slots, first = young.slots(known)
        self._find(known.take(pa.array(first)), slots[first])
        pairing = young.pairing(slots, None if whole else asked)
        self._limit()
        return Partners(pairing, lambda positions: young.take(positions).columns)

    @property
    def cached_rows(self) -> int:
        """Returns the number of rows in the cache."""
        return self._young.size + self._old.size

    def close(self) -> None:
        """Closes the connection to the database."""
        if hasattr(self, "_session"):
            self._session.close()

    def _new(self) -> KeyedRows:
        return KeyedRows(self._lookup.sides.keys[0], self._values)

    def _find(self, keys: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Loads the rows of these distinct keys into the young generation of the cache.

        Copies them from the old generation, or else queries the database.
        """
        now = self._clock()
        missing = self._young.expires[slots] <= now
        if missing.any() and self._old.size:
            in_old = self._old.slots(keys)[0]
            self._young.copy(slots, self._old, in_old, missing & (self._old.expires[in_old] > now))
            missing = self._young.expires[slots] <= now
        read = int(np.count_nonzero(missing))
        self._hits.inc(len(slots) - read)
        self._keys_read.inc(read)
        if not read:
            return
        keys, slots = keys.filter(pa.array(missing)), slots[missing]
        rows_max = self._lookup.rows_max
        for start, count in key_parts(keys, self._limits.keys_per_query):
            rows_max -= self._read(keys.slice(start, count), slots[start : start + count], rows_max)

    def _read(self, keys: pa.RecordBatch, slots: NDArray[np.int32], rows_max: int) -> int:
        """Queries the rows of `keys` and stores them in the young generation. Returns their number."""
        lookup, ttl_ms = self._lookup, self._limits.ttl_ms
        of_table = lookup.table
        columns = [
            column.cast(self._table.schema.field(name).type)
            for name, column in zip(lookup.sides.keys[1], keys.columns, strict=True)
        ]
        wanted = pa.RecordBatch.from_arrays(columns, names=list(lookup.sides.keys[1]))
        begun = self._clock()
        rows = one_batch(self._answered(wanted, rows_max).cast(of_table), "lookup_join")
        found = key_columns(rows, lookup.sides.keys[1]).rename_columns(list(lookup.sides.keys[0]))
        values = pa.RecordBatch.from_arrays(plain_values(rows, self._names), schema=self._values)
        owners = self._young.slots(found)[0].astype(np.int64)
        expires = np.inf if ttl_ms is None else begun + ttl_ms / 1000
        self._young.put(slots, expires, values, owners)
        return int(rows.num_rows)

    def _answered(self, keys: pa.RecordBatch, rows_max: int) -> pa.Table:
        """Queries the rows of `keys`, and repeats a failed query after growing pauses.

        Raises DatabaseError after `retry_ms`.
        """
        begun = self._clock()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._session.rows(keys, rows_max)
            except DatabaseError as error:
                if self._clock() + pause_s > begun + self._limits.retry_ms / 1000:
                    raise
                log.warning("a query of lookup_join failed, and is repeated in %g s: %s", pause_s, error)
                self._repeated.inc(1)
            self._pause(pause_s)
            pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    def _limit(self) -> None:
        """Drops cached rows until the cache is within its limit.

        Called when the rows of the current batch are no longer needed.
        """
        if self._limits.ttl_ms is None:
            self._young = self._new()
            return
        rows_max = self._limits.cache_rows
        if self._young.size > rows_max // 2:
            self._old, self._young = self._young, self._new()
        if self._old.size + self._young.size > rows_max:
            self._old = self._new()


def _spread(values: Positions, asked: NDArray[np.bool_]) -> Positions:
    """Spreads `values`, one for each row where `asked` is True, over an array for all rows, with 0 elsewhere."""
    spread = np.zeros(len(asked), np.int64)
    spread[asked] = values
    return spread
