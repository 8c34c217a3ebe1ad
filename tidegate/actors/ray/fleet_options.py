"""`FleetOptions`: how the processes of a job are made, and where its slots are. Made by the driver that submits it."""

from __future__ import annotations

from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup

from tidegate.actors.drivers.process_settings import SLOT_REQUEST_TIMEOUT_MS, STANDBY_DELAY_MS
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.store import OpenStore
from tidegate.storage.process_id import ProcessId


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Where tasks run: `bundles[s]` is the bundle of `placement_group` that holds slot s, one CPU of it."""

    placement_group: PlacementGroup
    bundles: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.bundles)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How the processes of a job are made. `first_slot`: subtask i goes into slot `first_slot + i`."""

    prefix: str
    namespace: str
    placement: SlotPlacement | None
    first_slot: int
    standbys: int
    open_store: OpenStore
    driver: ProcessId | None = None
    """The process that has submitted the job: all processes of the job go with it."""
    slot_request_timeout_ms: int = SLOT_REQUEST_TIMEOUT_MS
    """For so long an attempt waits for room for its processes."""
    followed: frozenset[TaskId] = frozenset()
    """Tasks whose state a standby holds each."""
    standby_delay_ms: int = STANDBY_DELAY_MS
    """How long after a deployment the first standby begins."""
    own_slots: PlacementGroup | None = None
    """The bundles of the tasks that are in no common slot, in the order of `SlotPlan.bundles`."""
