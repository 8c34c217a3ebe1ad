"""Watermarks in flight, restored at any parallelism: rows meet theirs, and none becomes late that was in time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_reference import hash_columns_reference, owner_reference
from restored_graphs import (
    BY_KEY,
    FORWARD,
    MAX_PARALLELISM,
    REBALANCE,
    checkpoint_of,
    complete,
    graph_of,
    store_in_flight,
)

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore.restore_task import restore_task
from tidegate.protocol.edges import Partitioning
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS, Watermark
from tidegate.storage.files.file_system_store import FileSystemStore, open_store

KEYS = 12
Sent = list[tuple[int, int] | int]
"""What a sender has sent: rows (key, number), and watermarks."""
Ends = dict[tuple[str, int, int], list[pa.RecordBatch | int]]


def batch(rows: list[tuple[int, int]]) -> pa.RecordBatch:
    """Columns k and n."""
    return pa.record_batch({"k": pa.array([k for k, _ in rows], pa.int64()), "n": pa.array([n for _, n in rows])})


def owner_of(key: int, parallelism: int) -> int:
    """Subtask that has the state of a key."""
    (hashed,) = hash_columns_reference(batch([(key, 0)]), ["k"])
    return owner_reference(int(hashed), MAX_PARALLELISM, parallelism)


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def graph(up: int, down: int, partitioning: Partitioning = BY_KEY) -> JobGraph:
    """A source that feeds one operator."""
    return graph_of({"source": up, "count": down}, ("source", "count", partitioning))


def restored(
    store: FileSystemStore, ends: Ends, old: JobGraph, new: JobGraph
) -> dict[ChannelId, list[tuple[int, int]]]:
    """What the channels of the new graph start with: the number of each row, and the watermark before it."""
    point = complete(store, checkpoint_of(old, in_flight=store_in_flight(store, "source", "count", ends)))
    found: dict[ChannelId, list[tuple[int, int]]] = {}
    for task in new.tasks():
        for channel, elements in restore_task(store, point, new, task).in_flight:
            reached_ms = MIN_WATERMARK_MS
            for element in elements:
                if isinstance(element, Watermark):
                    assert element.timestamp_ms > reached_ms
                    reached_ms = element.timestamp_ms
                else:
                    found.setdefault(channel, []).extend((n, reached_ms) for n in element["n"].to_pylist())
    return found


@st.composite
def sent(draw: st.DrawFn) -> tuple[int, Sent]:
    """How many receivers a sender has, and what it has sent to them."""
    elements, watermark_ms = Sent(), 0
    for number, step in enumerate(draw(st.lists(st.integers(0, 4), min_size=8, max_size=24))):
        watermark_ms += step
        elements.append((draw(st.integers(0, KEYS - 1)), number) if draw(st.booleans()) else watermark_ms)
    return draw(st.integers(1, 4)), elements


def judged(elements: Sent) -> dict[int, int]:
    """The number of each row, and the watermark before it."""
    reached_ms, found = MIN_WATERMARK_MS, dict[int, int]()
    for element in elements:
        if isinstance(element, int):
            reached_ms = element
        else:
            found[element[1]] = reached_ms
    return found


def held(elements: Sent, upstream: int, downs: int, data: st.DataObject) -> Ends:
    """What both ends of the channels of one sender held: each receiver has come somewhere, and the sender too."""
    ends = Ends()
    for down in range(downs):
        mine = [e for e in elements if isinstance(e, int) or owner_of(e[0], downs) == down]
        taken = data.draw(st.integers(0, len(mine) // 2))
        left = data.draw(st.integers(taken, len(mine)))
        for direction, first, last in (("input", taken, left), ("output", left, len(mine))):
            before = [e for e in mine[:first] if isinstance(e, int)][-1:]
            part = [e if isinstance(e, int) else batch([e]) for e in (*before, *mine[first:last])]
            if any(not isinstance(e, int) for e in part):
                ends[direction, upstream, down] = part
    return ends


@given(first=sent(), second=sent(), downs=st.integers(1, 4), data=st.data())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_each_row_meets_its_watermark_at_any_parallelism_of_the_receivers(
    store: FileSystemStore, first: tuple[int, Sent], second: tuple[int, Sent], downs: int, data: st.DataObject
) -> None:
    """Several old channels of a sender may come to one: the one that is furthest behind in event time goes first."""
    store.delete_tree("")
    old_downs, senders = first[0], [first[1], second[1]]
    ends = {end: part for up, e in enumerate(senders) for end, part in held(e, up, old_downs, data).items()}

    found = restored(store, ends, graph(2, old_downs), graph(2, downs))

    for channel, rows in found.items():
        assert dict(rows).items() <= judged(senders[channel.upstream]).items()
    there = [n for part in ends.values() for e in part if not isinstance(e, int) for n in e["n"].to_pylist()]
    assert sorted(n for rows in found.values() for n, _ in rows) == sorted(there)


def test_old_channels_of_one_sender_are_put_together_by_their_watermarks(store: FileSystemStore) -> None:
    """One receiver was behind the other: its rows come first, or they would be late by what the other one has heard."""
    keys = [next(key for key in range(KEYS) if owner_of(key, 2) == down) for down in range(2)]
    ends: Ends = {
        ("input", 0, 0): [20, batch([(keys[0], 1)]), 30, batch([(keys[0], 2)])],
        ("input", 0, 1): [10, batch([(keys[1], 3)]), 20, batch([(keys[1], 4)])],
        ("output", 0, 1): [30, batch([(keys[1], 5)]), 40],
    }

    (rows,) = restored(store, ends, graph(1, 2), graph(1, 1)).values()

    assert rows == [(3, 10), (1, 20), (4, 20), (2, 30), (5, 30)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (graph(2, 2), graph(3, 2)),
        (graph(2, 2), graph(1, 2)),
        (graph(2, 1, REBALANCE), graph(2, 2, FORWARD)),
    ],
    ids=["more senders", "fewer", "forward"],
)
def test_watermarks_are_left_out_where_rows_of_another_sender_may_follow(
    store: FileSystemStore, old: JobGraph, new: JobGraph
) -> None:
    """A split of the sender that was behind may be read by another one now: its rows must not be late."""
    key = next(key for key in range(KEYS) if owner_of(key, 2) == 0)

    found = restored(store, {("input", 0, 0): [50, batch([(key, 1)]), 60, batch([(key, 2)])]}, old, new)

    assert [*found.values()] == [[(1, MIN_WATERMARK_MS), (2, MIN_WATERMARK_MS)]]


@pytest.mark.parametrize(
    ("sources", "known"), [(2, [20, 30]), (3, [MIN_WATERMARK_MS] * 2)], ids=["as they were", "more"]
)
def test_watermarks_are_left_out_if_a_step_before_the_sender_has_changed(
    store: FileSystemStore, sources: int, known: list[int]
) -> None:
    """A sender that was as parallel as the source had the rows of one split. Now a slower one may come to it."""
    key = next(key for key in range(KEYS) if owner_of(key, 2) == 0)
    ends: Ends = {("input", 0, 0): [20, batch([(key, 1)]), 30, batch([(key, 2)])]}
    old, new = (
        graph_of(
            {"first": first, "source": 2, "count": 2},
            ("first", "source", FORWARD if first == 2 else REBALANCE),
            ("source", "count", BY_KEY),
        )
        for first in (2, sources)
    )

    (rows,) = restored(store, ends, old, new).values()

    assert rows == [*zip((1, 2), known, strict=True)]


def test_what_an_older_version_has_stored_is_restored_as_it_was(store: FileSystemStore) -> None:
    """Without watermarks: the old channels one after the other, each in its order."""
    keys = [next(key for key in range(KEYS) if owner_of(key, 2) == down) for down in range(2)]
    ends: Ends = {
        ("output", 0, 0): [batch([(keys[0], 2)])],
        ("input", 0, 1): [batch([(keys[1], 3)])],
        ("input", 0, 0): [batch([(keys[0], 1)])],
    }

    (rows,) = restored(store, ends, graph(1, 2), graph(1, 1)).values()

    assert rows == [(n, MIN_WATERMARK_MS) for n in (1, 2, 3)]
