"""What had finished stays finished, and gets no more input (FLIP-147)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from restored_graphs import BY_KEY, FORWARD, REBALANCE, Edge, check_fits, checkpoint_of, complete, graph_of

from tidegate.actors.restore.restore_task import RestoredTask, restore_task
from tidegate.actors.task.split_positions import FrozenPositions, SplitPosition, positions_from_tables
from tidegate.connectors.source import SourceSplit
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import StateHandle, StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.snapshot import FrozenTable
from tidegate.storage.state.state_file import write_state

UID = OperatorUid("count")


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    opened = open_store(f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def handle(store: FileSystemStore, kind: StateKind, subtask: int) -> StateHandle:
    """The state of one subtask: a few rows that say whose they are."""
    rows = pa.record_batch({"x": pa.array([10 * subtask, 10 * subtask + 1], pa.int64())})
    found = write_state(store, f"count-{subtask}", [(UID, FrozenTable("s", kind, lambda: rows))], inline_bytes_max=0)
    assert found is not None
    return found


def restore(
    store: FileSystemStore, kind: StateKind, finished: Sequence[int], old: int = 3, new: int = 3
) -> list[RestoredTask]:
    """What each subtask of a keyed operator starts with."""
    edge = ("source", "count", BY_KEY)
    handles = {("count", subtask): handle(store, kind, subtask) for subtask in range(old)}
    flags = {"source": [0], "count": finished}
    metadata = checkpoint_of(graph_of({"source": 1, "count": old}, edge), finished=flags, handles=handles)
    point = complete(store, metadata)
    graph = graph_of({"source": 1, "count": new}, edge)
    return [restore_task(store, point, graph, TaskId(VertexId("count"), SubtaskIndex(i))) for i in range(new)]


def values(task: RestoredTask) -> list[int]:
    """The rows of all tables of the operator."""
    ((uid, tables),) = task.tables
    assert uid == UID
    return [x for table in tables for x in table.rows["x"].to_pylist()]


@pytest.mark.parametrize("new", [2, 3, 4])
def test_a_finished_operator_is_restored_as_finished_without_state(store: FileSystemStore, new: int) -> None:
    """Its state is not even read: it is damaged here."""
    handles = {("count", subtask): handle(store, StateKind.LIST, subtask) for subtask in range(3)}
    for subtask in range(3):
        store.write(f"count-{subtask}", [b"damaged"])
    old = graph_of({"source": 1, "count": 3}, ("source", "count", BY_KEY))
    point = complete(store, checkpoint_of(old, finished={"source": [0], "count": [0, 1, 2]}, handles=handles))
    graph = graph_of({"source": 1, "count": new}, ("source", "count", BY_KEY))

    for subtask in range(new):
        task = restore_task(store, point, graph, TaskId(VertexId("count"), SubtaskIndex(subtask)))
        assert task.finished
        assert dict(task.tables) == {UID: ()}


@pytest.mark.parametrize(
    ("kind", "finished", "new", "expected"),
    [
        pytest.param(StateKind.LIST, [], 3, [[0, 1], [10, 11], [20, 21]], id="list stays"),
        pytest.param(StateKind.LIST, [1], 3, [[0, 1], [], [20, 21]], id="list of who finished is left out"),
        pytest.param(StateKind.LIST, [0], 2, [[10, 20], [11, 21]], id="list is dealt out"),
        pytest.param(StateKind.UNION, [], 2, [[0, 1, 10, 11, 20, 21]] * 2, id="union goes to all"),
        pytest.param(StateKind.UNION, [], 3, [[0, 1, 10, 11, 20, 21]] * 3, id="union at the same parallelism"),
        pytest.param(StateKind.BROADCAST, [], 3, [[0, 1]] * 3, id="broadcast from the first"),
        pytest.param(StateKind.BROADCAST, [0], 3, [[10, 11]] * 3, id="broadcast from one that was running"),
        pytest.param(StateKind.BROADCAST, [0, 1], 4, [[20, 21]] * 4, id="broadcast to more"),
    ],
)
def test_state_of_running_subtasks_is_what_remains(
    store: FileSystemStore, kind: StateKind, finished: list[int], new: int, expected: list[list[int]]
) -> None:
    """Each kind of state by its rule, over the subtasks that had not finished."""
    tasks = restore(store, kind, finished, new=new)

    assert expected == [values(task) for task in tasks]
    assert not any(task.finished for task in tasks)


PARALLELISM = {"source": 2, "map": 2, "count": 2}
EDGES: tuple[Edge, ...] = (("source", "map", FORWARD), ("map", "count", BY_KEY))


@pytest.mark.parametrize(
    ("finished", "names"),
    [
        pytest.param({}, None, id="nobody"),
        pytest.param({"source": [0, 1], "map": [0, 1], "count": [0, 1]}, None, id="all"),
        pytest.param({"source": [0, 1]}, None, id="sources"),
        pytest.param({"source": [0]}, None, id="a source"),
        pytest.param({"source": [0], "map": [0]}, None, id="a lane of forward edges"),
        pytest.param({"source": [0, 1], "map": [0, 1], "count": [1]}, None, id="part behind what finished"),
        pytest.param({"map": [0, 1]}, ("map", "source"), id="before it all run"),
        pytest.param({"source": [0], "map": [0, 1]}, ("map", "source"), id="before it some run"),
        pytest.param({"map": [0]}, ("map", "source"), id="a lane without its source"),
        pytest.param({"source": [0], "map": [0], "count": [0]}, ("count", "map"), id="part behind a shuffle"),
        pytest.param({"source": [0, 1], "map": [0], "count": [0, 1]}, ("count", "map"), id="all behind a shuffle"),
    ],
)
def test_what_finished_gets_no_more_rows(finished: dict[str, list[int]], names: tuple[str, str] | None) -> None:
    """Refused, with the names of both, where an operator that had finished would get rows from one that runs on."""
    graph = graph_of(PARALLELISM, *EDGES)
    metadata = checkpoint_of(graph, finished=finished)

    if names is None:
        check_fits(metadata, graph)
        return
    with pytest.raises(ConfigurationError, match=f"operator '{names[0]}' had .*finished at .* operator '{names[1]}'"):
        check_fits(metadata, graph)


def test_a_lane_that_is_rebalanced_since_may_go_on() -> None:
    """At another parallelism a forward edge is rebalanced; what is left of both ends goes on nevertheless."""
    metadata = checkpoint_of(graph_of(PARALLELISM, *EDGES), finished={"source": [0], "map": [0]})
    rescaled = graph_of({"source": 2, "map": 3, "count": 2}, ("source", "map", REBALANCE), ("map", "count", BY_KEY))

    check_fits(metadata, rescaled)


@pytest.mark.parametrize("finished", [[0], [0, 1]], ids=["partly", "fully"])
def test_a_new_operator_before_a_finished_one_is_refused(finished: list[int]) -> None:
    """As a source of its own and between two old ones; behind it a new operator may be."""
    metadata = checkpoint_of(
        graph_of({"source": 2, "count": 2}, ("source", "count", BY_KEY)),
        finished={"source": [0, 1], "count": finished},
    )
    beside = graph_of({"source": 2, "new": 2, "count": 2}, ("source", "count", BY_KEY), ("new", "count", BY_KEY))
    between = graph_of({"source": 2, "new": 2, "count": 2}, ("source", "new", REBALANCE), ("new", "count", BY_KEY))
    behind = graph_of({"source": 2, "count": 2, "new": 1}, ("source", "count", BY_KEY), ("count", "new", REBALANCE))

    for graph in (beside, between):
        with pytest.raises(ConfigurationError, match=r"operator 'count' had .* operator 'new', which is not finished"):
            check_fits(metadata, graph)
    check_fits(metadata, behind)


def test_a_new_operator_chained_to_a_finished_one_is_refused() -> None:
    """One task cannot run the one and skip the other; where nothing had finished it may be chained."""
    edge = ("source", "count", BY_KEY)
    old = graph_of({"source": 2, "count": 2}, edge)
    chained = graph_of({"source": 2, "count": 2}, edge, chains={"count": ["count", "new"]})
    ended = checkpoint_of(old, finished={"source": [0, 1], "count": [0, 1]})

    with pytest.raises(ConfigurationError, match=r"'count' \(finished\) and 'new' \(not finished\)"):
        check_fits(ended, chained)

    check_fits(checkpoint_of(old), chained)


def test_what_partly_finished_may_be_chained_to_what_it_fed() -> None:
    """A source with fewer splits than subtasks shrinks to one, in a task with what it feeds, and never behind that."""
    old = graph_of({"source": 3, "all": 1}, ("source", "all", REBALANCE))
    shrunk = graph_of({"source": 1}, chains={"source": ["source", "all"]})
    turned = graph_of({"source": 1}, chains={"source": ["all", "source"]})

    check_fits(checkpoint_of(old, finished={"source": [2]}), shrunk)

    with pytest.raises(ConfigurationError, match=r"'all' \(not finished\) and 'source' \(partly finished\)"):
        check_fits(checkpoint_of(old, finished={"source": [2]}), turned)
    with pytest.raises(ConfigurationError, match=r"'source' \(finished\) and 'all' \(not finished\)"):
        check_fits(checkpoint_of(old, finished={"source": [0, 1, 2]}), shrunk)


def test_a_new_operator_chained_between_two_that_partly_finished_is_refused() -> None:
    """It would give the last one rows of the subtask that had finished; in tasks of their own it is refused as well."""
    lanes = {"source": ["source", "map"]}
    old = graph_of({"source": 2}, chains=lanes)
    ended = checkpoint_of(old, finished={"source": [1]})
    between = graph_of({"source": 2}, chains={"source": ["source", "new", "map"]})
    listed = r"'source' \(partly finished\) and 'new' \(not finished\) and 'map' \(partly finished\)"

    with pytest.raises(ConfigurationError, match=listed):
        check_fits(ended, between)

    check_fits(ended, graph_of({"source": 2}, chains={"source": ["source", "map", "new"]}))


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("finished", [[0], [1], [0, 1]])
def test_a_source_that_partly_finished_keeps_all_of_its_splits(
    store: FileSystemStore, finished: Sequence[int], new: int
) -> None:
    """Those of a subtask that had finished are read to the end; the next savepoint would not know them else."""
    uid = OperatorUid("rows")
    splits = [SplitPosition(SourceSplit(f"split {n}", b"", 10), 4) for n in range(2)]
    handles = {
        ("rows", n): write_state(store, f"rows-{n}", [(uid, FrozenPositions((split,)))], inline_bytes_max=0)
        for n, split in enumerate(splits)
        if n not in finished
    }
    read = {("rows", n): FrozenPositions((splits[n],)).splits for n in finished}
    metadata = checkpoint_of(graph_of({"rows": 2}), finished={"rows": finished}, handles=handles, read_splits=read)
    point = complete(store, metadata)

    tasks = [
        restore_task(store, point, graph_of({"rows": new}), TaskId(VertexId("rows"), SubtaskIndex(n)))
        for n in range(new)
    ]

    if len(finished) == 2:
        assert all(task.finished and dict(task.tables) == {uid: ()} for task in tasks)
        return
    found = [position for task in tasks for position in positions_from_tables(dict(task.tables)[uid])]
    expected = [replace(s, next_offset=10, at_end=True) if n in finished else s for n, s in enumerate(splits)]
    assert sorted(found, key=lambda position: position.split.split_id) == expected


@pytest.mark.parametrize("finished", [[1], [0, 2]])
def test_finished_subtasks_of_a_source_keep_their_own_splits(store: FileSystemStore, finished: Sequence[int]) -> None:
    """One that is restored while the others continue has its splits, so that they are not read again, and no others."""
    uid, graph = OperatorUid("rows"), graph_of({"rows": 3})
    splits = [SplitPosition(SourceSplit(f"split {n}", b"", 10), 4) for n in range(3)]
    handles = {
        ("rows", n): write_state(store, f"rows-{n}", [(uid, FrozenPositions((split,)))], inline_bytes_max=0)
        for n, split in enumerate(splits)
        if n not in finished
    }
    read = {("rows", n): FrozenPositions((splits[n],)).splits for n in finished}
    point = complete(store, checkpoint_of(graph, finished={"rows": finished}, handles=handles, read_splits=read))

    for n, split in enumerate(splits):
        task = restore_task(store, point, graph, TaskId(VertexId("rows"), SubtaskIndex(n)))
        expected = replace(split, next_offset=10, at_end=True) if n in finished else split
        assert positions_from_tables(dict(task.tables)[uid]) == (expected,)
