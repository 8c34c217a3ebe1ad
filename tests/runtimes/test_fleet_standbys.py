"""The spare processes of a fleet: how many, where, and which of them takes over. Without Ray."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SOURCE, Method, source_to_sink

import tidegate as tg
from tidegate.actors.hosts.process_settings import Standbys
from tidegate.actors.runtimes.ray.fleet import Fleet, FleetOptions, Member, SlotPlacement
from tidegate.actors.runtimes.ray.inheritance import Found
from tidegate.actors.runtimes.ray.process.orders import Held
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.actors.runtimes.ray.ray_runtime import RayRuntime
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, JobId

PLACEMENT = SlotPlacement(cast(PlacementGroup, None), (0, 1, 0, 1))


class Handle:
    """A process that lives on."""

    def __init__(self) -> None:
        self.live = Method()


class SomeFleet(Fleet):
    """A fleet whose new processes start when the test says so."""

    def _create(self, name: str, bundle: int | None, cpus: float, spare: bool = False) -> Member:
        return Member(name, Handle(), bundle, Future())


def process(name: str, bundle: int, node: str | None) -> Member:
    """One that has started on a node, or has not started."""
    return Member(name, Handle(), bundle, Future(), None if node is None else ProcessInfo(1, node))


def fleet(standbys: int) -> SomeFleet:
    """A source in bundle 0 and a sink in bundle 1, on two nodes, in slots 2 and 3 of a reservation."""
    options = FleetOptions("job", "namespace", PLACEMENT, 2, standbys, open_store)
    found = SomeFleet(source_to_sink()[1], None, None, options, lambda action: action())
    found.members = {SOURCE: process("source", 0, "north"), SINK: process("sink", 1, "south")}
    return found


def test_spare_processes_are_spread_over_nodes() -> None:
    """A node that is lost takes those on it along; what it took is made good where fewest are left."""
    some = fleet(standbys=3)
    some.refill()
    assert [m.bundle for m in some._standbys] == [0, 1, 0]
    some._standbys = [process("spare", 0, "north"), process("spare", 0, "north")]
    some.refill()
    assert [m.bundle for m in some._standbys] == [0, 0, 1]


def test_spare_processes_are_counted_by_what_they_do() -> None:
    """Those that wait, and those that start; one that hangs is neither."""
    some = fleet(standbys=2)
    some.refill()
    some._standbys += [process("ready", 0, "north"), process("hung", 0, "north")]
    some._standbys[-1].hung = True
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
    some._standbys = [process(*one) for one in standbys]
    some.members[SINK].dead = True
    assert some.staff([SINK])[SINK].name == chosen


def test_a_coordinator_inherits_where_processes_are() -> None:
    """A task may run in a bundle that is not that of its slot, and so may a spare process."""
    some, info = fleet(standbys=0), ProcessInfo(1, "north")
    held = Held(JobId("job-12345678"), info, None, AttemptNumber(-1), bundle=1)
    members = some.inherit({SOURCE: Found("task", Handle(), held)}, [Found("spare", Handle(), held)])
    assert (members[SOURCE].bundle, some._standbys[0].bundle) == (1, 1)


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
    options = RayRuntime(PLACEMENT, standbys=environment)._fleet_options(submission, PLACEMENT, 0, 2, None)
    assert (options.standbys, options.slot_request_timeout_ms) == (kept, 60_000)
