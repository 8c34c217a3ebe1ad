"""Ray reports the tasks that it cannot place, and how much room there is."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from waiting import until

from tidegate.actors.runtimes.ray.slots.pending_demand import look_at_demand

CPUS = 4_321


@pytest.mark.slow
def test_tasks_without_room_are_described(plain_ray: None) -> None:
    """Until they are cancelled."""
    large: Any = ray.remote(num_cpus=CPUS)(lambda: None)
    waiting = [large.remote() for _ in range(2)]
    until("the pending tasks", lambda: f"2 that need {CPUS} CPU each" in str(look_at_demand()), look_at_demand)
    assert f"No node has {CPUS} CPU, not even when it is empty. Free on the nodes" in str(look_at_demand())
    for reference in waiting:
        ray.cancel(reference)
    until("no pending tasks", lambda: f"need {CPUS} CPU" not in str(look_at_demand()), look_at_demand)
