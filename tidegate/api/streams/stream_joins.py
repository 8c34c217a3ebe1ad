"""`StreamJoins`: the methods of a stream that join it with another one, by key and event time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Self

import pyarrow as pa

from tidegate.actors.operators.joins.interval_join import IntervalJoin
from tidegate.actors.operators.joins.join_columns import JoinHow, JoinSides
from tidegate.actors.operators.joins.window_join import WindowJoin
from tidegate.actors.operators.windows.window_specs import Sliding, Tumbling
from tidegate.actors.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.api.streams.stream_changes import StreamChanges
from tidegate.api.streams.stream_steps import StreamSteps
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

On = str | Sequence[str | tuple[str, str]]
"""Columns that must be equal: a name in both streams, or a pair of names."""


class StreamJoins(StreamChanges):
    """Joins of this stream, the left one, with another."""

    def join(
        self,
        other: StreamSteps,
        *,
        on: On,
        window: Tumbling | Sliding,
        how: JoinHow = "inner",
        suffix: str = "_right",
        name: str = "join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join rows with the same key in the same window: `a.join(b, on="auction", window=tg.Tumbling("10s"))`.

        `on` is a column of both streams, or several, each a name or a pair of names, left and right. `how` is `inner`,
        `left`, `right`, `full`, `semi` or `anti`. The result has the columns of the left stream, those of the right one
        without its keys (with `suffix` where the left has the name as well), and `window_start` and `window_end`. A
        window is joined when the watermarks of both streams have passed its end; rows that come later are dropped.
        """
        sides, schemas = _sides("join", self, other, on, suffix)
        make = partial(WindowJoin, sides, schemas, window, how)
        return self._joined(other, sides, make().output, make, name, uid, parallelism, "window_end")

    def interval_join(
        self,
        other: StreamSteps,
        *,
        on: On,
        between: tuple[str | timedelta | int, str | timedelta | int],
        suffix: str = "_right",
        name: str = "interval_join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """Join rows with the same key whose times are near: `a.interval_join(b, on="id", between=("-5min", "10min"))`.

        A pair is one whose right row is between 5 minutes before and 10 minutes after the left one, bounds included. It
        is emitted when the later row comes. Columns are as of `join`, without windows. Rows that the watermark of both
        streams has passed are dropped.
        """
        sides, schemas = _sides("interval_join", self, other, on, suffix)
        lower, upper = (_signed_ms(bound) for bound in between)
        make = partial(IntervalJoin, sides, schemas, lower, upper)
        return self._joined(other, sides, make().schema, make, name, uid, parallelism, None)

    def _joined(
        self,
        other: StreamSteps,
        sides: JoinSides,
        schema: pa.Schema,
        make: partial[WindowJoin] | partial[IntervalJoin],
        name: str,
        uid: str | None,
        parallelism: int | None,
        timestamp: str | None,
    ) -> Self:
        left = self._partitioned(Partitioning(PartitioningKind.HASH, sides.keys[0]))
        right = other._partitioned(Partitioning(PartitioningKind.HASH, sides.keys[1]))
        joined = left._then(make, schema, name, uid, parallelism, second=right)
        joined.timestamp = timestamp
        return joined


def _sides(
    what: str, left: StreamSteps, right: StreamSteps, on: On, suffix: str
) -> tuple[JoinSides, tuple[pa.Schema, pa.Schema]]:
    """Keys, times and columns of both streams. ConfigurationError if something is not known, or does not fit."""
    if left.program is not right.program:
        raise ConfigurationError(f"{what}: the streams belong to different environments")
    if left.schema is None or right.schema is None:
        which = "left" if left.schema is None else "right"
        raise ConfigurationError(
            f"{what}: the columns of the {which} stream are known only when the job runs; pass schema= to the step "
            "that makes it"
        )
    if left.timestamp is None or right.timestamp is None:
        which = "left" if left.timestamp is None else "right"
        raise ConfigurationError(
            f"{what}: the {which} stream has no event time; name its column with timestamp= at the source, or with "
            "assign_timestamps"
        )
    pairs = [(each, each) if isinstance(each, str) else tuple(each) for each in ([on] if isinstance(on, str) else on)]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigurationError(f"{what}: on={on!r}: give names of columns, or pairs of a left and a right name")
    keys = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    return JoinSides(keys, (left.timestamp, right.timestamp), suffix), (left.schema, right.schema)


def _signed_ms(bound: str | timedelta | int) -> int:
    """A duration, which may be negative."""
    if isinstance(bound, str) and bound.lstrip().startswith("-"):
        return -parse_duration_ms(bound.lstrip()[1:])
    if isinstance(bound, timedelta) and bound < timedelta():
        return -parse_duration_ms(-bound)
    if isinstance(bound, int) and bound < 0:
        return bound
    return parse_duration_ms(bound)
