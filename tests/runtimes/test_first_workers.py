"""The first process of each worker, which the driver starts beside the coordinator."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray_fakes import SINK, SINK_WORKER, SOURCE, SOURCE_WORKER, Method, source_to_sink

from tidegate.actors.graph.job_graph import vertex_labels
from tidegate.actors.graph.slot_plan import WorkerId, slot_plan
from tidegate.actors.ray import worker_pool
from tidegate.actors.ray.placement import JobSlots, PoolOptions, Slot
from tidegate.actors.ray.worker_pool import WorkerPool, first_names, start_workers
from tidegate.storage.files.file_system_store import open_store

_, GRAPH = source_to_sink()
PLAN = slot_plan(GRAPH, vertex_labels(GRAPH))


@dataclass
class Process:
    """An actor of Ray."""

    name: str
    live: Method = field(default_factory=Method)
    identify: Method = field(default_factory=Method)
    leave: Method = field(default_factory=Method)


@dataclass
class Cluster:
    """The named actors of Ray."""

    actors: dict[str, Process] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)

    def start(self, name: str, slot: Slot, *_: Any, exists: bool = True, **__: Any) -> Process:
        """Returns the actor of this name, and creates it if it is missing."""
        assert exists or name not in self.actors
        if name not in self.actors:
            self.created.append(name)
        return self.actors.setdefault(name, Process(name))

    def find(self, name: str, namespace: str) -> Process | None:
        """Returns the actor of this name, if any."""
        return self.actors.get(name)

    def kill(self, actor: Process, *, no_restart: bool) -> None:
        """Ends an actor for good."""
        assert no_restart
        del self.actors[actor.name]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A Ray without actors."""
    made = Cluster()
    monkeypatch.setattr(worker_pool, "_start", made.start)
    monkeypatch.setattr(worker_pool, "find_actor", made.find)
    monkeypatch.setattr(worker_pool.ray, "kill", made.kill)
    return made


def options(taken: set[str] | None = None) -> PoolOptions:
    """The options of a job whose driver starts its workers."""
    bare = PoolOptions("job", "namespace", None, 0, 0, open_store)
    return replace(bare, first_names=first_names("job", PLAN, taken or set()))


def pool(of: PoolOptions) -> WorkerPool:
    """The pool of the coordinator."""
    return WorkerPool(GRAPH, Future(), None, of, lambda action: action())  # type: ignore[arg-type]


def test_the_coordinator_uses_the_processes_that_the_driver_has_started(cluster: Cluster) -> None:
    """Each process exists once, whichever side was first."""
    of = options()
    start_workers(GRAPH, None, None, of)  # type: ignore[arg-type]
    members = pool(of).staff([SOURCE, SINK])
    assert {member.name for member in members.values()} == set(of.first_names.values()) == set(cluster.created)
    assert len(cluster.created) == len({SOURCE_WORKER, SINK_WORKER})


def test_the_coordinator_starts_what_the_driver_has_not_started(cluster: Cluster) -> None:
    """A driver may end in between."""
    members = pool(options()).staff([SOURCE, SINK])
    assert sorted(member.name for member in members.values()) == sorted(cluster.created)


def test_the_next_process_of_a_worker_has_the_next_number(cluster: Cluster) -> None:
    """A name is used once, so that a log or a page means one process."""
    workers = pool(options())
    first = workers.staff([SOURCE])[SOURCE]
    workers.kill(first)
    second = workers.staff([SOURCE])[SOURCE]
    assert (first.name.rpartition("#")[2], second.name.rpartition("#")[2]) == ("0", "1")


def test_a_name_that_exists_is_not_used(cluster: Cluster) -> None:
    """It belongs to a job of the same name that is just ending."""
    before = options().first_names
    after = options({*before.values()}).first_names
    assert {name.rpartition("#")[0] for name in before.values()} == {n.rpartition("#")[0] for n in after.values()}
    assert {name.rpartition("#")[2] for name in after.values()} == {"1"}


def test_a_process_belongs_to_the_job_before_the_coordinator_needs_it(cluster: Cluster) -> None:
    """It asks as soon as it has started, and would end if it were unknown."""
    of = options()
    waiting = pool(of)
    name = of.first_names[SOURCE_WORKER]
    assert waiting.has(name, "its id")
    assert not waiting.has("job/standby#0", "its id")


def test_a_job_that_ends_before_it_is_deployed_leaves_no_process(cluster: Cluster) -> None:
    """It was cancelled while its coordinator started."""
    of = options()
    start_workers(GRAPH, None, None, of)  # type: ignore[arg-type]
    assert cluster.actors
    waiting = pool(of)
    waiting.close()
    assert not cluster.actors
    assert not waiting.has(of.first_names[SOURCE_WORKER], "its id")


def test_a_successor_does_not_count_processes_that_its_search_has_not_found(cluster: Cluster) -> None:
    """Such a process ends when it asks whether it belongs to the job."""
    of = options()
    start_workers(GRAPH, None, None, of)  # type: ignore[arg-type]
    successor = pool(of)
    successor.inherit({}, [])
    assert not successor.has(of.first_names[SOURCE_WORKER], "its id")


def test_a_process_runs_in_the_slot_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver and coordinator compute the same place."""
    of, places = options(), dict[str, tuple[Slot, str]]()
    monkeypatch.setattr(
        worker_pool, "_start", lambda name, slot, shown_as, *_, **__: places.update({name: (slot, shown_as)})
    )
    start_workers(GRAPH, None, None, of)  # type: ignore[arg-type]
    slots = JobSlots(GRAPH, of)
    workers: list[WorkerId] = list(of.first_names)
    assert [places[of.first_names[w]] for w in workers] == [(slots.of(w), PLAN.shown(w)) for w in workers]
