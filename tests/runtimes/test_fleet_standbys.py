"""The spare processes of a fleet: how many, where, and which of them takes over. Without Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SINK_WORKER, SOURCE, SOURCE_WORKER, Method, source_to_sink

import tidegate as tg
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import Standbys
from tidegate.actors.ray.discovery import FoundProcess
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.placement import PoolOptions, Slot, SlotPlacement
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.actors.ray.task_deployment import ProcessStatus
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId

PLACEMENT = SlotPlacement(cast(PlacementGroup, None), (0, 1, 0, 1))


class Handle:
    """A process that lives on."""

    def __init__(self) -> None:
        self.live = Method()
        self.follow = Method()

    def told(self) -> list[tuple[TaskId, int]]:
        """Which task it is to follow, and to which checkpoint; since somebody has asked."""
        calls = [self.follow.calls.get_nowait()[1] for _ in range(self.follow.calls.qsize())]
        return [(task, restore.checkpoint_id) for task, restore in calls]


class SomeFleet(WorkerPool):
    """A fleet whose new processes start when the test says so."""

    def _create(
        self, name: str, slot: Slot, shown_as: str, spare: bool = False, avoided: Collection[str] = ()
    ) -> WorkerHandle:
        return WorkerHandle(name, Handle(), slot.bundle, Future())


def process(name: str, bundle: int, node: str | None) -> WorkerHandle:
    """One that has started on a node, or has not started."""
    return WorkerHandle(name, Handle(), bundle, Future(), None if node is None else ProcessInfo(1, node))


def shared_fleet(standbys: int, *followed: TaskId) -> SomeFleet:
    """A source and a sink in one process in bundle 0."""
    options = PoolOptions("job", "namespace", PLACEMENT, 2, standbys, open_store, followed=frozenset(followed))
    found = SomeFleet(source_to_sink(slot_sharing=True)[1], None, None, options, lambda action: action())
    found.members = {found.worker_of(SINK): process("slot 1 of 1", 0, "north")}
    return found


def fleet(standbys: int, *followed: TaskId) -> SomeFleet:
    """A source in bundle 0 and a sink in bundle 1, on two nodes, in slots 2 and 3 of a reservation."""
    options = PoolOptions("job", "namespace", PLACEMENT, 2, standbys, open_store, followed=frozenset(followed))
    found = SomeFleet(source_to_sink()[1], None, None, options, lambda action: action())
    found.members = {SOURCE_WORKER: process("source", 0, "north"), SINK_WORKER: process("sink", 1, "south")}
    return found


def start(some: SomeFleet, member: WorkerHandle, node: str) -> None:
    """A process of a fleet has started on a node."""
    started: Future[ProcessInfo] = Future()
    started.set_result(ProcessInfo(1, node))
    some.answered(member, started)


def test_spare_processes_are_spread_over_nodes() -> None:
    """A node that is lost takes those on it along; what it took is made good where fewest are left."""
    some = fleet(standbys=3)
    some.refill()
    for node in ("north", "south"):
        start(some, some.standbys[-1], node)
    assert [m.bundle for m in some.standbys] == [0, 1, 0]
    some.standbys = [process("spare", 0, "north"), process("spare", 0, "north")]
    some.refill()
    assert [m.bundle for m in some.standbys] == [0, 0, 1]


def test_spare_processes_start_one_after_the_other() -> None:
    """Together they would take the processors from the tasks. One that dies is made good, and not doubled."""
    some = fleet(standbys=3)
    start(some, some.members[SINK_WORKER], "south")
    assert (some.ready_standbys, some.starting_standbys) == (0, 0), "none before somebody asks: tasks start first"
    for _ in range(2):
        some.refill()
    assert (some.ready_standbys, some.starting_standbys) == (0, 1)
    start(some, some.standbys[0], "north")
    assert (some.ready_standbys, some.starting_standbys) == (1, 1)
    some.lost(some.standbys[1], ActorDiedError())
    assert (some.ready_standbys, some.starting_standbys) == (1, 1)
    for _ in range(2):
        start(some, some.standbys[-1], "south")
    assert (some.ready_standbys, some.starting_standbys) == (3, 0)


def test_a_spare_process_whose_connection_broke_is_asked_before_it_is_replaced() -> None:
    """It lives: its life is watched on. It does not: another one is started, and its end is told once."""
    broke: list[tuple[Callable[[BaseException], object], Callable[[], object]]] = []
    some = fleet(standbys=1)
    some.broke = lambda member, error, dead, again: (
        isinstance(error, ActorUnavailableError) and not broke.append((dead, again))
    )
    held = ProcessStatus(JobId("job-12345678"), ProcessInfo(1, "north"), bundle=1)
    spare = Handle()
    some.inherit({}, [FoundProcess("spare", spare, held)])
    (member,) = some.standbys
    spare.live.calls.get_nowait()[0].set_exception(ActorUnavailableError("cut", None))
    assert (some.standbys, member.dead) == ([member], False)
    broke[0][1]()
    assert some.is_kept(member)
    second = spare.live.calls.get_nowait()[0]
    assert member.gone is second
    second.set_exception(ActorUnavailableError("cut", None))
    broke[1][0](ActorDiedError())
    assert (member.dead, some.is_kept(member), len(some.standbys)) == (True, False, 1)


def test_spare_processes_are_counted_by_what_they_do() -> None:
    """Those that wait, and those that start; one that hangs is neither."""
    some = fleet(standbys=4)
    some.standbys = [process("starts", 0, None), process("starts", 1, None)]
    some.standbys += [process("ready", 0, "north"), process("hung", 0, "north")]
    some.standbys[-1].evicted = True
    assert (some.ready_standbys, some.starting_standbys) == (1, 2)


@pytest.mark.parametrize(
    ("standbys", "chosen"),
    [
        ([("near, starts", 0, None), ("far", 1, "south")], "far"),
        ([("far", 1, "south"), ("near", 0, "north")], "near"),
        ([("far, starts", 1, None), ("near, starts", 0, None)], "near, starts"),
    ],
)
def test_a_process_that_has_started_takes_over_before_one_that_is_near(
    standbys: list[tuple[str, int, str | None]], chosen: str
) -> None:
    """The start of a process takes longer than to read state from elsewhere, as a rule."""
    some = fleet(standbys=2)
    some.standbys = [process(*one) for one in standbys]
    some.members[SINK_WORKER].dead = True
    assert some.staff([SINK])[SINK].name == chosen


def test_a_coordinator_inherits_where_processes_are() -> None:
    """A task may run in a bundle that is not that of its slot, and so may a spare process."""
    some, info = fleet(standbys=0), ProcessInfo(1, "north")
    spare = ProcessStatus(JobId("job-12345678"), info, bundle=1)
    held = replace(spare, tasks={SOURCE: AttemptNumber(0)})
    members = some.inherit(
        {SOURCE_WORKER: FoundProcess("task", Handle(), held)}, [FoundProcess("spare", Handle(), spare)]
    )
    assert (members[SOURCE].bundle, some.standbys[0].bundle) == (1, 1)


def at(checkpoint_id: int) -> RestorePoint:
    """A checkpoint of the job."""
    return RestorePoint("root", JobId("job-12345678"), CheckpointId(checkpoint_id), final=False)


def test_a_standby_that_has_started_follows_a_task() -> None:
    """One, on another node than the task, and from then on always that one. Others are left alone."""
    some = fleet(3, SINK)
    near, far, slow = process("near", 1, "south"), process("far", 0, "north"), process("slow", 0, None)
    some.standbys = [near, slow, far]
    for number in (1, 2):
        some.completed(SINK, at(number))
        some.completed(SOURCE, at(number))
    assert [one.handle.told() for one in (near, far, slow)] == [[], [(SINK, 1), (SINK, 2)], []]


def test_each_worker_has_a_standby_to_itself() -> None:
    """A second worker waits until there is another one: to hold the state of both would take the memory of both."""
    some = fleet(2, SINK, SOURCE)
    one, two = process("one", 0, "north"), process("two", 0, None)
    some.standbys = [one, two]
    for task in (SINK, SOURCE):
        some.completed(task, at(1))
    assert (one.handle.told(), two.handle.told()) == ([(SINK, 1)], [])
    start(some, two, "north")
    assert (one.handle.told(), two.handle.told()) == ([], [(SOURCE, 1)])


def test_a_standby_that_starts_later_is_told_of_the_newest_checkpoint() -> None:
    """It does not wait for the next one; another one that starts after it has nothing to follow."""
    some = fleet(2, SINK)
    first, second = process("first", 0, None), process("second", 0, None)
    some.standbys = [first, second]
    some.completed(SINK, at(1))
    for standby in (first, second):
        start(some, standby, "north")
    assert [one.handle.told() for one in (first, second)] == [[(SINK, 1)], []]
    some.lost(first, ActorDiedError())
    some.completed(SINK, at(2))
    assert second.handle.told() == [(SINK, 2)], "who followed has died"


@pytest.mark.parametrize(
    ("dead", "chosen"), [(SINK, "follows the sink"), (SOURCE, "plain")], ids=["the one followed", "another one"]
)
def test_the_follower_of_a_task_takes_it_over(dead: TaskId, chosen: str) -> None:
    """For another task it is the last that is taken of those that have started, also where it is near."""
    some = fleet(3, SINK)
    some.standbys = [process("follows the sink", 0, "north"), process("plain", 1, "south"), process("starts", 0, None)]
    some.standbys[0].follows = SINK_WORKER
    some.members[some.worker_of(dead)].dead = True
    taken = some.staff([dead])[dead]
    assert (taken.name, taken.follows) == (chosen, None)
    some.standbys = [one for one in some.standbys if one.name != "plain"]
    some.members[some.worker_of(dead)].dead = True
    assert some.staff([dead])[dead].name == ("starts" if dead == SINK else "follows the sink")


def test_one_process_is_started_for_all_subtasks_of_a_worker() -> None:
    """Also for a part of them. It is lost for all of them, and called after its slot."""
    some = shared_fleet(0)
    some.members.clear()
    members = some.staff((SOURCE, SINK))
    assert members[SOURCE] is members[SINK]
    assert (list(some.members), members[SINK].name) == ([some.worker_of(SINK)], "slot 1 of 1")
    assert some.staff((SINK,)) == {SINK: members[SINK]}
    members[SINK].dead = True
    assert some.staff((SOURCE,))[SOURCE] is some.staff((SINK,))[SINK] is not members[SINK]


def test_a_standby_follows_all_keyed_subtasks_of_a_worker() -> None:
    """One standby for both. One that starts later is told of the newest checkpoint of each."""
    some = shared_fleet(2, SINK, SOURCE)
    one, two = process("one", 1, "south"), process("two", 1, None)
    some.standbys = [one, two]
    for number in (1, 2):
        some.completed(SINK, at(number))
        some.completed(SOURCE, at(number))
    assert one.handle.told() == [(SINK, 1), (SOURCE, 1), (SINK, 2), (SOURCE, 2)]
    start(some, two, "north")
    assert (two.follows, two.handle.told()) == (None, [])
    some.lost(one, ActorDiedError())
    some.completed(SINK, at(3))
    assert sorted(two.handle.told()) == sorted([(SINK, 3), (SOURCE, 2)])
    some.members[some.worker_of(SINK)].dead = True
    assert some.staff((SOURCE, SINK)) == {SOURCE: two, SINK: two}


def test_a_coordinator_inherits_a_process_for_all_its_subtasks() -> None:
    """And a standby that has followed several of a worker follows that worker."""
    some, info = shared_fleet(0, SINK, SOURCE), ProcessInfo(1, "north")
    spare = ProcessStatus(JobId("job-12345678"), info, follows={SINK: CheckpointId(1), SOURCE: None})
    busy = ProcessStatus(JobId("job-12345678"), info, dict.fromkeys((SOURCE, SINK), AttemptNumber(3)))
    worker = some.worker_of(SINK)
    members = some.inherit({worker: FoundProcess("busy", Handle(), busy)}, [FoundProcess("spare", Handle(), spare)])
    assert members == dict.fromkeys((SOURCE, SINK), some.members[worker])
    assert (members[SINK].name, some.standbys[0].follows) == ("busy", worker)


def test_a_coordinator_inherits_who_follows_whom() -> None:
    """A process that was put to work follows nobody, whatever it did before."""
    some, info = fleet(0, SINK), ProcessInfo(1, "north")
    spare = ProcessStatus(JobId("job-12345678"), info, follows={SINK: CheckpointId(1)})
    busy = replace(spare, tasks={SOURCE: AttemptNumber(0)})
    members = some.inherit(
        {SOURCE_WORKER: FoundProcess("busy", Handle(), busy)}, [FoundProcess("spare", Handle(), spare)]
    )
    assert (some.standbys[0].follows, members[SOURCE].follows) == (SINK_WORKER, None)


@pytest.mark.parametrize(
    ("incremental", "wanted", "kept", "followed"),
    [(True, "warm", 4, 4), (False, "warm", 2, 0), (True, "auto", 2, 0), (True, 1, 1, 0)],
)
def test_keyed_tasks_are_followed_where_their_state_lies_in_layers(
    tmp_path: Path, incremental: bool, wanted: Standbys, kept: int, followed: int
) -> None:
    """By a spare process for each slot. Elsewhere there are the same spare processes as with "auto"."""
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path), incremental=incremental)
    with tg.StreamEnvironment.local() as env:
        rows = env.from_batches(pa.table({"k": [1]}), parallelism=1)
        for name in ("n", "m"):
            rows.key_by("k").aggregate(**{name: tg.count()}, parallelism=2).collect()
        submission = env.plan("job", checkpoints=checkpoints)
    options = RayRuntime(PLACEMENT, standbys=wanted).pool_options(submission, PLACEMENT, 0, 2, None)
    assert (options.standbys, len(options.followed)) == (kept, followed)


@pytest.mark.parametrize(
    ("environment", "job", "kept"), [("auto", None, 2), (5, None, 5), (5, 3, 3), (0, None, 0), (0, "auto", 2)]
)
def test_the_settings_of_a_job_come_before_those_of_its_environment(
    tmp_path: Path, environment: Standbys, job: Standbys | None, kept: int
) -> None:
    """Three tasks, and two free slots."""
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path), standbys=job, slot_request_timeout="1min")
    with tg.StreamEnvironment.local() as env:
        env.from_batches(pa.table({"k": [1]}), parallelism=2).collect()
        submission = env.plan("job", checkpoints=checkpoints)
    options = RayRuntime(PLACEMENT, standbys=environment).pool_options(submission, PLACEMENT, 0, 2, None)
    assert (options.standbys, options.slot_request_timeout_ms) == (kept, 60_000)
