"""`LookupJoin` joins the rows of a stream with a table that was read from outside. `LookupTable` keeps the whole table
in memory.

`database_lookup.py` finds rows of larger tables by queries. `LookupTable` reads the table again at regular intervals,
in a background thread. Its rules:

- A batch is joined with one version of the table. Between two batches a newer version may replace it.
- If reading fails, the join continues with the old version, logs a warning and increments the counter
  `lookupRefreshesFailed`. When the version is older than `stale_ms` the task fails. The first version must be read
  before any row is processed.
- A read that does not return, for example from a database that does not answer, counts as failed after `HANGS_S`. It
  cannot be stopped: a hanging thread stays until its process ends.
- Memory is bounded: a table with more than `rows_max` rows counts as a failed read. During a read there are two
  versions.
- The version with which a row is joined depends on when the row is processed. After a failure rows are processed again
  and may be joined with a newer version, while committed results stay. Use `AsOfJoin` to join as of event time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.functions.batch_functions import BatchContext, BatchFunction
from tidegate.operators.joins.join_operator import JoinSides, Pairing, plain_values, without_nulls
from tidegate.operators.state.keys import key_columns
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import one_batch

log = logging.getLogger(__name__)

FAILED_REFRESHES = "lookupRefreshesFailed"
HANGS_S = 60.0
"""Seconds after which a read of the table counts as hanging.

The task then fails if the version in memory is older than `stale_ms`.
"""
_STRANGERS_MAX = 262_144
"""Greatest number of keys that are in the key index, but not in the table. Above it the index is rebuilt."""

Read = Callable[[], pa.Table]
"""A function that reads the whole table."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Describes a lookup join: `sides` names the keys, `schema` is the schema of the stream, `table` is the schema of
    the table.

    `inner` is True to drop rows without a partner. `rows_max` limits the rows of the table.
    """

    sides: JoinSides
    schema: pa.Schema
    table: pa.Schema
    inner: bool
    rows_max: int

    @property
    def output(self) -> pa.Schema:
        """Returns the columns of the result.

        Raises ConfigurationError if the columns of the stream and the table do not match.
        """
        return self.sides.output_schema(self.schema, self.table, "inner" if self.inner else "left")


class Version:
    """The content of a lookup table at one time, with an index of its keys.

    Raises ConfigurationError if the columns or the number of rows do not fit the `Lookup`.
    """

    def __init__(self, lookup: Lookup, table: pa.Table) -> None:
        if table.num_rows > lookup.rows_max:
            raise ConfigurationError(
                f"lookup_join: the table has {table.num_rows} rows, more than max_rows={lookup.rows_max}; each subtask "
                "has all of it in memory: read fewer rows, or raise max_rows="
            )
        try:
            table = table.select(lookup.table.names).cast(lookup.table)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"lookup_join: the table has other columns than when the program was made: {table.schema}"
                "; restore the former columns, or start the job again to use the new ones"
            ) from error
        names = lookup.sides.right_names(lookup.schema, lookup.table)
        batch = one_batch(table, "lookup_join")
        self._sides = lookup.sides
        self._keys = key_columns(batch, lookup.sides.keys[1]).rename_columns(list(lookup.sides.keys[0]))
        self.values = pa.RecordBatch.from_arrays(plain_values(batch, list(names)), names=list(names.values()))
        self._begin()

    def paired(self, keys: pa.RecordBatch) -> Pairing:
        """Returns which rows of the table belong to each row of `keys`."""
        if self._index.size > self._known + _STRANGERS_MAX:
            self._begin()
        slots = self._index.upsert(keys).slots
        known = (slots < self._known) & without_nulls(keys)
        slots = np.where(known, slots, 0)
        counts = np.where(known, self._counts[slots] if self._known else 0, 0)
        starts = self._starts[slots] if self._known else counts
        return Pairing(self._order, starts, counts.astype(np.int64), self._order[:0])

    def _begin(self) -> None:
        self._index = KeyIndex(tuple(self._keys.schema.names))
        slots = self._index.upsert(self._keys).slots
        self._known = self._index.size
        self._order: NDArray[np.int64] = np.argsort(slots, kind="stable").astype(np.int64)
        self._counts = np.bincount(slots, minlength=self._known)
        self._starts = np.cumsum(self._counts) - self._counts


@dataclass(frozen=True, slots=True)
class Partners:
    """The rows of the table that belong to each row of a batch.

    `columns` returns table rows by their indices, in the types of the result.
    """

    pairing: Pairing
    columns: Callable[[NDArray[np.int64]], list[pa.Array]]


class LookupJoin(BatchFunction):
    """Joins each row of a batch with the rows of a table that have the same keys. Subclasses implement `partners`."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    @property
    def output(self) -> pa.Schema:
        """The columns of the result.

        Raises ConfigurationError if the columns of the stream and the table do not match.
        """
        return self._lookup.output

    def partners(self, keys: pa.RecordBatch) -> Partners:
        """Returns the rows of the table for these keys.

        The columns of `keys` have the names of the stream's key columns.
        """
        raise NotImplementedError

    def process(self, batch: pa.RecordBatch) -> pa.Table | None:
        """Joins the rows of a batch with the table.

        Returns None if there are no results. Raises the exceptions of `partners`.
        """
        output = self._lookup.output
        found = self.partners(key_columns(batch, self._lookup.sides.keys[0]))
        parts = [
            self._joined(batch, rows, found.columns(positions), output)
            for rows, positions in found.pairing.pairs(_STRANGERS_MAX)
        ]
        lonely = np.flatnonzero(found.pairing.counts == 0)
        if not self._lookup.inner and len(lonely):
            missing = [pa.nulls(len(lonely), field.type) for field in list(output)[len(batch.schema) :]]
            parts.append(self._joined(batch, lonely, missing, output))
        return pa.Table.from_batches(parts, output) if parts else None

    def _joined(
        self, batch: pa.RecordBatch, rows: NDArray[np.int64], found: list[pa.Array], output: pa.Schema
    ) -> pa.RecordBatch:
        mine = batch.take(pa.array(rows))
        return pa.RecordBatch.from_arrays([*plain_values(mine, mine.schema.names), *found], schema=output)


class LookupTable(LookupJoin):
    """Joins rows with a whole table in memory. `read` reads the table.

    `refresh_ms` is the interval between reads, in ms, or None to read once, in `open`. The task fails when the last
    successful read is older than `stale_ms`.
    """

    def __init__(self, lookup: Lookup, read: Read, refresh_ms: int | None, stale_ms: int) -> None:
        super().__init__(lookup)
        self._read = read
        self._refresh_ms, self._stale_ms = refresh_ms, stale_ms

    def open(self, context: BatchContext) -> None:
        """Reads the table, and starts the thread that reads it again. Raises the exceptions of `read`."""
        self._failed = context.metrics.counter(FAILED_REFRESHES)
        self._version = Version(self._lookup, self._read())
        self._read_at = time.monotonic()
        self._reading_since: float | None = None
        self._error: Exception | None = None
        self._failures = self._counted = 0
        self._closed = threading.Event()
        if self._refresh_ms is not None:
            self._reader = threading.Thread(target=self._refresh_until_closed, name="tidegate-lookup", daemon=True)
            self._reader.start()

    def partners(self, keys: pa.RecordBatch) -> Partners:
        """Returns the rows of the current version of the table that belong to each row of `keys`.

        Raises ConfigurationError if the version is older than `stale_ms`.
        """
        self._check_age()
        version = self._version
        return Partners(version.paired(keys), lambda positions: version.values.take(pa.array(positions)).columns)

    def close(self) -> None:
        """Stops the background thread, which ends when its current read returns."""
        if hasattr(self, "_closed"):
            self._closed.set()

    def _check_age(self) -> None:
        failures, error = self._failures, self._error
        if failures > self._counted:
            self._failed.inc(failures - self._counted)
            self._counted = failures
        now, since = time.monotonic(), self._reading_since
        hangs = since is not None and now - since > HANGS_S
        if (error is None and not hangs) or (now - self._read_at) * 1000 <= self._stale_ms:
            return
        reason = f"the last error was {type(error).__name__}: {error}"
        if hangs:
            reason = (
                f"a read has not returned for more than {HANGS_S:g} s; set a timeout on the connection or the query "
                "to see the reason"
            )
        raise ConfigurationError(
            f"lookup_join: the table could not be read for {self._stale_ms / 1000:g} s (max_stale=), so the version "
            f"in memory is too old; {reason}"
        ) from error

    def _refresh_until_closed(self) -> None:
        """Reads the table again and again until the function is closed.

        Runs in the background thread, and needs no lock because it only replaces references.
        """
        assert self._refresh_ms is not None
        while not self._closed.wait(self._refresh_ms / 1000):
            begun = self._reading_since = time.monotonic()
            try:
                self._version = Version(self._lookup, self._read())
            except Exception as error:  # noqa: BLE001 - stored and reported; it fails the task when the table is too old
                self._error = error
                self._failures += 1
                log.warning("lookup_join could not read its table, and continues with the version it has: %s", error)
            else:
                self._error, self._read_at = None, begun
            self._reading_since = None
