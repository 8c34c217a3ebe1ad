"""On which edges of a job watermarks are awaited."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
from programs import nodes_of

import tidegate as tg
from tidegate.actors.graph.graph_analysis import with_event_time
from tidegate.actors.graph.stream_graph import translate

Build = Callable[[tg.Stream], object]


def rows(env: tg.StreamEnvironment) -> tg.Stream:
    """Rows with a key, a number and a time."""
    frame = pl.DataFrame({"k": [1], "v": [2], "t": [3]}).with_columns(pl.col("t").cast(pl.Datetime("ms")))
    return env.from_batches([frame.to_arrow()], name="rows").assign_timestamps("t")


def counted(stream: tg.Stream, ttl: str | None = None) -> tg.Stream:
    """A running count by key."""
    return stream.key_by("k").aggregate(n=tg.count(), ttl=ttl)


def changing(stream: tg.Stream) -> tg.Stream:
    """Counts by key, and how many keys have each count."""
    counts = stream.key_by("k").aggregate(n=tg.count(), emit="changes")
    return counts.key_by("n").aggregate(keys=tg.count(), emit="changes")


def dated(stream: tg.Stream) -> tg.Stream:
    """First rows of each number, with a time of their own, counted for an hour."""
    first = stream.key_by("v").deduplicate()
    return counted(first.assign_timestamps("t"), ttl="1h")


def windowed(stream: tg.Stream) -> tg.Stream:
    """First rows of each number, counted in windows."""
    return stream.key_by("v").deduplicate().key_by("k").window(tg.Tumbling("1s")).aggregate(n=tg.count())


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (counted, [False]),
        (changing, [False, False]),
        (lambda s: counted(s, ttl="1h"), [True]),
        (lambda s: s.join(s.select("k", "t", w="v"), on="k"), [False] * 3),
        (lambda s: s.join(s.select("k", "t", w="v").assign_timestamps("t"), on="k", ttl="1h"), [False, True, True]),
        (lambda s: s.key_by("k").top_n(1, by="v"), [False]),
        (lambda s: s.key_by("k").top_n(1, by="v", ttl="1h"), [True]),
        (windowed, [True, True]),
        (dated, [False, True]),
    ],
)
def test_watermarks_are_awaited_where_something_behind_does_anything_for_them(
    build: Build, expected: list[bool]
) -> None:
    """Windows and times to live wait, however far behind; running results do not; a generator begins anew."""
    with tg.StreamEnvironment.local(2) as env:
        build(rows(env))
        graph = with_event_time(translate(nodes_of(env)))

        assert [edge.event_time for edge in graph.edges] == expected
