"""Builds the steps of a ranking, for `KeyedStream.top_n` and `WindowedStream.top_n`.

A ranking without windows is one operator after the exchange by key. A ranking in windows is two operators: the first
one selects the first rows of each batch, and the second one, after the exchange by key and window, selects the first of
these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.event_time import uses_event_time
from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.state_meanings import meaning, ranking_facts, time_text, ttl_text, window_text, with_rows
from tidegate.api.streams.step import Step, StepOptions
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.ranking.top_n import Ranking, TopN
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.operators.windows.window_top import LocalTop, WindowTop
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream

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
    """Returns the `Ranking` that the arguments of `top_n` describe.

    Raises ConfigurationError for arguments that are not valid.
    """
    if emit not in ("changes", "update", "final"):
        raise ConfigurationError(f'top_n: emit must be "changes", "update" or "final", not {emit!r}')
    columns = column_names(by, "top_n(by=...)")
    down = (descending,) * len(columns) if isinstance(descending, bool) else tuple(descending)
    if rank is not None and not isinstance(rank, str):
        raise ConfigurationError(
            f'top_n(rank={rank!r}): give a column name, such as rank="rank", or None for no rank column'
        )
    behind = None
    if nulls_last is not None:
        behind = (nulls_last,) * len(columns) if isinstance(nulls_last, bool) else tuple(nulls_last)
    return Ranking(keys, n, columns, down, rank, emit == "changes", emit == "final", behind, ties)


def ranked_stream(stream: Stream, ranking: Ranking, ttl: str | timedelta | int | None, options: StepOptions) -> Stream:
    """Builds the step of `KeyedStream.top_n`: the first rows of each key, which change with the input.

    Raises ConfigurationError for columns that do not fit.
    """
    ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="top_n(ttl=...)")
    if ttl_ms is not None and stream.timestamp is not None:
        uses_event_time(f"{options.name}(ttl=...)", stream._inputs)
    schema = known_schema(stream, options.name)
    operator = partial(TopN, ranking, schema, stream.timestamp, ttl_ms)
    means = meaning(
        "top n",
        {**ranking_facts(ranking), "ttl": ttl_text(ttl_ms, stream.timestamp)},
        rows={"": (stream.schema, ranking.keys)},
    )
    rows = stream._by_keys(ranking.keys)._then(
        Step(operator=operator, schema=operator().output, options=options, meaning=with_rows(means, rows=schema))
    )
    keys = ranking.keys if ranking.changes else (*ranking.keys, str(ranking.rank))
    changelog = ChangelogMode.of(rows._inputs[0][0], keys, changes=ranking.changes)
    return rows._derived(keyed_by=keys, timestamp=rows.timestamp, changelog=changelog)


def ranked_windows(
    stream: Stream, ranking: Ranking, window: Tumbling | Sliding | Cumulating | None, options: StepOptions
) -> Stream:
    """Builds the steps of a ranking in windows: the first rows of each key and window.

    `window` is None if the rows are results of windows already. The event time of the result is the last millisecond of
    the window. Raises ConfigurationError for a stream that has no windows.
    """
    schema = known_schema(stream, options.name)
    if window is None and not (isinstance(stream.timestamp, WindowEnd) and stream.timestamp == WINDOW_END):
        raise ConfigurationError(
            f'{options.name}: emit="final" is for results of a window, whose event time is the end of the window, '
            f"{WINDOW_END!r}; for plain rows use window(...).top_n(...)"
        )
    local = partial(LocalTop, ranking, schema, window, stream.timestamp)
    between = local().output
    operator = partial(WindowTop, ranking, between)
    means = meaning(
        "window top n",
        {
            **ranking_facts(ranking),
            "window": None if window is None else window_text(window),
            "time": time_text(str(stream.timestamp)),
        },
        rows={"": (between, ranking.keys)},
    )
    rows = stream._then(
        Step(
            operator=local,
            schema=between,
            options=options.part("batches", stream._input_parallelism),
            computes=", ".join(part.label for part in means.parts),
        )
    )
    made = rows._by_keys(ranking.keys)._then(
        Step(
            operator=operator,
            schema=operator().output,
            options=options,
            side_outputs=(OutputTag(LATE, between),),
            meaning=with_rows(means, rows=between),
        )
    )
    return made._derived(keyed_by=ranking.keys, timestamp=WindowEnd(WINDOW_END))


def window_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the key columns of windowed results: the keys, and the bounds of the window."""
    return (*keys, WINDOW_START, WINDOW_END)
