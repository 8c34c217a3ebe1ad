"""`KafkaRecords` converts rows to Kafka records, and `KafkaAtLeastOnce` sends records as they arrive.

Rules:

- `KafkaRecords` runs in the task, chained before the sink, so that a row that cannot be a record fails like a row of
  any other step: it fails the job, or goes to a side output (`errors_to`).
- In a stream of changes each batch is reduced to the net change of each key. The newest record of a key is therefore
  the current row of the key, or a tombstone if the row was deleted.
- `KafkaAtLeastOnce` sends each batch immediately. A checkpoint waits until all records are delivered, and commits
  nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from tidegate.connectors.formats.format import RowChanges
from tidegate.connectors.kafka.encoding import RecordLayout, RecordMaker
from tidegate.connectors.kafka.sink import KafkaSender, KafkaTarget
from tidegate.connectors.sink import CommitContext, Sink, SinkContext
from tidegate.operators.changes import CHANGE, rows_that_come
from tidegate.operators.functions.failing_rows import FailingRows
from tidegate.operators.operator import Columns, Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import blame, failure, first_row
from tidegate.protocol.edges import OutputTag
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import widened
from tidegate.storage.state.snapshot import StateTable


class KafkaRecords(Operator):
    """Converts rows to Kafka records, by the `layout` of a record.

    With `deletes` the rows are changes, and the key columns of the layout identify a row. Failing rows go to the side
    output `errors_to`, or fail the job if it is None.
    """

    def __init__(
        self, target: KafkaTarget, layout: RecordLayout, errors_to: OutputTag | None = None, *, deletes: bool = False
    ) -> None:
        self._target = target
        self._layout = layout
        self._deletes = deletes
        self._failing = None if errors_to is None else FailingRows(errors_to)
        self._maker: RecordMaker | None = None

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the columns that the record layout reads, or None (all columns) if failing rows go to a side
        output.
        """
        if self._failing is not None:
            return None
        return self._layout.columns | ({CHANGE} if self._deletes else set())

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Creates the encoders of the record format."""
        super().open(context, restored)
        self._maker = RecordMaker(
            self._layout, self._target.topic, self._target.record_limit, self._target.known_topics()
        )

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the Kafka records of a batch.

        Raises OperatorError for a row that cannot be converted, unless it goes to a side output.
        """
        assert self._maker is not None
        with blame(self.context, batch):
            rows = widened(batch)
            changes = None
            if self._deletes:
                changes = net_changes(rows, self._layout.key, drops_passing=self._layout.writes_changes)
            made = self._maker.make(rows, changes)
        if made.bad:
            self._fail(rows, made.bad)
        if made.records.num_rows:
            emit(made.records)

    def close(self) -> None:
        """Closes the encoders of the record format."""
        if self._maker is not None:
            self._maker.close()

    def _fail(self, rows: pa.RecordBatch, bad: dict[int, str]) -> None:
        if self._failing is None:
            number = min(bad)
            row = first_row(rows.slice(number, 1))
            error = ConfigurationError(
                f"{bad[number]}. Correct or filter such rows in a step before, or send them to a side output with "
                'to_kafka(errors_to="...")'
            )
            raise failure(self.context, error, f"row {number} of the batch", row, rows)
        for number, reason in bad.items():
            self._failing.add(number, ValueError(reason))
        self._failing.leave(rows, self.context)


def net_changes(rows: pa.RecordBatch, keys: tuple[str, ...], *, drops_passing: bool = False) -> RowChanges:
    """Returns the net change of each key in a batch of changes, ordered by the last row of each key.

    A change includes the previous row if the batch retracts it. With `drops_passing`, a row that is inserted and
    deleted within the batch is no change. Pass it only if such rows do not occur in other batches.
    """
    index = KeyIndex(keys)
    slots = index.upsert(rows).slots
    numbers = np.arange(rows.num_rows, dtype=np.int64)
    last = np.empty(index.size, dtype=np.int64)
    last[slots] = numbers  # NumPy assigns in order: the last row stays
    first = np.empty(index.size, dtype=np.int64)
    first[slots[::-1]] = numbers[::-1]
    order = np.argsort(last)
    first = first[order]
    last = last[order]
    comes = rows_that_come(rows)
    before = np.where(comes[first], -1, first)
    after = np.where(comes[last], last, -1)
    passes = (before < 0) & (after < 0)
    if drops_passing:
        return RowChanges(before[~passes], after[~passes])
    return RowChanges(np.where(passes, last, before), after)


class KafkaAtLeastOnce(Sink):
    """A sink that sends Kafka records as they arrive, with at-least-once delivery."""

    def __init__(self, target: KafkaTarget) -> None:
        self.target = target
        self._sender: KafkaSender | None = None

    def check(self) -> None:
        """Checks the Kafka servers and topics when the job is submitted.

        Raises ConfigurationError if they cannot be used.
        """
        self.target.check()

    def open(self, context: SinkContext) -> None:
        """Creates the Kafka producer."""
        self._sender = KafkaSender(self.target)

    def write(self, batch: pa.RecordBatch) -> None:
        """Sends the records of a batch."""
        assert self._sender is not None
        self._sender.send(batch)

    def prepare(self) -> Iterable[bytes]:
        """Waits until all records are delivered. Returns nothing to commit."""
        assert self._sender is not None
        self._sender.flush()
        return ()

    def close(self) -> None:
        """Closes the producer. Records that are not delivered yet are dropped."""
        if self._sender is not None:
            self._sender.close()

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Does nothing, because records are visible as soon as they are delivered."""
