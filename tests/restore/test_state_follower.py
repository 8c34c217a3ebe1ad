"""A process that follows the checkpoints of a task holds what a restore from any of them would read, or nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from restored_graphs import BY_KEY, checkpoint_of, complete, graph_of

import tidegate as tg
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore import state_follower
from tidegate.actors.restore.restore_task import restore_task
from tidegate.actors.restore.state_follower import StateFollower, can_follow
from tidegate.actors.task.incremental_base import canonical
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import OperatorFactory
from tidegate.protocol.identity import TaskId
from tidegate.protocol.task_reports import StateOrigin
from tidegate.state.common.backend import KeyedBackend
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import StateHandle
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot
from tidegate.storage.state.state_file import write_state

UID = OperatorUid("keyed")
TASK = TaskId(VertexId("keyed"), SubtaskIndex(0))
OPTIONS = StateBackendOptions(incremental=True)
KEYS = 8
opened: list[str] = []
"""What has become of functions."""


class Remembers(tg.ProcessFunction):
    """Has a state of each kind; even values add, odd ones remove."""

    def open(self, context: tg.ProcessContext) -> None:
        opened.append("open")
        self._last = context.state(tg.ValueState("last", int))
        self._seen = context.state(tg.ListState("seen", int))
        self._counts = context.state(tg.MapState("counts", int, int))

    def process(self, row: Any, context: tg.ProcessContext) -> Iterable[dict[str, Any]]:
        context.timer_service.register_event_time_timer(10**15 + row["v"])
        if row["v"] % 2:
            self._last.clear()
            self._seen.clear()
            self._counts.remove(row["v"] - 1)
        else:
            self._last.update(row["v"])
            self._seen.add(row["v"])
            self._counts.put(row["v"], row["k"])
        yield from ()

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> None:
        """Nothing to do."""

    def close(self) -> None:
        opened.append("close")


FACTORIES: Mapping[str, OperatorFactory] = {
    "aggregate": lambda: KeyedAggregate(("k",), {"n": tg.count(), "total": tg.sum("v"), "most": tg.max("v")}),
    "process": lambda: ProcessOperator(Remembers(), (("k",),)),
}


@pytest.fixture(autouse=True)
def nothing_opened() -> None:
    """No function has been opened before a test."""
    opened.clear()


@pytest.fixture
def store() -> Iterator[FileSystemStore]:
    """A store in memory."""
    made = open_store(f"memory://{uuid.uuid4().hex}")
    yield made
    made.delete_tree("")


def graph(kind: str, parallelism: int = 1) -> JobGraph:
    """Rows go by key to an operator."""
    made = graph_of({"source": 1, "keyed": parallelism}, ("source", "keyed", BY_KEY))
    source, keyed = made.vertices
    spec = replace(keyed.operators[0], factory=FACTORIES[kind])
    return replace(made, vertices=(source, replace(keyed, operators=(spec,))))


def follower(kind: str, store: FileSystemStore, parallelism: int = 1) -> StateFollower:
    """Follows the task of such a graph."""
    return StateFollower(TASK, graph(kind, parallelism), OPTIONS, lambda _: store, lambda: 0)


class Running:
    """The operator of a task, and what its checkpoints are made of."""

    def __init__(self, kind: str, store: FileSystemStore) -> None:
        self.graph = graph(kind)
        self.store = store
        self.chain = self.make_chain()
        self.layers: tuple[StateHandle, ...] = ()
        self.base: CheckpointId | None = None
        self.points: list[RestorePoint] = []

    def make_chain(self) -> OperatorChain:
        operators, max_parallelism = self.graph.vertex(TASK.vertex).operators, self.graph.max_parallelism
        return OperatorChain(operators, TASK.subtask, 1, max_parallelism, lambda _: None, backend=OPTIONS)

    def restored(self, point: RestorePoint, kept: Mapping[OperatorUid, KeyedBackend]) -> tuple[Running, StateOrigin]:
        """The task of a later attempt, as `TaskEffects.restore` begins it."""
        found = {uid: backend.kept(point.checkpoint_id) for uid, backend in kept.items()}
        usable = {uid: tables for uid, tables in found.items() if tables is not None}
        read = restore_task(self.store, point, self.graph, TASK, kept=usable)
        other = Running.__new__(Running)
        other.graph, other.store, other.points = self.graph, self.store, []
        other.chain = other.make_chain()
        assert read.part is not None
        other.layers, other.base = read.part.layers, point.checkpoint_id
        other.chain.open(dict(read.tables), point.checkpoint_id, {uid: kept[uid] for uid in read.kept})
        return other, read.origin

    def process(self, rows: Sequence[tuple[int, int]]) -> None:
        """Rows come in."""
        if rows:
            keys, values = zip(*rows, strict=True)
            self.chain.process(pa.record_batch({"k": pa.array(keys, pa.int64()), "v": pa.array(values, pa.int64())}))

    def checkpoint(self, what: str) -> RestorePoint:
        """Take a checkpoint: what has changed, the whole state as a new base, or as a savepoint."""
        number = CheckpointId(len(self.points) + 1)
        snapshots = self.frozen(number, what)
        put = [(s.uid, state) for s in snapshots for state in s.layer]
        whole = [(s.uid, state) for s in snapshots for state in s.states]
        layer = write_state(self.store, f"{number}/layer", put, inline_bytes_max=0)
        handle = write_state(self.store, f"{number}/state", whole, inline_bytes_max=0)
        layers: tuple[StateHandle, ...] = ()
        if what != "savepoint":
            below = self.layers if what == "changes" and self.base is not None else ()
            layers = self.layers = below if layer is None else (*below, layer)
            self.base = number if layers else None
        metadata = replace(checkpoint_of(self.graph), checkpoint_id=number)
        subtasks = tuple(
            replace(s, layers=layers, handle=handle) if s.vertex == TASK.vertex else s for s in metadata.subtasks
        )
        self.points.append(complete(self.store, replace(metadata, subtasks=subtasks)))
        return self.points[-1]

    def frozen(self, number: int, what: str = "savepoint") -> list[OperatorSnapshot]:
        """What a snapshot holds."""
        if what == "savepoint":
            return [canonical(s) for s in self.chain.snapshot(Cut(CheckpointId(number), canonical=True))]
        return self.chain.snapshot(Cut(CheckpointId(number), self.base if what == "changes" else None))

    def content(self, what: str = "savepoint") -> dict[tuple[str, bool], list[dict[str, Any]]]:
        """The rows that a snapshot holds, in an order of their own."""
        rows: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for snapshot in self.frozen(1_000, what):
            for state in (*snapshot.states, *snapshot.layer):
                found = rows.setdefault((state.state, state.removed), [])
                found += [row for table in tables_of(state) for row in table.rows.to_pylist()]
        return {key: sorted(found, key=str) for key, found in rows.items() if found}


_ROWS = st.lists(st.tuples(st.integers(0, KEYS - 1), st.integers(0, 5)), max_size=6)
_STEPS = st.lists(
    st.tuples(_ROWS, st.sampled_from(["changes", "changes", "changes", "base", "savepoint"]), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", list(FACTORIES))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=_STEPS, older=st.integers(0, 2), later=_ROWS)
def test_what_is_held_is_what_a_restore_reads(
    kind: str, steps: list[tuple[Any, str, bool]], older: int, later: list[tuple[int, int]]
) -> None:
    """Whichever checkpoints it was told of, whatever they were made of, and whichever the task starts from; and what
    the task writes next is the same, too."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    running, standby = Running(kind, store), follower(kind, store)
    running.chain.open({})
    for rows, what, told in steps:
        running.process(rows)
        point = running.checkpoint(what)
        if told:
            standby.follow(point)
    point = running.points[-1 - min(older, len(running.points) - 1)]
    warm, origin = running.restored(point, kept := standby.take(point))
    cold, _ = running.restored(point, {})
    assert (origin is StateOrigin.MEMORY) == bool(kept)
    assert warm.content() == cold.content()
    for one in (warm, cold):
        one.process(later)
    if warm.layers:
        assert warm.content("changes") == cold.content("changes")
    assert warm.content() == cold.content()
    store.delete_tree("")


def _some_checkpoints(running: Running, *kinds: str) -> list[RestorePoint]:
    running.chain.open({})
    for number, what in enumerate(kinds):
        running.process([(0, 2 * number), (1 + number, 2 * number)])
        running.checkpoint(what)
    return running.points


@pytest.mark.parametrize("kind", list(FACTORIES))
def test_nothing_is_read_that_was_followed(kind: str, store: FileSystemStore) -> None:
    """The files that are held may be gone; of the checkpoints after it only what is new is read."""
    running, standby = Running(kind, store), follower(kind, store)
    first, second, third = _some_checkpoints(running, "base", "changes", "changes")
    standby.follow(first)
    store.delete("1/layer")
    standby.follow(second)
    assert standby.checkpoint_id == 2
    store.delete("2/layer")
    warm, origin = running.restored(third, standby.take(third))
    assert origin is StateOrigin.MEMORY
    assert warm.content() == running.content()


@pytest.mark.parametrize(
    ("kinds", "followed", "restored"),
    [
        (("base", "changes"), 2, 1),
        (("base", "changes", "base"), 2, 3),
        (("base", "savepoint"), 1, 2),
        (("base", "changes", "savepoint"), 2, 3),
    ],
)
def test_what_is_no_part_of_the_checkpoint_is_not_used(
    kinds: tuple[str, ...], followed: int, restored: int, store: FileSystemStore
) -> None:
    """An older one, one whose base is new, or one that is written as a whole."""
    running, standby = Running("process", store), follower("process", store)
    points = _some_checkpoints(running, *kinds)
    standby.follow(points[followed - 1])
    assert standby.take(points[restored - 1]) == {}
    assert opened == ["open", "open", "close"], "the function of the task, and that of the follower"


def test_a_savepoint_on_the_way_costs_nothing(store: FileSystemStore) -> None:
    """Checkpoints after it go on with the layers before it."""
    running, standby = Running("aggregate", store), follower("aggregate", store)
    first, savepoint, third = _some_checkpoints(running, "base", "savepoint", "changes")
    standby.follow(first)
    store.delete("1/layer")
    standby.follow(savepoint)
    assert standby.checkpoint_id == 1
    standby.follow(third)
    assert standby.checkpoint_id == 3


def test_a_checkpoint_of_another_parallelism_is_not_held(store: FileSystemStore) -> None:
    """Its parts have other key groups."""
    running, standby = Running("aggregate", store), follower("aggregate", store, parallelism=2)
    (point,) = _some_checkpoints(running, "base")
    standby.follow(point)
    assert standby.checkpoint_id is None
    assert standby.take(point) == {}


def test_a_checkpoint_that_has_gone_is_followed_by_the_next(store: FileSystemStore) -> None:
    """Nothing is held that is half done, and whoever reads slowly is not given up."""
    running, standby = Running("process", store), follower("process", store)
    points = _some_checkpoints(running, "base", "changes", "base")
    standby.follow(points[0])
    store.delete("2/layer")
    for _ in range(state_follower.FAILURES_MAX + 1):
        standby.follow(points[1])
    assert (standby.checkpoint_id, opened[1:]) == (None, ["open", "close"])
    standby.follow(points[2])
    assert standby.checkpoint_id == 3


def test_what_fails_is_tried_a_few_times(
    store: FileSystemStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a row: what has worked since is forgiven."""
    running, standby = Running("process", store), follower("process", store)
    points = _some_checkpoints(running, "base", "changes")

    def broken(*_: object, **__: object) -> None:
        raise CorruptionError("not what was written")

    def follow(times: int, works: bool) -> None:
        with monkeypatch.context() as patched:
            if not works:
                patched.setattr(state_follower, "read_subtask_state", broken)
            for _ in range(times):
                standby.follow(points[1])

    for _ in range(2):
        follow(state_follower.FAILURES_MAX - 1, works=False)
        follow(1, works=True)
        assert standby.checkpoint_id == 2
    follow(state_follower.FAILURES_MAX, works=False)
    follow(1, works=True)
    assert standby.checkpoint_id is None
    assert caplog.messages[-1] == (
        "the state of keyed[0] at checkpoint 2 is not held and never will be: CorruptionError: not what was written"
    )


def test_a_function_that_cannot_be_opened_concerns_nobody_else(
    store: FileSystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task runs elsewhere, and begins from storage if it comes here."""
    running, standby = Running("process", store), follower("process", store)
    (point,) = _some_checkpoints(running, "base")

    def broken(self: object, context: object) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(Remembers, "open", broken)
    standby.follow(point)
    assert standby.take(point) == {}
    assert opened == ["open", "close"]


def test_who_is_closed_holds_nothing(store: FileSystemStore) -> None:
    """Also where it is told of a checkpoint afterwards."""
    running, standby = Running("process", store), follower("process", store)
    first, second = _some_checkpoints(running, "base", "changes")
    standby.follow(first)
    standby.close()
    standby.follow(second)
    assert standby.checkpoint_id is None
    assert opened[1:] == ["open", "close"]


@pytest.mark.parametrize("what", ["close", "take"])
def test_who_is_closed_while_it_reads_holds_nothing_afterwards(
    store: FileSystemStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A task that has waited for it long enough reads itself."""
    running, standby = Running("process", store), follower("process", store)
    (point,) = _some_checkpoints(running, "base")
    taken: list[object] = []

    def end(self: object, context: tg.ProcessContext) -> None:
        opened.append("open")
        for state in (tg.ValueState("last", int), tg.ListState("seen", int), tg.MapState("counts", int, int)):
            context.state(state)
        taken.append(standby.close() if what == "close" else standby.take(point))

    monkeypatch.setattr(state_follower, "TAKE_TIMEOUT_S", 0)
    monkeypatch.setattr(Remembers, "open", end)
    standby.follow(point)
    assert taken == [None if what == "close" else {}]
    assert standby.checkpoint_id is None
    assert opened[1:] == ["open", "close"]


@pytest.mark.parametrize(
    ("options", "can"),
    [
        (StateBackendOptions(incremental=True), True),
        (StateBackendOptions(), False),
        (StateBackendOptions(incremental=True, changelog=True), False),
        (StateBackendOptions(incremental=True, undo_bytes=0), False),
        (StateBackendOptions("rocksdb", incremental=True), False),
    ],
)
def test_only_layers_of_the_columnar_backend_are_followed(options: StateBackendOptions, can: bool) -> None:
    """Other state is not held by a process, or not for a checkpoint."""
    assert can_follow(options) is can
