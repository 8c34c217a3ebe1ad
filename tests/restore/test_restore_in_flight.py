"""In-flight elements reach, once and in order, the subtask that has to process them now."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_reference import hash_columns_reference, owner_reference
from restored_graphs import (
    BROADCAST,
    BY_KEY,
    FORWARD,
    MAX_PARALLELISM,
    REBALANCE,
    check_fits,
    checkpoint_of,
    complete,
    graph_of,
    store_in_flight,
)

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore.restore_task import restore_task
from tidegate.protocol.edges import Partitioning
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import SubtaskIndex, VertexId

Row = tuple[int, int]
"""Key and number; the numbers of an old channel ascend."""

KEYS = 40


def owner_of(key: int, parallelism: int) -> int:
    """Subtask that has the state of a key."""
    (hashed,) = hash_columns_reference(batch([(key, 0)]), ["k"])
    return owner_reference(int(hashed), MAX_PARALLELISM, parallelism)


def batch(rows: list[Row]) -> pa.RecordBatch:
    """Columns k and n."""
    return pa.record_batch({"k": pa.array([k for k, _ in rows], pa.int64()), "n": pa.array([n for _, n in rows])})


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def graph(up: int, down: int, partitioning: Partitioning = BY_KEY) -> JobGraph:
    """A source that feeds one operator."""
    return graph_of({"source": up, "count": down}, ("source", "count", partitioning))


def restored(store: FileSystemStore, metadata: CheckpointMetadata, new: JobGraph) -> dict[ChannelId, list[Row]]:
    """What every input channel of the new graph starts with."""
    point = complete(store, metadata)
    found: dict[ChannelId, list[Row]] = {}
    for task in new.tasks():
        for channel, batches in restore_task(store, point, new, task).in_flight:
            assert channel not in found
            assert batches
            assert new.receiver(channel) == task
            assert channel in new.channels(new.edges[channel.edge])
            found[channel] = [(k, n) for b in batches for k, n in zip(*b.to_pydict().values(), strict=True)]
            assert all(b.num_rows for b in batches)
    return found


@st.composite
def channels(draw: st.DrawFn, keyed: bool) -> tuple[int, int, dict[tuple[int, int], tuple[list[Row], list[Row]]]]:
    """Old parallelisms, and for each old channel what its receiver and what its sender held."""
    up, down = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    held: dict[tuple[int, int], tuple[list[Row], list[Row]]] = {}
    number = 0
    for channel in [(u, d) for u in range(up) for d in range(down)]:
        keys = [key for key in range(KEYS) if not keyed or owner_of(key, down) == channel[1]]
        sent = draw(st.lists(st.sampled_from(keys), max_size=8))
        rows = [(key, number + i) for i, key in enumerate(sent)]
        number += len(rows)
        cut = draw(st.integers(0, len(rows)))
        held[channel] = (rows[:cut], rows[cut:])
    return up, down, held


def stored(
    store: FileSystemStore, up: int, down: int, held: dict[tuple[int, int], tuple[list[Row], list[Row]]], size: int
) -> CheckpointMetadata:
    """The checkpoint, with rows in batches of `size`."""
    ends = {
        (direction, u, d): [batch(rows[i : i + size]) for i in range(0, len(rows), size)]
        for (u, d), parts in held.items()
        for direction, rows in zip(("input", "output"), parts, strict=True)
        if rows
    }
    return checkpoint_of(graph(up, down), in_flight=store_in_flight(store, "source", "count", ends))


@given(old=channels(keyed=True), new_up=st.integers(1, 4), new_down=st.integers(1, 4), size=st.integers(1, 5))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_keyed_rows_reach_the_owners_of_their_keys(
    store: FileSystemStore,
    old: tuple[int, int, dict[tuple[int, int], tuple[list[Row], list[Row]]]],
    new_up: int,
    new_down: int,
    size: int,
) -> None:
    """At any parallelism on both sides: every row once, at its key's owner, in the order of its old channel."""
    store.delete_tree("")
    up, down, held = old

    found = restored(store, stored(store, up, down, held, size), graph(new_up, new_down))

    assert sorted(row for parts in held.values() for rows in parts for row in rows) == sorted(
        row for rows in found.values() for row in rows
    )
    for channel, rows in found.items():
        assert {channel.downstream} == {owner_of(key, new_down) for key, _ in rows}
    for (u, _), (received, unsent) in held.items():
        for downstream in range(new_down):
            expected = [row for row in received + unsent if owner_of(row[0], new_down) == downstream]
            rows = found.get(ChannelId(0, SubtaskIndex(u % new_up), SubtaskIndex(downstream)), [])
            assert expected == [row for row in rows if row in set(expected)]


@given(
    old=channels(keyed=False),
    new_up=st.integers(1, 4),
    new_down=st.integers(1, 4),
    forward=st.booleans(),
    size=st.integers(1, 5),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_rebalanced_channels_are_dealt_out_whole(
    store: FileSystemStore,
    old: tuple[int, int, dict[tuple[int, int], tuple[list[Row], list[Row]]]],
    new_up: int,
    new_down: int,
    forward: bool,
    size: int,
) -> None:
    """Every old channel goes to one new one, in order; also where equal parallelisms have made the edge forward."""
    store.delete_tree("")
    up, down, held = old
    forward = forward and up != down
    new = graph(new_down if forward else new_up, new_down, FORWARD if forward else REBALANCE)

    found = restored(store, stored(store, up, down, held, size), new)

    expected = [received + unsent for received, unsent in held.values() if received or unsent]
    for rows in expected:
        (new_rows,) = [other for other in found.values() if rows[0] in other]
        start = new_rows.index(rows[0])
        assert rows == new_rows[start : start + len(rows)]
    assert sorted(row for rows in expected for row in rows) == sorted(row for rows in found.values() for row in rows)


@given(old=channels(keyed=True), by_key=st.booleans())
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_nothing_moves_at_the_same_parallelism(
    store: FileSystemStore, old: tuple[int, int, dict[tuple[int, int], tuple[list[Row], list[Row]]]], by_key: bool
) -> None:
    """Then the new channel of the same ends has what the old one had: the receiver's part, then the sender's."""
    store.delete_tree("")
    up, down, held = old

    found = restored(store, stored(store, up, down, held, 3), graph(up, down, BY_KEY if by_key else REBALANCE))

    assert {
        ChannelId(0, SubtaskIndex(u), SubtaskIndex(d)): received + unsent
        for (u, d), (received, unsent) in held.items()
        if received or unsent
    } == found


def one_row(store: FileSystemStore, edge: str | None = None) -> CheckpointMetadata:
    """A checkpoint of one channel with a row in flight."""
    in_flight = store_in_flight(store, "source", "count", {("input", 0, 0): [batch([(1, 2)])]}, edge)
    return checkpoint_of(graph(1, 1), in_flight=in_flight)


def test_what_is_ignored_is_left_out(store: FileSystemStore) -> None:
    """The task starts with its state alone, even if what was in flight could not be read."""
    metadata = one_row(store)
    task = TaskId(VertexId("count"), SubtaskIndex(0))

    point = complete(store, metadata, ignore_in_flight=True)

    assert restore_task(store, point, graph(1, 1), task).in_flight == ()
    assert restore_task(store, point, graph(1, 1, BROADCAST), task).in_flight == ()


@pytest.mark.parametrize("new", [graph(1, 1, BROADCAST), graph(1, 1, FORWARD)], ids=["broadcast", "forward"])
def test_an_edge_that_cannot_have_any_is_refused(store: FileSystemStore, new: JobGraph) -> None:
    """At submission with advice, and should it come to that, in the task; what is ignored is no obstacle."""
    metadata = one_row(store)

    with pytest.raises(ConfigurationError, match=r"edge 'source->count#0', and the job has a .*ignore_in_flight_of=5"):
        check_fits(metadata, new)
    check_fits(metadata, new, ignore_in_flight=True)
    with pytest.raises(CorruptionError, match="which cannot have any"):
        restored(store, metadata, new)


def test_an_edge_that_is_gone_is_refused(store: FileSystemStore) -> None:
    """Its rows would be lost without a word; the same graph takes them."""
    metadata = one_row(store)
    check_fits(metadata, graph(1, 1))
    between = graph_of({"source": 1, "new": 1, "count": 1}, ("source", "new", REBALANCE), ("new", "count", BY_KEY))

    with pytest.raises(
        ConfigurationError, match=r"'source->count#0', and the job has no such edge; restore from a save"
    ):
        check_fits(metadata, between)

    check_fits(metadata, between, ignore_in_flight=True)


def test_rows_of_another_key_are_refused(store: FileSystemStore) -> None:
    """An edge that is partitioned by another column now cannot take rows that were partitioned by the one before."""
    wrong = next(key for key in range(KEYS) if owner_of(key, 2) == 1)
    in_flight = store_in_flight(store, "source", "count", {("output", 0, 0): [batch([(wrong, 0)])]})
    metadata = checkpoint_of(graph(1, 2), in_flight=in_flight)

    with pytest.raises(ConfigurationError, match=r"'source->count#0' that were not partitioned by \['k'\]"):
        restored(store, metadata, graph(1, 2))


def test_rows_for_a_finished_task_are_damage(store: FileSystemStore) -> None:
    """It had processed everything when it finished."""
    in_flight = store_in_flight(store, "source", "count", {("input", 0, 0): [batch([(1, 2)])]})
    metadata = checkpoint_of(graph(1, 1), in_flight=in_flight, finished={"source": [0], "count": [0]})

    with pytest.raises(CorruptionError, match=r"in-flight elements for count\[0\], which had finished"):
        restored(store, metadata, graph(1, 1))


def test_what_a_finished_sender_had_not_sent_is_restored(store: FileSystemStore) -> None:
    """It finishes with rows in its output queues, which the barrier overtakes."""
    in_flight = store_in_flight(store, "source", "count", {("output", 0, 0): [batch([(1, 2)])]})
    metadata = checkpoint_of(graph(1, 1), in_flight=in_flight, finished={"source": [0]})

    assert {ChannelId(0, SubtaskIndex(0), SubtaskIndex(0)): [(1, 2)]} == restored(store, metadata, graph(1, 1))


def test_edges_between_the_same_vertices_are_told_apart(store: FileSystemStore) -> None:
    """By their order among each other, whatever other edges come before them."""
    new = graph_of(
        {"source": 1, "other": 1, "count": 1},
        ("other", "count", REBALANCE),
        ("source", "count", REBALANCE),
        ("source", "count", REBALANCE),
    )
    metadata = one_row(store, "source->count#1")

    assert [new.edge_name(edge) for edge in new.edges] == ["other->count#0", "source->count#0", "source->count#1"]
    assert {ChannelId(2, SubtaskIndex(0), SubtaskIndex(0)): [(1, 2)]} == restored(store, metadata, new)
