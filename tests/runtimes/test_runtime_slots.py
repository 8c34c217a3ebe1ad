"""What a job reserves when it is submitted, and who gives it back. Without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from ray.exceptions import ActorAlreadyExistsError
from ray.util.placement_group import PlacementGroup

import tidegate as tg
from tidegate.actors.graph.slot_plan import Placement
from tidegate.actors.ray import ray_job, ray_runtime
from tidegate.actors.ray.placement import PoolOptions, SlotPlacement
from tidegate.actors.ray.ray_job import RayJob
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.actors.ray.reservation import SlotRequest
from tidegate.actors.runtimes.running_job import Submission
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import JobId

COMMON = SlotPlacement(cast(PlacementGroup, "of the session"), (0, 1, 0, 1))


class Cluster:
    """What is reserved, by name, and what was given back; refuses the reservation with a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[SlotRequest, float]] = []
        self.held: list[str] = []
        self.refuses: int | None = None
        self.ours = False
        for module in (ray_runtime, ray_job):
            monkeypatch.setattr(module, "release", self.release_processes)
        monkeypatch.setattr(ray_runtime, "reserve", self._reserve)
        monkeypatch.setattr(ray_runtime, "started_here", lambda: self.ours)
        monkeypatch.setattr(ray_runtime, "SharedValue", lambda value: SimpleNamespace(release=lambda: None))
        monkeypatch.setattr(ray_runtime, "this_process", lambda: None)
        monkeypatch.setattr(RayRuntime, "check", lambda self, graph, urls: None)
        monkeypatch.setattr(RayRuntime, "check_detached", lambda self, name, urls: None)

    def _reserve(self, wanted: SlotRequest, timeout_s: float, advice: str) -> PlacementGroup:
        self.asked.append((wanted, timeout_s))
        if self.refuses == len(self.asked):
            raise ConfigurationError("no room")
        self.held.append(wanted.name.partition("(")[2])
        return cast(PlacementGroup, self.held[-1])

    def release_processes(self, group: PlacementGroup | None) -> None:
        if group is not None:
            self.held.remove(cast(str, group))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """One with room for everything."""
    return Cluster(monkeypatch)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PoolOptions]:
    """The options of coordinators that were started."""
    found: list[PoolOptions] = []

    def start(runtime: RayRuntime, submission: Submission, context: object, options: PoolOptions) -> str:
        found.append(options)
        return "coordinator"

    def detached(submission: Submission, options: PoolOptions, restarts_max: int) -> str:
        found.append(options)
        return "coordinator"

    monkeypatch.setattr(RayRuntime, "_start", start)
    monkeypatch.setattr(ray_runtime, "start_detached", detached)
    return found


def submission(folder: Path, gpus: float | None, *, detached: bool = False, group: str | None = None) -> Submission:
    """A job of two common slots, and a step with three subtasks, which may have slots of its own or be in a group."""
    slot: Any = {} if gpus is None else {"num_gpus": gpus}
    slot |= {} if group is None else {"slot_sharing_group": group}
    with tg.StreamEnvironment.local() as env:
        rows = env.from_batches(pa.table({"k": [1]}), parallelism=2)
        rows.map_batches(lambda batch: batch, schema=rows.schema, name="score", parallelism=3, **slot).rebalance().map(
            lambda row: row, parallelism=1
        )
        config = tg.CheckpointConfig(storage=str(folder), slot_request_timeout="90s")
        made = env.plan("job", checkpoints=config)
    return Submission(made.spec, made.context, detached=detached)


@pytest.mark.parametrize("strategy", ["spread", "pack", "strict_pack"])
def test_a_job_reserves_the_slots_of_its_steps(
    cluster: Cluster, started: list[PoolOptions], tmp_path: Path, strategy: Placement
) -> None:
    """One for each subtask, as the environment places things; the common ones are those of the session."""
    runtime = RayRuntime(COMMON, strategy=strategy)
    job = runtime.submit(submission(tmp_path, 1))
    ((wanted, timeout_s),) = cluster.asked
    assert (wanted.bundles, wanted.labels) == ([{"CPU": 1.0, "GPU": 1.0}] * 3, ["score"] * 3)
    assert (wanted.strategy, wanted.detached, timeout_s) == (strategy.upper(), False, 90.0)
    (options,) = started
    assert (options.placement, options.own_slots, job.slots) == (COMMON, "slots of steps)", range(2))


def test_a_job_without_resources_reserves_nothing(cluster: Cluster, started: list[PoolOptions], tmp_path: Path) -> None:
    """Its slots are those of the session."""
    RayRuntime(SlotPlacement(COMMON.placement_group, (0, 1, 2))).submit(submission(tmp_path, None))
    assert (cluster.asked, started[0].own_slots) == ([], None)


def test_a_job_takes_the_slots_of_all_its_groups(cluster: Cluster, started: list[PoolOptions], tmp_path: Path) -> None:
    """Side by side, of those of the session."""
    job = RayRuntime(SlotPlacement(COMMON.placement_group, tuple(range(6)))).submit(
        submission(tmp_path, None, group="scoring")
    )
    assert (cluster.asked, job.slots) == ([], range(5))


def test_a_job_whose_groups_need_more_slots_than_there_are_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """By all of its groups, although each of them would fit."""
    with pytest.raises(ConfigurationError) as refused:
        RayRuntime(COMMON).submit(submission(tmp_path, None, group="scoring"))
    assert str(refused.value) == (
        "the job needs 5 task slots (2 for slot sharing group 'default', 3 for slot sharing group 'scoring'), because "
        "slot sharing groups share none, and there are 4: lower the parallelism, name fewer groups "
        "(slot_sharing_group=), or start the session with more executors or slots_per_executor"
    )


def test_a_vertex_that_is_wider_than_the_session_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """By its name, where the job has one group."""
    with pytest.raises(ConfigurationError, match="vertex 'score' has parallelism 3, and there are 2 task slots: lower"):
        RayRuntime(SlotPlacement(COMMON.placement_group, (0, 1))).submit(submission(tmp_path, None))


def test_a_job_that_must_wait_for_another_one_names_its_groups(
    cluster: Cluster, started: list[PoolOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who has the slots."""
    monkeypatch.setattr(RayJob, "over", property(lambda job: False))
    runtime = RayRuntime(SlotPlacement(COMMON.placement_group, tuple(range(6))))
    runtime.submit(submission(tmp_path, None))
    with pytest.raises(
        ConfigurationError,
        match=r"needs 5 neighbouring task slots \(2 for .*'default', 3 for .*'scoring'\), and 3 of 6 are taken by job",
    ):
        runtime.submit(submission(tmp_path, None, group="scoring"))


def test_a_session_forgets_the_jobs_that_are_over(
    cluster: Cluster, started: list[PoolOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs many jobs, one after the other, does not grow with them."""
    over: set[RayJob] = set()
    monkeypatch.setattr(RayJob, "over", property(lambda job: job in over))
    runtime, made = RayRuntime(COMMON), submission(tmp_path, None)
    for _ in range(5):
        over.add(runtime.submit(made))
    assert len(runtime.jobs) == 1


def test_a_detached_job_reserves_all_of_its_slots(cluster: Cluster, started: list[PoolOptions], tmp_path: Path) -> None:
    """For longer than its driver lives; a runtime that reserves nothing has no common ones for it either."""
    RayRuntime(COMMON).submit(submission(tmp_path, 1, detached=True))
    assert [(wanted.name.partition(" ")[2], len(wanted.bundles), wanted.detached) for wanted, _ in cluster.asked] == [
        ("(slots of steps)", 3, True),
        ("(slots)", 2, True),
    ]
    placement = started[0].placement
    assert placement is not None
    assert (placement.placement_group, placement.bundles) == ("slots)", (0, 1))
    assert started[0].own_slots == "slots of steps)"
    RayRuntime().submit(submission(tmp_path, 1, detached=True))
    assert started[1].placement is None
    assert len(cluster.asked) == 3


def test_a_detached_job_without_room_for_all_keeps_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Nobody else would give it back."""
    cluster.refuses = 2
    with pytest.raises(ConfigurationError, match="no room"):
        RayRuntime(COMMON).submit(submission(tmp_path, 1, detached=True))
    assert cluster.held == []


def test_a_job_that_cannot_start_keeps_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its name is taken twice over."""

    def taken(*_: object) -> str:
        raise ActorAlreadyExistsError("it is taken")

    monkeypatch.setattr(RayRuntime, "_start", taken)
    with pytest.raises(ActorAlreadyExistsError):
        RayRuntime(COMMON).submit(submission(tmp_path, 1))
    assert cluster.held == []


def test_a_job_that_is_over_gives_its_slots_back_once(
    cluster: Cluster, started: list[PoolOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its end is heard; the common ones stay with the session."""
    monkeypatch.setattr(ray_job.ray, "kill", lambda actor, no_restart: None)
    job = RayRuntime(COMMON).submit(submission(tmp_path, 1))
    assert cluster.held == ["slots of steps)"]
    for _ in range(2):
        job.release_processes()
    assert cluster.held == []


def test_who_attaches_to_a_job_leaves_its_slots_alone(cluster: Cluster) -> None:
    """They belong to whoever has submitted it."""
    cluster.held.append("slots of steps)")
    card = cast(Any, SimpleNamespace(name="job", job_id=JobId("job-1"), detached=False))
    RayJob(card, None, None, range(0), cast(Any, None)).release_processes()
    assert cluster.held == ["slots of steps)"]


@pytest.mark.parametrize(("ours", "others_run", "timeout_s"), [(False, False, 90), (True, True, 90), (True, False, 30)])
def test_nobody_waits_long_for_what_nobody_can_bring(
    cluster: Cluster, started: list[PoolOptions], tmp_path: Path, ours: bool, others_run: bool, timeout_s: float
) -> None:
    """On a cluster of this script only the end of another job of it makes room."""
    cluster.ours = ours
    runtime = RayRuntime()
    runtime.jobs.append(cast(RayJob, SimpleNamespace(over=not others_run)))
    runtime.submit(submission(tmp_path, 1))
    assert [waited for _, waited in cluster.asked] == [timeout_s]


def test_slots_of_an_environment_are_had_until_it_is_closed(cluster: Cluster) -> None:
    """A CPU each."""
    runtime = RayRuntime.with_slots(3, "pack", 12.0)
    ((wanted, timeout_s),) = cluster.asked
    assert (wanted.bundles, wanted.strategy, timeout_s) == ([{"CPU": 1.0}] * 3, "PACK", 12.0)
    placement = runtime.placement
    assert placement is not None
    assert placement.bundles == (0, 1, 2)
    for _ in range(2):
        runtime.stop()
        assert cluster.held == []
