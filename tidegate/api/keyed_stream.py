"""`KeyedStream`: rows of one key meet in one subtask, where an operator has state of that key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from tidegate.actors.operators.batches.aggregates import Aggregate
from tidegate.actors.operators.batches.keyed_aggregate import KeyedAggregate
from tidegate.actors.operators.rows.process_operator import ProcessOperator
from tidegate.actors.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.api.process_functions import ConnectedStreams, ProcessFunction

if TYPE_CHECKING:
    from tidegate.api.stream import Stream


class KeyedStream:
    """A stream partitioned by key."""

    def __init__(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self.stream = stream
        """The rows, not partitioned yet."""
        self.keys = keys
        """The key columns."""

    def partitioned(self) -> Stream:
        """The rows, partitioned by key on their way into the next operator."""
        return self.stream._partitioned(Partitioning(PartitioningKind.HASH, self.keys))

    def connect(self, other: KeyedStream | Stream) -> ConnectedStreams:
        """This stream and another keyed one, for one operator to process: rows of one key meet, and share its state.

        Or a broadcast one, all of whose rows meet all keys: `connect(rules.broadcast())`.
        """
        return ConnectedStreams(self, other)

    def process(
        self,
        function: ProcessFunction,
        *,
        schema: pa.Schema | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
    ) -> Stream:
        """Call a `tg.ProcessFunction` with each row, with state and timers of the row's key.

        `schema` is that of the rows that it returns; give it where a table, an aggregation or a key follows.
        """
        keys, timestamps = (self.keys,), (self.stream.timestamp,)
        ProcessOperator(function, keys, timestamps, schema)
        return self.partitioned()._then(
            lambda: ProcessOperator(function, keys, timestamps, schema), schema, name, uid, parallelism, batch_rows
        )

    def aggregate(
        self,
        *,
        emit: Literal["update", "final"] = "update",
        name: str = "aggregate",
        uid: str | None = None,
        parallelism: int | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate each key: `aggregate(n=tg.count(), worst=tg.max("delay"))`.

        emit="update": after each batch one row for every key in it, with the values so far; write them to a table with
        mode="upsert" and these keys. Operators that would take old versions for rows of their own refuse to follow.
        emit="final": one row a key when a bounded input has ended. The columns are the keys, then the aggregates.
        """
        keys, schema = self.keys, self.stream.schema
        operator = KeyedAggregate(keys, aggregates, emit)
        output = None if schema is None else operator.output_schema(schema)
        result = self.partitioned()._then(
            lambda: KeyedAggregate(keys, aggregates, emit), output, name, uid, parallelism
        )
        return result._keyed(keys, updates=emit == "update")
