"""Tasks with slots of their own: which process they get after a failure, and when they wait. Without Ray."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from passing_functions import Passes
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SINK_WORKER, SOURCE, SOURCE_WORKER, Method, source_to_sink

import tidegate as tg
from tidegate.actors.drivers.job_context import Standbys
from tidegate.actors.graph.resources import Resources
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.placement import PoolOptions, Slot, SlotPlacement
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool, places_of
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.file_system_store import open_store

PLACEMENT = SlotPlacement(cast(PlacementGroup, "common"), (0,))
BOTH: tuple[TaskId, ...] = (SOURCE, SINK)
NORTH = frozenset({"north"})


class Handle:
    """A process that lives on."""

    def __init__(self) -> None:
        self.live = Method()
        self.follow = Method()


def process(name: str, node: str | None, bundle: int | None = 0) -> WorkerHandle:
    """One that has started on a node, or has not started."""
    return WorkerHandle(name, Handle(), bundle, Future(), None if node is None else ProcessInfo(1, node))


class SomeFleet(WorkerPool):
    """A fleet whose new processes are only noted, with their slots."""

    made: list[Slot]

    def _create(
        self, name: str, slot: Slot, shown_as: str, spare: bool = False, avoided: Collection[str] = ()
    ) -> WorkerHandle:
        self.made.append(slot)
        return WorkerHandle(f"{name}#new", Handle(), slot.bundle, Future())


def fleet(placement: SlotPlacement | None = PLACEMENT) -> SomeFleet:
    """A source in the common slots, a sink with a GPU on another node, and a spare process on a third one."""
    graph = source_to_sink(resources=Resources(1.0, 1.0))[1]
    options = PoolOptions("job", "namespace", placement, 0, 1, open_store, own_slots=cast(PlacementGroup, "own"))
    found = SomeFleet(graph, None, None, options, lambda action: action())
    found.made = []
    found.members = {SOURCE_WORKER: process("source", "north"), SINK_WORKER: process("sink", "south", None)}
    found.standbys = [process("spare", "east")]
    return found


def test_no_spare_process_takes_the_place_of_a_task_with_a_slot_of_its_own() -> None:
    """It has no GPU. A new one starts in the slot, which is still reserved."""
    some = fleet()
    some.members[SINK_WORKER].dead = True
    assert some.staff(BOTH)[SINK].name == "sink (1/1)#new"
    (slot,) = some.made
    assert (slot.own, slot.group, slot.index, slot.takes) == (True, "own", 0, Resources(1.0, 1.0))
    assert [spare.name for spare in some.standbys] == ["spare"]


def test_a_spare_process_takes_the_place_of_a_task_in_a_common_slot() -> None:
    """As in any job; and a task whose process lives keeps it, whatever it reserves."""
    some = fleet()
    some.members[SOURCE_WORKER].dead = True
    staffed = some.staff(BOTH)
    assert (staffed[SOURCE].name, staffed[SINK].name) == ("spare", "sink")
    assert some.made == []


@pytest.mark.parametrize("placement", [PLACEMENT, None])
def test_a_task_with_a_slot_of_its_own_waits_for_word_of_its_node(placement: SlotPlacement | None) -> None:
    """No spare process helps it. Its bundle may still be on that node, also where nothing else is reserved."""
    some = fleet(placement)
    assert some.lacks(BOTH, frozenset({"south"}))
    assert not some.lacks(BOTH, NORTH), "the spare process suffices for the source"
    assert not some.lacks((SOURCE,), frozenset({"south"})), "a region of its own does not wait for others"
    assert not some.lacks(BOTH, frozenset())
    some.standbys = []
    assert some.lacks(BOTH, NORTH) is (placement is not None)


def test_spare_processes_are_placed_beside_tasks_in_common_slots() -> None:
    """A slot of its own is in no bundle of theirs."""
    some = fleet()
    assert [place.bundle for place in places_of(some.members.values())] == [0]
    some.standbys = []
    some.refill()
    assert [(slot.own, slot.bundle, slot.takes.cpus) for slot in some.made] == [(False, 0, 0.0)]


@pytest.mark.parametrize(("wanted", "kept", "followed"), [("auto", 1, 0), ("warm", 2, 1), (7, 7, 0)])
def test_spare_processes_are_kept_for_tasks_in_common_slots(
    tmp_path: Path, wanted: Standbys, kept: int, followed: int
) -> None:
    """The source and the last step share one. The state of a keyed task with a GPU is not followed."""

    checkpoints = tg.CheckpointConfig(storage=str(tmp_path), incremental=True)
    with tg.StreamEnvironment.local() as env:
        rows = env.from_batches(pa.table({"k": [1]}), parallelism=1)
        with_gpu = rows.key_by("k").process(Passes(), schema=rows.schema, num_gpus=1, parallelism=4)
        with_gpu.key_by("k").aggregate(n=tg.count(), parallelism=1).collect()
        submission = env.plan("job", checkpoints=checkpoints)
    options = RayRuntime(PLACEMENT, standbys=wanted).pool_options(submission, PLACEMENT, 0, 9, None)
    assert (options.standbys, len(options.followed)) == (kept, followed)
