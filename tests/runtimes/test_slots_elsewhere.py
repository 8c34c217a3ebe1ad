"""Where the slots of a lost node start meanwhile: which bundles, and how it is known where bundles are. Without Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, cast

import pytest
from ray.exceptions import RaySystemError
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SINK_WORKER, SOURCE, SOURCE_WORKER, LaterMailbox, source_to_sink

from tidegate.actors.ray import resource_waits as bundle_nodes
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import PoolOptions, Slot, SlotPlacement, bundles_elsewhere
from tidegate.actors.ray.resource_waits import BundleNodes, nodes_of
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.storage.files.file_system_store import open_store

NODES = {0: "north", 1: "south", 2: "west"}
NORTH = frozenset({"north"})


@pytest.mark.parametrize(
    ("slots", "bundles", "used", "nodes", "expected"),
    [
        pytest.param([(0, 0)], (0, 1), {1: 0}, NODES, {0: 1}, id="a free slot of a node that lives"),
        pytest.param([(0, 0)], (0, 1), {1: 1}, NODES, {}, id="a slot that the job itself uses is not free"),
        pytest.param([(0, 0)], (0, 1, 1), {1: 1}, NODES, {0: 1}, id="a bundle has several slots"),
        pytest.param([(0, 1)], (0, 1), {}, NODES, {0: 1}, id="a slot keeps its bundle where that is not avoided"),
        pytest.param([(0, 0), (1, 1)], (0, 1), {}, NODES, {1: 1}, id="a slot that keeps its bundle is not free"),
        pytest.param([(0, 0), (1, 0)], (0, 0, 1), {}, NODES, {0: 1}, id="one slot for one, and the first is first"),
        pytest.param([(0, 0), (1, 0)], (0, 0, 1, 2), {}, NODES, {0: 1, 1: 2}, id="spread over bundles"),
        pytest.param([(0, 0)], (0, 1, 1, 2, 2), {1: 1}, NODES, {0: 2}, id="where most is free"),
        pytest.param([(0, 0)], (0, 1), {}, {0: "north"}, {}, id="a bundle of which nobody knows the node is none"),
        pytest.param([(0, 0)], (0, 1), {}, {0: "north", 1: ""}, {}, id="nor is one that has no node"),
        pytest.param([(0, 0)], (0, 1), {}, {0: "north", 1: "north"}, {}, id="nor one on another part of that node"),
    ],
)
def test_a_slot_starts_in(
    slots: list[tuple[int, int]],
    bundles: tuple[int, ...],
    used: dict[int, int],
    nodes: dict[int, str],
    expected: dict[int, int],
) -> None:
    """North is to be avoided."""
    assert bundles_elsewhere(slots, bundles, used, nodes, NORTH) == expected


class SomeFleet(WorkerPool):
    """A fleet whose new processes are noted: the bundle, and the share of a processor."""

    made: list[tuple[int | None, float]]
    killed: list[WorkerHandle]

    def kill(self, member: WorkerHandle) -> None:
        self.killed.append(member)

    def _create(
        self, name: str, slot: Slot, shown_as: str, spare: bool = False, avoided: Collection[str] = ()
    ) -> WorkerHandle:
        self.made.append((slot.bundle, slot.takes.cpus))
        return WorkerHandle(f"{name}#new", None, slot.bundle, Future())


def fleet(bundles: tuple[int, ...], spare: str | None = None) -> SomeFleet:
    """A source and a sink in the first slot, which is on north; and a spare process on some node."""
    options = PoolOptions("job", "namespace", SlotPlacement(cast(PlacementGroup, None), bundles), 0, 1, open_store)
    some = SomeFleet(source_to_sink()[1], None, None, options, lambda action: action())
    some.made, some.killed = [], []
    north = ProcessInfo(1, "north")
    some.members = {
        worker: WorkerHandle(worker.group, None, bundles[0], Future(), north) for worker in (SOURCE_WORKER, SINK_WORKER)
    }
    if spare is not None:
        some.standbys = [WorkerHandle("spare", None, 0, Future(), ProcessInfo(2, spare))]
    return some


BOTH = (SOURCE, SINK)


def test_a_job_with_a_free_slot_elsewhere_does_not_wait_for_ray() -> None:
    """Its processes start there, and take no share of what another job may have."""
    some = fleet((0, 1))
    assert some.lacks(BOTH, NORTH), "nobody knows yet where the other slot is"
    assert not some.lacks(BOTH, NORTH, NODES)
    taken = some.staff(BOTH, NORTH, NODES)
    assert some.made == [(1, 0.0), (1, 0.0)]
    assert [member.bundle for member in taken.values()] == [1, 1]


LEFT = {1: "south"}
"""Where bundles are when Ray knows that north is lost: those that were there have no node."""


def test_a_task_whose_bundle_has_lost_its_node_takes_a_free_slot() -> None:
    """Nothing is in doubt any more. In its own bundle it would wait for room that another node has to make."""
    some = fleet((0, 1))
    for member in some.members.values():
        member.dead = True
    assert some.starts_in_bundles(BOTH, ())
    assert [member.bundle for member in some.staff(BOTH, (), LEFT).values()] == [1, 1]
    assert some.made == [(1, 0.0), (1, 0.0)]


def test_a_task_that_waits_in_a_bundle_without_a_node_is_moved_once_a_slot_is_free() -> None:
    """Where none is free it goes on waiting for room; one in a bundle that has a node is only slow to start."""
    for bundles, nodes, moved in (((0, 1), LEFT, True), ((0,), LEFT, False), ((0, 1), NODES, False)):
        some = fleet(bundles)
        before = dict(some.members)
        for member in before.values():
            member.info = None
        assert some.starts_in_bundles(BOTH, ())
        taken = some.staff(BOTH, (), nodes)
        assert [taken[task] is not before[some.worker_of(task)] for task in BOTH] == [moved, moved]
        assert some.killed == (list(before.values()) if moved else [])


def test_no_spare_process_waits_in_a_bundle_without_a_node() -> None:
    """One that does is ended, and the next one starts where it can."""
    some = fleet((0, 1))
    (waiting,) = some.standbys = [WorkerHandle("spare", None, 0, Future())]
    some.staff(BOTH, (), LEFT)
    assert (some.killed, some.standbys) == ([waiting], [])
    some.refill()
    assert some.made == [(1, 0.0)]


def test_ray_is_asked_only_where_processes_start_in_bundles() -> None:
    """Not where all have started, nor where spare processes take over."""
    some = fleet((0, 1), spare="south")
    assert not some.starts_in_bundles(BOTH, ())
    some.members[SOURCE_WORKER].dead = True
    assert not some.starts_in_bundles(BOTH, ())
    some.members[SINK_WORKER].dead = True
    assert some.starts_in_bundles(BOTH, ())


def test_a_task_that_has_died_elsewhere_keeps_its_slot() -> None:
    """Its node is none of those in doubt: it waits for nobody, and is counted by Ray as ever."""
    some = fleet((1, 0))
    for member in some.members.values():
        member.info, member.dead = ProcessInfo(1, "south"), True
    assert not some.lacks(BOTH, NORTH, NODES)
    some.staff(BOTH, NORTH, NODES)
    assert some.made == [(1, 0.5), (1, 0.5)]


def test_spare_processes_come_first_and_free_slots_take_the_rest() -> None:
    """A spare process has started already. Where there is no free slot either the job waits."""
    some = fleet((0, 1), spare="south")
    assert not some.lacks(BOTH, NORTH, NODES)
    assert some.staff(BOTH, NORTH, NODES)[SOURCE].name == "spare"
    assert some.made == [(1, 0.0)]
    assert fleet((0,), spare="south").lacks(BOTH, NORTH, NODES)
    assert fleet((0, 1), spare="north").lacks(BOTH, NORTH | {"south"}, NODES)


class Pool:
    """A thread that does its work when the test says so."""

    made: list[Pool]

    def __init__(self, threads: int, name: str, died: Callable[[BaseException], object]) -> None:
        self.work: list[tuple[Callable[[], Any], Callable[[Future[Any]], object]]] = []
        self.closed = False
        Pool.made.append(self)

    def submit(self, work: Callable[[], Any], done: Callable[[Future[Any]], object]) -> None:
        self.work.append((work, done))

    def run(self) -> None:
        """Do the oldest piece of work."""
        (work, done), future = self.work.pop(0), Future[Any]()
        try:
            future.set_result(work())
        except RaySystemError as error:
            future.set_exception(error)
        done(future)

    def close(self) -> None:
        self.closed = True


class Asked:
    """What asks where bundles are, and Ray's answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle_nodes, "ThreadPool", Pool)
        Pool.made = []
        self.answers: list[Mapping[int, str] | Exception] = []
        self.known = 0
        self.mailbox = LaterMailbox()
        self.bundles = BundleNodes(cast(Mailbox, self.mailbox), self._look, self._tell)

    def _look(self) -> Mapping[int, str]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _tell(self) -> None:
        self.known += 1

    def answer(self, answer: Mapping[int, str] | Exception) -> None:
        """Ray answers."""
        self.answers.append(answer)
        Pool.made[0].run()


def test_ray_is_asked_once_about_the_same_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often an attempt looks whether it can begin. What was said is forgotten when there is no doubt."""
    asked = Asked(monkeypatch)
    asked.bundles.ask(frozenset())
    assert Pool.made == []
    for _ in range(3):
        asked.bundles.ask(NORTH)
    assert asked.bundles.nodes == {}
    asked.answer(NODES)
    assert (asked.bundles.nodes, asked.known, Pool.made[0].work) == (NODES, 1, [])
    asked.bundles.ask(frozenset())
    assert asked.bundles.nodes == {}
    asked.bundles.close()
    assert Pool.made[0].closed


def test_an_answer_about_other_nodes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles may have moved meanwhile. One question is under way at a time: Ray may not answer at all."""
    asked, south = Asked(monkeypatch), frozenset({"south"})
    asked.bundles.ask(NORTH)
    asked.bundles.ask(south)
    assert len(Pool.made[0].work) == 1
    asked.answer(NODES)
    assert (asked.bundles.nodes, asked.known) == ({}, 0)
    asked.answer({0: "west"})
    assert (asked.bundles.nodes, asked.known) == ({0: "west"}, 1)


def test_an_attempt_waits_on_where_ray_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would without: for word of the nodes."""
    asked = Asked(monkeypatch)
    asked.bundles.ask(NORTH)
    asked.answer(RaySystemError("no answer"))
    assert (asked.bundles.nodes, asked.known) == ({}, 1)


def test_ray_is_asked_once_for_each_attempt_that_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing needs to be in doubt. An attempt does not wait for an answer for long."""
    asked = Asked(monkeypatch)
    for attempt in (0, 0, 1):
        asked.bundles.ask(frozenset(), attempt)
        assert not asked.bundles.settled
    asked.answer(NODES)
    assert not asked.bundles.settled, "bundles may have moved since the attempt before"
    asked.answer({1: "south"})
    assert (asked.bundles.settled, asked.bundles.nodes, asked.known) == (True, {1: "south"}, 1)
    asked.bundles.ask(frozenset(), 2)
    asked.mailbox.pass_time()
    assert (asked.bundles.settled, asked.bundles.nodes, asked.known) == (True, {}, 2)


def test_bundles_without_a_node_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has not found another one for them yet."""
    table = {"bundles_to_node_id": {0: "north", 1: ""}}
    monkeypatch.setattr(bundle_nodes.ray.util, "placement_group_table", lambda group: table)
    assert nodes_of(SlotPlacement(cast(PlacementGroup, None), (0, 1))) == {0: "north"}
