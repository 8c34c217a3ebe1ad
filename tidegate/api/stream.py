"""`Stream`, `KeyedStream` and `ConnectedStreams`: a driver script describes its job with them.

Nothing runs before `StreamEnvironment.execute`. What is known to be wrong raises ConfigurationError in the call that
says it. The three classes make each other, so they share a module; `stream_steps.py` has the steps from a stream to
another one of its kind, `stream_tables.py` those that write.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, Unpack

import pyarrow as pa

from tidegate.actors.operators.batches.aggregates import Aggregate
from tidegate.actors.operators.batches.keyed_aggregate import KeyedAggregate
from tidegate.actors.operators.rows.broadcast_process import (
    BroadcastProcessFunction,
    BroadcastProcessOperator,
    KeyedBroadcastProcessFunction,
)
from tidegate.actors.operators.rows.process_functions import CoProcessFunction, ProcessFunction
from tidegate.actors.operators.rows.process_operator import ProcessOperator
from tidegate.actors.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.api.slot_options import SlotOptions
from tidegate.api.stream_tables import StreamTables
from tidegate.api.updating import Updating
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.dictionaries import decoded_type


class Stream(StreamTables):
    """Batches of rows with the same columns. `schema` is None where it is known only when the job runs.

    Every method that adds an operator takes `name` (shown to people), `uid` (names its state in checkpoints; set it on
    operators whose state must survive a changed program) and `parallelism` (default: the environment's). Those that
    call a function with rows take `batch_rows`: the least and the most rows of a call (see `docs/batches.md`). They
    also take `num_cpus`, `num_gpus` and `resources`: what each subtask reserves on Ray (see `docs/placement.md`).
    """

    def union(self, *others: Stream) -> Stream:
        """All rows of several streams with the same columns, in no particular order."""
        for stream in (self, *others):
            if stream._updating is not None:
                raise stream._updating.refuse("union")
        for other in others:
            if other._program is not self._program:
                raise ConfigurationError("union: the streams belong to different environments")
            if self.schema is not None and other.schema is not None and not self.schema.equals(other.schema):
                mine, theirs = columns_text(self.schema), columns_text(other.schema)
                raise ConfigurationError(f"union: the streams have different columns: {mine} and {theirs}")
        timestamp = self.timestamp if all(other.timestamp == self.timestamp for other in others) else None
        return Stream(self._program, tuple(i for stream in (self, *others) for i in stream._inputs), (), timestamp)

    def connect(self, other: Stream | KeyedStream) -> ConnectedStreams:
        """This stream and another one, for one operator to process: `a.connect(b).key_by("k", "k2").process(...)`."""
        return ConnectedStreams(self, other)

    def key_by(self, *keys: str) -> KeyedStream:
        """Send rows of the same key to the same subtask. Keys are columns: ints, floats, strings, dates, nulls."""
        if not keys:
            raise ConfigurationError("key_by needs at least one column")
        if len(set(keys)) < len(keys):
            raise ConfigurationError(f"key_by({', '.join(keys)}): a column is named twice")
        if self.schema is not None:
            for key in keys:
                if key not in self.schema.names:
                    raise ConfigurationError(
                        f"key_by: there is no column {key!r}; there are {columns_text(self.schema)}"
                    )
        return KeyedStream(self, keys)

    def _keyed(self, keys: tuple[str, ...], updates: bool) -> Stream:
        """The output of an aggregate: one subtask has all rows of a key. With `updates` they replace each other."""
        node = self._inputs[0][0]
        updating = Updating(keys, f"{node.name!r} (uid {node.uid!r})") if updates else None
        return Stream(self._program, self._inputs, keys, self.timestamp, updating)


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

        The other one may also be broadcast, `connect(rules.broadcast())`: then each of its rows meets all keys.
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
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Call a `tg.ProcessFunction` with each row, with state and timers of the row's key.

        `schema` is that of the rows that it returns; give it if a table, an aggregate or a key follows.
        """
        timestamps = (self.stream.timestamp,)
        (factory := partial(ProcessOperator, function, (self.keys,), timestamps, schema))()
        return self.partitioned()._then(factory, schema, name, uid, parallelism, batch_rows, slot)

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

        emit="update" emits, after each batch, one row for every key in it, with the values so far. It replaces the
        key's row before it, so write these rows to a table with mode="upsert" and these keys. Operators that would
        count the replaced rows, too, raise ConfigurationError.
        emit="final" emits one row for each key when a bounded input has ended. The columns are the keys, then the
        aggregates.
        """
        keys, schema = self.keys, self.stream.schema
        operator = KeyedAggregate(keys, aggregates, emit)
        output = None if schema is None else operator.output_schema(schema)
        result = self.partitioned()._then(
            lambda: KeyedAggregate(keys, aggregates, emit), output, name, uid, parallelism
        )
        return result._keyed(keys, updates=emit == "update")


class ConnectedStreams:
    """Two streams, usually with different columns, for one operator to process. Made by `Stream.connect`."""

    def __init__(self, first: Stream | KeyedStream, second: Stream | KeyedStream) -> None:
        self._first, keys1 = (first, ()) if isinstance(first, Stream) else (first.stream, first.keys)
        self._second, keys2 = (second, ()) if isinstance(second, Stream) else (second.stream, second.keys)
        self._keys: tuple[tuple[str, ...], tuple[str, ...]] = (keys1, keys2)
        if self._first.program is not self._second.program:
            raise ConfigurationError("connect: the streams belong to different environments")
        if not (self._second.is_broadcast and not keys2):
            self._check_keys()

    def key_by(self, keys1: str | Sequence[str], keys2: str | Sequence[str]) -> ConnectedStreams:
        """Send rows of the same key to the same subtask: columns of the first stream, and those of the second.

        The columns correspond in order, and must be of the same types; state is stored under the names of the first.
        """
        names1, names2 = ((keys,) if isinstance(keys, str) else tuple(keys) for keys in (keys1, keys2))
        return ConnectedStreams(self._first.key_by(*names1), self._second.key_by(*names2))

    def process(
        self,
        function: CoProcessFunction | BroadcastProcessFunction,
        *,
        schema: pa.Schema | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Call `process1` with each row of the first stream and `process2` with each of the second, in no fixed order.

        If the second stream is broadcast, the function may be a `tg.KeyedBroadcastProcessFunction` (the first stream is
        keyed) or a `tg.BroadcastProcessFunction` (it is not). Their methods are `process` and `process_broadcast`.
        `schema` is that of the rows that it returns; give it if a table, an aggregate or a key follows.
        """
        keys, timestamps = self._keys, (self._first.timestamp, self._second.timestamp)
        made_by = ProcessOperator
        if isinstance(function, BroadcastProcessFunction):
            self._check_broadcast(function)
            made_by = BroadcastProcessOperator
        else:
            self._check_keys()
        made_by(function, keys, timestamps, schema)  # so that a wrong one is refused here
        first, second = (
            stream.key_by(*names).partitioned() if names else stream
            for stream, names in zip((self._first, self._second), keys, strict=True)
        )
        return first._then(
            lambda: made_by(function, keys, timestamps, schema),
            schema,
            name,
            uid,
            parallelism,
            batch_rows,
            slot,
            second=second,
        )

    def _check_broadcast(self, function: BroadcastProcessFunction) -> None:
        (keys1, keys2), name = self._keys, type(function).__name__
        keyed = isinstance(function, KeyedBroadcastProcessFunction)
        if keys2 or not self._second.is_broadcast:
            raise ConfigurationError(
                f"connect: {name} needs a second stream that every subtask gets: a.connect(rules.broadcast())"
            )
        if keyed and not keys1:
            raise ConfigurationError(
                f"connect: {name} is a tg.KeyedBroadcastProcessFunction, and the first stream has no keys: call key_by "
                "before connect, or derive from tg.BroadcastProcessFunction"
            )
        if keys1 and not keyed:
            raise ConfigurationError(
                f"connect: {name} is a tg.BroadcastProcessFunction and knows no keys, but the first stream is keyed by "
                f"{list(keys1)}: derive from tg.KeyedBroadcastProcessFunction"
            )

    def _check_keys(self) -> None:
        keys1, keys2 = self._keys
        if len(keys1) != len(keys2):
            raise ConfigurationError(
                f"connect: the first stream is keyed by {list(keys1)}, the second by {list(keys2)}; both need the same "
                "number of key columns, or neither any"
            )
        if self._first.schema is None or self._second.schema is None:
            return
        for key1, key2 in zip(keys1, keys2, strict=True):
            type1, type2 = self._first.schema.field(key1).type, self._second.schema.field(key2).type
            if decoded_type(type1) != decoded_type(type2):
                raise ConfigurationError(
                    f"connect: key {key1!r} of the first stream is {type1} and {key2!r} of the second is {type2}; cast "
                    "one of them with with_columns"
                )


def timed(
    stream: Stream,
    timestamp: str | None,
    max_out_of_orderness: str | timedelta | int,
    uid: str | None,
    idleness: str | timedelta | int | None = None,
) -> Stream:
    """The stream, with event time from the column `timestamp` if that is named."""
    if timestamp is None:
        return stream
    uid = None if uid is None else f"{uid}-timestamps"
    return stream.assign_timestamps(timestamp, max_out_of_orderness, idleness=idleness, uid=uid)
