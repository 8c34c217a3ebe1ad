"""The runtime of `StreamEnvironment.ray`: with slots of its own reservation, or with none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from tidegate.actors.graph.slot_plan import Placement
    from tidegate.actors.ray.driver.connection import Connection
    from tidegate.actors.ray.ray_runtime import RayRuntime


def check_slots(slots: int | None, placement: Placement, parallelism: int) -> None:
    """Refuse what no cluster could give. ConfigurationError."""
    from tidegate.actors.graph.slot_plan import strategy_of

    strategy_of(placement)
    if slots is not None and slots < max(1, parallelism):
        raise ConfigurationError(
            f"slots={slots}: a slot holds one subtask of each step, so parallelism={parallelism} needs that many"
        )


def runtime_on(
    connection: Connection, slots: int | None, placement: Placement, checkpoints: CheckpointConfig
) -> RayRuntime:
    """The runtime on a cluster that this process is connected to; where its slots cannot be had the connection ends."""
    from tidegate.actors.ray.process.orphans import end_orphans
    from tidegate.actors.ray.ray_runtime import RayRuntime

    end_orphans()
    if slots is None:
        return RayRuntime(strategy=placement)
    try:
        return RayRuntime.with_slots(slots, placement, checkpoints.slot_request_timeout / 1_000)
    except BaseException:
        connection.close()
        raise
