"""`ConnectedStreams`: two streams that one operator processes, side by side. Made by `connect`, with keys or without.

Both have keys or neither has, unless the second is broadcast: then its rows meet all keys of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar, Unpack

from tidegate.api.streams.steps.columns import check_keys
from tidegate.api.streams.steps.meanings import meaning
from tidegate.api.streams.steps.method_checks import check_methods
from tidegate.api.streams.steps.slot_options import SlotOptions
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.functions.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
)
from tidegate.operators.functions.process_operator import BroadcastProcessOperator, ProcessOperator
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema

S = TypeVar("S", bound=StreamSteps)


class ConnectedStreams(Generic[S]):
    """Two streams, usually with different columns, for one operator to process. Made by `Stream.connect`."""

    def __init__(self, first: S, second: S, keys: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        self._first, self._second, self._keys = first, second, keys
        if first._program is not second._program:
            raise ConfigurationError("connect: the streams belong to different environments")
        if not (second._is_broadcast and not keys[1]):
            self._check_keys()

    def key_by(self, keys1: str | Sequence[str], keys2: str | Sequence[str]) -> ConnectedStreams[S]:
        """Send rows of the same key to the same subtask: columns of the first stream, and those of the second.

        The columns correspond in order, and must be of the same types; state is stored under the names of the first.
        """
        names1, names2 = (column_names(keys, "connect: key_by") for keys in (keys1, keys2))
        for names, stream in ((names1, self._first), (names2, self._second)):
            check_keys(names, stream.schema)
        return ConnectedStreams(self._first, self._second, (names1, names2))

    def process(
        self,
        function: CoProcessFunction | BroadcastProcessFunction,
        *,
        schema: SchemaLike | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        side_outputs: Sequence[OutputTag] = (),
        fire_at_end: bool = False,
        errors_to: tuple[OutputTag | str | None, OutputTag | str | None] | None = None,
        **slot: Unpack[SlotOptions],
    ) -> S:
        """Call `process1` with each row of the first stream and `process2` with each of the second, in no fixed order.

        If the second stream is broadcast, the function may be a `tg.KeyedBroadcastProcessFunction` (the first stream is
        keyed) or a `tg.BroadcastProcessFunction` (it is not). Their methods are `process` and `process_broadcast`.
        `schema` is that of the rows that it returns; give it if a table, an aggregate or a key follows. With
        `side_outputs` it may emit rows under these tags as well. Processing-time timers that are left when the inputs
        end fire with `fire_at_end=True` alone.

        `errors_to`, which needs `schema`, has a name for each stream: `("bad_orders", "bad_rates")`. A row for which
        the function raises goes to the side output of that name, as in `KeyedStream.process`. None: it fails the job,
        and so does a row of a broadcast stream, which every subtask gets. Timers that fail go where rows of the first
        stream go.
        """
        check_methods(function)
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(function, many=True, method="process1")
        keys, timestamps = self._keys, (self._first.timestamp, self._second.timestamp)
        made_by = ProcessOperator
        if isinstance(function, BroadcastProcessFunction):
            self._check_broadcast(function)
            made_by = BroadcastProcessOperator
        else:
            self._check_keys()
        if fire_at_end and not keys[0]:
            raise ConfigurationError(f"{name}: without key_by there are no timers; leave fire_at_end= out")
        errors = self._error_tags(errors_to, name)
        (factory := partial(made_by, function, keys, timestamps, schema, side_outputs, fire_at_end, errors))()
        first, second = (
            stream._partitioned(Partitioning(PartitioningKind.HASH, names)) if names else stream
            for stream, names in zip((self._first, self._second), keys, strict=True)
        )
        return first._then(
            factory,
            schema,
            name,
            uid,
            parallelism,
            batch_rows,
            slot,
            second=second,
            side_outputs=(*side_outputs, *(tag for tag in errors if tag is not None)),
            meaning=meaning(
                "process of two streams",
                {"first keys": keys[0], "second keys": keys[1]},
                rows={"first": (self._first.schema, keys[0]), "second": (self._second.schema, keys[1])},
            ),
        )

    def _error_tags(self, errors_to: object, name: str) -> tuple[OutputTag | None, ...]:
        """The tags of rows that fail, by stream; none if rows that fail fail the job. ConfigurationError."""
        if errors_to is None:
            return ()
        if not isinstance(errors_to, tuple | list) or len(errors_to) != 2:
            raise ConfigurationError(
                f"{name}(errors_to={errors_to!r}): the streams have columns of their own, so give a name for each, or "
                'None: errors_to=("bad_first", None)'
            )
        if errors_to[1] is not None and self._second._is_broadcast:
            raise ConfigurationError(
                f"{name}(errors_to={errors_to!r}): every subtask gets the rows of a broadcast stream, and all must "
                "change their state alike; give None for it, and let the function keep such rows out itself"
            )
        return tuple(
            None if each is None else error_tag(each, stream.schema, name, keys)
            for each, stream, keys in zip(errors_to, (self._first, self._second), self._keys, strict=True)
        )

    def _check_broadcast(self, function: BroadcastProcessFunction) -> None:
        (keys1, keys2), name = self._keys, type(function).__name__
        keyed = isinstance(function, KeyedBroadcastProcessFunction)
        if keys2 or not self._second._is_broadcast:
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
