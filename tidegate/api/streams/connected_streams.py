"""`ConnectedStreams` has two streams that one operator processes together. `connect` creates it, with or without keys.

Either both streams have keys or neither has. If the second stream is broadcast, it has no keys, and its rows reach all
keys of the first stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Unpack

from tidegate.api.program import all_or_nothing
from tidegate.api.streams.expression_columns import check_keys
from tidegate.api.streams.state_meanings import meaning
from tidegate.api.streams.step import SlotOptions, Step, StepOptions
from tidegate.api.streams.step_checks import check_methods
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.functions.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
)
from tidegate.operators.functions.process_operator import BroadcastProcessOperator, ProcessOperator
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream


@all_or_nothing(lambda connected: connected._first._program)
class ConnectedStreams:
    """Two streams, usually with different columns, for one operator to process. Made by `Stream.connect`."""

    def __init__(self, first: Stream, second: Stream, keys: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        self._first = first
        self._second = second
        self._keys = keys
        if first._program is not second._program:
            raise ConfigurationError(
                "connect: the streams belong to different environments; make both from one StreamEnvironment"
            )
        if not (second._is_broadcast and not keys[1]):
            self._check_keys()

    def __repr__(self) -> str:
        keys = "" if not any(self._keys) else f"by {' and '.join(', '.join(keys) for keys in self._keys)}; "
        return f"ConnectedStreams({keys}{self._first!r}, {self._second!r})"

    def key_by(self, keys1: str | Sequence[str], keys2: str | Sequence[str]) -> ConnectedStreams:
        """Partitions both streams by key, so that rows with the same key are processed in one subtask.

        - `keys1`, `keys2`: columns of the first and of the second stream. They correspond in their order, and must have
          the same types. State is stored under the names of the first stream's columns.

        Raises ConfigurationError for columns that do not exist or do not correspond.

        Example:

            >>> orders.connect(payments).key_by("user", "user")
            ConnectedStreams(by user and user; Stream('assign_timestamps-1': ...), Stream('assign_timestamps-3': ...))
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
    ) -> Stream:
        """Calls `process1` with each row of the first stream and `process2` with each row of the second.

        The order between the two streams is not defined. If the second stream is broadcast, the function may be a
        `tg.KeyedBroadcastProcessFunction` (the first stream is keyed) or a `tg.BroadcastProcessFunction` (it is not);
        their methods are `process` and `process_broadcast`.

        - `schema`: the columns of the rows that the function returns. Needed if a table, an aggregate or a key follows.
        - `side_outputs`: tags of side outputs to which the function may emit rows.
        - `fire_at_end`: fires the processing-time timers that are pending when the inputs end.
        - `errors_to`: needs `schema`. A name for each stream, `("bad_orders", "bad_rates")`: a row for which the
          function raises goes to the side output of that name, as in `KeyedStream.process`. With None such a row fails
          the job. A row of a broadcast stream always fails the job, because every subtask gets it. Timers that fail use
          the side output of the first stream.
        - `name`, `uid`, `parallelism`, `batch_rows` and slot options: see `Stream`.

        Raises ConfigurationError.

        Example:

            >>> class Both(tg.CoProcessFunction):
            ...     def process1(self, row, context):
            ...         yield {"user": row["user"], "what": "order"}
            ...     def process2(self, row, context):
            ...         yield {"user": row["user"], "what": "payment"}
            >>> connected = orders.connect(payments).key_by("user", "user")
            >>> connected.process(Both(), schema={"user": str, "what": str}).columns
            ['user', 'what']
        """
        check_methods(function)
        columns = as_schema(schema, f"{name}(schema=)") or returned_schema(function, many=True, method="process1")
        keys, timestamps = self._keys, (self._first.timestamp, self._second.timestamp)
        made_by = ProcessOperator
        if isinstance(function, BroadcastProcessFunction):
            self._check_broadcast(function)
            made_by = BroadcastProcessOperator
        else:
            self._check_keys()
        if fire_at_end and not keys[0]:
            raise ConfigurationError(f"{name}: without key_by there are no timers; remove fire_at_end=")
        errors = self._error_tags(errors_to, name)
        operator = partial(made_by, function, keys, timestamps, columns, side_outputs, fire_at_end, errors)
        operator()  # checks the arguments
        first = self._first._by_keys(keys[0]) if keys[0] else self._first
        return first._then(
            Step(
                operator=operator,
                schema=columns,
                options=StepOptions(name, uid, parallelism, batch_rows, slot),
                side_outputs=(*side_outputs, *(tag for tag in errors if tag is not None)),
                meaning=meaning(
                    "process of two streams",
                    {"first keys": keys[0], "second keys": keys[1]},
                    rows={"first": (self._first.schema, keys[0]), "second": (self._second.schema, keys[1])},
                ),
            ),
            second=self._second._by_keys(keys[1]) if keys[1] else self._second,
        )

    def _error_tags(self, errors_to: object, name: str) -> tuple[OutputTag | None, ...]:
        """Returns, for each stream, the tag of the side output for rows that fail, or None.

        Empty if all failures fail the job. Raises ConfigurationError for names that are not valid.
        """
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
            raise ConfigurationError(f"connect: {name} needs a broadcast second stream: a.connect(rules.broadcast())")
        if keyed and not keys1:
            raise ConfigurationError(
                f"connect: {name} is a tg.KeyedBroadcastProcessFunction, and the first stream has no keys: call key_by "
                "before connect, or derive from tg.BroadcastProcessFunction"
            )
        if keys1 and not keyed:
            raise ConfigurationError(
                f"connect: {name} is a tg.BroadcastProcessFunction, which has no keys, but the first stream is keyed "
                f"by {list(keys1)}: derive from tg.KeyedBroadcastProcessFunction"
            )

    def _check_keys(self) -> None:
        keys1, keys2 = self._keys
        if len(keys1) != len(keys2):
            raise ConfigurationError(
                f"connect: the first stream is keyed by {list(keys1)}, the second by {list(keys2)}; both need the same "
                "number of key columns, or neither any"
                "; call key_by on both"
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
