"""The steps of a ranking: `KeyedStream.top_n` and `WindowedStream.top_n` are made of them.

Rows that come out as they change are one operator behind the exchange by key. The first rows of windows are two: each
subtask takes those of a batch, and behind the exchange by key and window the first of these are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, TypeVar

from tidegate.api.streams.steps.event_time_use import uses_event_time
from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.meanings import meaning, ranking_facts, time_text, ttl_text, window_text, with_rows
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.ranking.top_n import Ranking, TopN
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.local_top import LocalTop
from tidegate.operators.windows.window_rows import WINDOW_END, WINDOW_START
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.operators.windows.window_top import WindowTop
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

S = TypeVar("S", bound=StreamSteps)
RankEmit = Literal["changes", "update", "final"]


def ranking_of(
    keys: tuple[str, ...],
    n: int,
    by: str | Sequence[str],
    descending: bool | Sequence[bool],
    rank: str | None,
    emit: RankEmit,
    ties: bool,
    nulls_last: bool | Sequence[bool] | None,
) -> Ranking:
    """What a caller has asked for. Raises ConfigurationError."""
    if emit not in ("changes", "update", "final"):
        raise ConfigurationError(f'top_n: emit must be "changes", "update" or "final", not {emit!r}')
    columns = column_names(by, "top_n(by=...)")
    down = (descending,) * len(columns) if isinstance(descending, bool) else tuple(descending)
    if rank is not None and not isinstance(rank, str):
        raise ConfigurationError(f"top_n(rank={rank!r}): it is the name of the column for the rank")
    behind = None
    if nulls_last is not None:
        behind = (nulls_last,) * len(columns) if isinstance(nulls_last, bool) else tuple(nulls_last)
    return Ranking(keys, n, columns, down, rank, emit == "changes", emit == "final", behind, ties)


def ranked_stream(
    stream: S,
    ranking: Ranking,
    ttl: str | timedelta | int | None,
    name: str,
    uid: str | None,
    parallelism: int | None,
) -> S:
    """The first rows of each key, as they change. Raises ConfigurationError."""
    ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="top_n(ttl=...)")
    if ttl_ms is not None and stream.timestamp is not None:
        uses_event_time(f"{name}(ttl=...)", stream._inputs)
    factory = partial(TopN, ranking, known_schema(stream, name), stream.timestamp, ttl_ms)
    means = meaning(
        "top n",
        {**ranking_facts(ranking), "ttl": ttl_text(ttl_ms, stream.timestamp)},
        rows={"": (stream.schema, ranking.keys)},
    )
    return _by_keys(stream, ranking)._then(
        factory, factory().output, name, uid, parallelism, meaning=with_rows(means, rows=known_schema(stream, name))
    )


def ranked_windows(
    stream: S,
    ranking: Ranking,
    window: Tumbling | Sliding | Cumulating | None,
    name: str,
    uid: str | None,
    parallelism: int | None,
) -> S:
    """The first rows of each key and window. Without `window` the rows are results of one. Raises ConfigurationError.

    The event time of the result is the last millisecond of its window.
    """
    schema = known_schema(stream, name)
    if window is None and not (isinstance(stream.timestamp, WindowEnd) and stream.timestamp == WINDOW_END):
        raise ConfigurationError(
            f'{name}: emit="final" is for results of a window, whose event time is the end of the window, '
            f"{WINDOW_END!r}; for plain rows use window(...).top_n(...)"
        )
    local = partial(LocalTop, ranking, schema, window, stream.timestamp)
    between = local().output
    uid_before = None if uid is None else f"{uid}-batches"
    factory = partial(WindowTop, ranking, between)
    late = (OutputTag(LATE, between),)
    means = meaning(
        "window top n",
        {
            **ranking_facts(ranking),
            "window": None if window is None else window_text(window),
            "time": time_text(str(stream.timestamp)),
        },
        rows={"": (between, ranking.keys)},
    )
    computes = ", ".join(part.label for part in means.parts)
    rows = stream._then(local, between, f"{name} batches", uid_before, stream._input_parallelism, computes=computes)
    made = _by_keys(rows, ranking)._then(
        factory,
        factory().output,
        name,
        uid,
        parallelism,
        side_outputs=late,
        meaning=with_rows(means, rows=between),
    )
    made.timestamp, made._keyed_by = WindowEnd(WINDOW_END), ranking.keys
    return made


def window_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys of the windows of keys."""
    return (*keys, WINDOW_START, WINDOW_END)


def _by_keys(stream: S, ranking: Ranking) -> S:
    return stream._partitioned(Partitioning(PartitioningKind.HASH, ranking.keys))
