"""`BatchWriter`: writes the micro-batches of a query to a log, each once and in order.

`StreamFeed` calls it from Spark's `foreachBatch`. Spark numbers micro-batches from 0. Its checkpoint records what a
batch reads before it begins, and that it is done afterwards. After a crash Spark runs the last batch again. Rules:
* A batch that is in the log already is skipped: it was written before the crash.
* Only the batch after the newest one is written. Any other number, or another query, means that Spark's checkpoint and
  the log do not belong together. To write it would lose or repeat rows, so it is an error.
* If two writers write the same batch, the first one counts, and the other drops its files.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

from tidegate.spark_bridge.dataframes.manifest import StagedFile
from tidegate.spark_bridge.errors import SparkBridgeError
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogBatch, batch_after, data_folder
from tidegate.spark_bridge.streams.log_claims import HeldClaim
from tidegate.spark_bridge.streams.log_ledger import LogLedger
from tidegate.storage.errors import AlreadyExistsError, NotFoundError, StorageError

_logger = logging.getLogger(__name__)

R = TypeVar("R")


class BatchWriter(Generic[R]):
    """Writes one batch at a time. `stage(rows, folder)` writes the rows of a batch as files in a folder."""

    def __init__(
        self,
        log: BatchLog,
        lanes: int,
        ledger: LogLedger,
        claim: HeldClaim,
        stage: Callable[[R, str], tuple[StagedFile, ...]],
    ) -> None:
        self._log = log
        self._lanes = lanes
        self._ledger = ledger
        self._claim = claim
        self._stage = stage

    def write(self, rows: R, batch_id: int, query_id: str) -> None:
        """Wait for room, and put a batch into the log. It is there when this returns, written now or earlier.

        Raises SparkBridgeError if the batch does not follow the newest one or another job feeds the log, StorageError,
        WriterStopped, and what `stage` raises.
        """
        self._claim.check()
        newest = self._newest_before(batch_id)
        self._check_follows(newest, batch_id, query_id)
        if newest is not None and newest.batch_id == batch_id:
            return
        self._ledger.await_room()
        folder = data_folder(batch_id, uuid.uuid4().hex[:8])
        batch = batch_after(newest, batch_id, query_id, self._stage(rows, folder), self._lanes)
        self._ledger.append(self._committed(batch, folder))

    def _newest_before(self, batch_id: int) -> LogBatch | None:
        """The newest batch. Reads those that a writer believed dead has added since the log was read."""
        newest = self._ledger.newest
        while batch_id > (expected := 0 if newest is None else newest.batch_id + 1):
            try:
                newest = self._log.read(expected)
            except NotFoundError:
                break
            self._ledger.append(newest)
        return newest

    def _committed(self, batch: LogBatch, folder: str) -> LogBatch:
        try:
            self._log.commit(batch)
        except AlreadyExistsError:
            there = self._log.read(batch.batch_id)
            if there == batch:
                return batch  # An earlier try of this create had worked, but its answer was lost.
            self._drop(folder)
            if there.query_id != batch.query_id:
                raise self._other_query(there, batch.query_id) from None
            _logger.info("batch %d of %s was written by another attempt", batch.batch_id, self._log.url)
            return there
        return batch

    def _check_follows(self, newest: LogBatch | None, batch_id: int, query_id: str) -> None:
        expected = 0 if newest is None else newest.batch_id + 1
        if newest is not None and newest.query_id != query_id:
            raise self._other_query(newest, query_id)
        if batch_id not in (expected, expected - 1):
            raise SparkBridgeError(
                f"Spark comes with batch {batch_id}, and the log {self._log.url} goes on with batch {expected}: "
                f"Spark's checkpoint and the log do not belong together. {_ADVICE}"
            )

    def _other_query(self, newest: LogBatch, query_id: str) -> SparkBridgeError:
        return SparkBridgeError(
            f"query {query_id} is not the one that has written the log {self._log.url} up to batch {newest.batch_id} "
            f"({newest.query_id}): Spark's checkpoint was deleted or exchanged, so nobody knows which rows the log has "
            f"already. {_ADVICE}"
        )

    def _drop(self, folder: str) -> None:
        try:
            self._log.store.delete_tree(folder)
        except StorageError as error:
            _logger.warning("could not delete %s/%s, which nobody needs: %s", self._log.url, folder, error)


_ADVICE = (
    "Put the checkpoint folder back that belongs to the log, or start the job without restore: it then has a new log, "
    "and the query begins anew"
)
