"""Functions of the user that process streams row by row, with keyed state and timers; and streams that are connected.

A program derives from `ProcessFunction` (one stream) or `CoProcessFunction` (two connected streams), binds state in
`open`, and gives an object of the class to `process`. For a stream that is connected with a broadcast one there are
`KeyedBroadcastProcessFunction` and `BroadcastProcessFunction`. See `docs/process-functions.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.actors.operators.rows.broadcast_process import (
    BroadcastContext,
    BroadcastProcessFunction,
    BroadcastProcessOperator,
    KeyedBroadcastProcessFunction,
)
from tidegate.actors.operators.rows.process_functions import CoProcessFunction, ProcessContext, ProcessFunction
from tidegate.actors.operators.rows.process_operator import ProcessOperator
from tidegate.actors.operators.state.keyed_state import ListState, MapState, ValueState
from tidegate.actors.operators.state.operator_state import BroadcastState, OperatorListState
from tidegate.actors.operators.state.reducing_state import AggregateFunction, AggregatingState, ReducingState
from tidegate.actors.operators.state.state_types import Pickled
from tidegate.actors.operators.state.timers import TimeDomain, TimerService
from tidegate.actors.operators.state.ttl import StateTtl
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from tidegate.api.keyed_stream import KeyedStream
    from tidegate.api.stream import Stream

__all__ = [
    "MAX_WATERMARK_MS",
    "MIN_WATERMARK_MS",
    "AggregateFunction",
    "AggregatingState",
    "BroadcastContext",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CoProcessFunction",
    "ConnectedStreams",
    "KeyedBroadcastProcessFunction",
    "ListState",
    "MapState",
    "OperatorListState",
    "Pickled",
    "ProcessContext",
    "ProcessFunction",
    "ReducingState",
    "StateTtl",
    "TimeDomain",
    "TimerService",
    "ValueState",
]


class ConnectedStreams:
    """Two streams, of different columns as a rule, that one operator processes. Made by `Stream.connect`."""

    def __init__(self, first: Stream | KeyedStream, second: Stream | KeyedStream) -> None:
        from tidegate.api.stream import Stream

        self._first, keys1 = (first, ()) if isinstance(first, Stream) else (first.stream, first.keys)
        self._second, keys2 = (second, ()) if isinstance(second, Stream) else (second.stream, second.keys)
        self._keys: tuple[tuple[str, ...], tuple[str, ...]] = (keys1, keys2)
        if self._first.environment is not self._second.environment:
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
    ) -> Stream:
        """Call `process1` with each row of the first stream and `process2` with each of the second, in no fixed order.

        Where the second stream is a broadcast one, the function may be a `tg.KeyedBroadcastProcessFunction` (the first
        is keyed) or a `tg.BroadcastProcessFunction` (it is not): their methods are `process` and `process_broadcast`.
        `schema` is that of the rows that it returns; give it where a table, an aggregation or a key follows.
        """
        keys, timestamps = self._keys, (self._first.timestamp, self._second.timestamp)
        made_by = ProcessOperator
        if isinstance(function, BroadcastProcessFunction):
            self._check_broadcast(function)
            made_by = BroadcastProcessOperator
        else:
            self._check_keys()
        made_by(function, keys, timestamps, schema)  # raises what is wrong with it here
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
            if _decoded(type1) != _decoded(type2):
                raise ConfigurationError(
                    f"connect: key {key1!r} of the first stream is {type1} and {key2!r} of the second is {type2}; cast "
                    "one of them with with_columns"
                )


def _decoded(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type
