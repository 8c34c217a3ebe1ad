"""What Ray cannot place is named while a function of the job may wait for it, and Ray is asked only then."""

from __future__ import annotations

from typing import cast

import pytest
from ray_fakes import LaterMailbox
from waiting import until

from tidegate.actors.drivers.job_context import HeartbeatSettings
from tidegate.actors.ray.heartbeats import HeartbeatMonitor
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.reservation import NodeRoom
from tidegate.actors.ray.resource_waits import (
    BUSY_MS,
    LOOK_EVERY_MS,
    DemandForCalls,
    PendingDemand,
    what_is_pending,
)

FULL = [NodeRoom("north", {"CPU": 0.0}, {"CPU": 4.0})]
BUNDLE = {"CPU_group_0_96843": 1.0, "bundle_group_0_96843": 0.001}


def test_what_is_pending_is_described_with_the_room_there_is() -> None:
    """By what each task needs, and how many need it."""
    assert what_is_pending([({"CPU": 1.0}, 4), ({"CPU": 1.0, "GPU": 2.0}, 1)], FULL) == (
        "Ray has pending tasks or actors: 4 that need 1 CPU each and 1 that need 1 CPU + 2 GPU each. 2 CPU needed, and "
        "0 CPU free of 4 CPU; no node has any GPU. Free on the nodes that live (1): north: 0 of 4 CPU, 0 of 0 GPU"
    )
    many = what_is_pending([({f"kind{number}": 1.0}, 1) for number in range(9)], FULL)
    assert many is not None
    assert "kind3 each and 5 more kinds. " in many


@pytest.mark.parametrize("demand", [[], [(BUNDLE, 3)], [({}, 2)], [({"CPU": 0.0}, 1)]])
def test_processes_of_jobs_are_no_pending_demand(demand: list[tuple[dict[str, float], int]]) -> None:
    """They are placed in bundles, or ask for nothing."""
    assert what_is_pending(demand, FULL) is None


class Asked:
    """Counts how often Ray was asked."""

    def __init__(self) -> None:
        self.times = 0
        self.answer: str | None = "Ray has pending tasks or actors: 4 that need 1 CPU each"

    def __call__(self) -> str | None:
        self.times += 1
        return self.answer


def test_ray_is_asked_only_while_a_call_takes_long() -> None:
    """Not before, and not more often than it has to be; once the call is over, the job waits for nothing."""
    ask = Asked()
    demand = PendingDemand(cast("Mailbox", LaterMailbox()), ask)
    demand.look({"orders/slot 1": BUSY_MS - 1}, 0)
    assert (ask.times, demand.waits_for) == (0, None)
    demand.look({"orders/slot 1": 12_000, "orders/slot 2": 11_000, "orders/slot 3": 1}, 1_000)
    until("an answer", lambda: demand.waits_for is not None)
    assert str(demand.waits_for).startswith(
        "a function in orders/slot 1 and 1 more, in one call for 12 s, while Ray has pending tasks or actors: 4 that "
    )
    assert "leave CPUs free that are not slots" in str(demand.waits_for)
    demand.look({"orders/slot 1": 13_000}, 1_000 + LOOK_EVERY_MS - 1)
    assert ask.times == 1
    ask.answer = None
    demand.look({"orders/slot 1": 14_000}, 1_000 + LOOK_EVERY_MS)
    until("room for it", lambda: demand.waits_for is None)
    assert ask.times == 2
    ask.answer = "pending"
    demand.look({"orders/slot 1": 20_000}, 1_000 + 2 * LOOK_EVERY_MS)
    until("an answer", lambda: demand.waits_for is not None)
    demand.look({}, 60_000)
    assert demand.waits_for is None
    demand.close()


def test_the_monitor_counts_how_long_a_call_takes() -> None:
    """Up to the last answer; another call begins anew, and a process that does nothing is in none."""
    monitor = HeartbeatMonitor(HeartbeatSettings(interval_ms=1_000))
    monitor.tick(0)
    for name in ("one", "two", "idle"):
        monitor.watch(name)
    monitor.answered("one", 7)
    monitor.answered("two", 7)
    monitor.answered("idle", None)
    for at_ms in range(500, 3_001, 500):
        monitor.tick(at_ms)
    monitor.answered("one", 7)
    monitor.answered("two", 8)
    assert monitor.busy_ms() == {"one": 3_000, "two": 0}


def test_the_monitor_counts_how_long_a_call_of_map_async_takes() -> None:
    """While the mailbox does nothing. No process hangs for it: such calls have a timeout of their own."""
    settings = HeartbeatSettings(interval_ms=1_000, call_timeout_ms=2_000)
    monitor = HeartbeatMonitor(settings)
    monitor.tick(0)
    for name in ("waits", "goes on", "both"):
        monitor.watch(name)
    at_ms = 0
    for number in range(4):
        monitor.answered("waits", None, 3)
        monitor.answered("goes on", None, number)
        monitor.answered("both", number, 3)
        for _ in range(2):
            at_ms += settings.tick_ms
            assert not monitor.tick(at_ms).hung
    monitor.answered("waits", None, 3)
    monitor.answered("goes on", None, None)
    monitor.answered("both", 4, 3)
    assert monitor.busy_ms() == {"waits": at_ms, "both": at_ms}


def test_ray_is_asked_now_and_then_however_many_calls_are_late(caplog: pytest.LogCaptureFixture) -> None:
    """Each gets the newest answer. Where Ray does not answer nothing is named, and that is logged."""
    ask, now_ms = Asked(), 0
    why_late = DemandForCalls(ask, lambda: now_ms)
    first = why_late()
    assert str(first).startswith("Ray has pending tasks or actors: 4 that need 1 CPU each. Slots reserve CPUs: if")
    now_ms, ask.answer = LOOK_EVERY_MS - 1, None
    assert (why_late(), ask.times) == (first, 1)
    now_ms += 1
    assert (why_late(), ask.times) == (None, 2)

    def silent() -> str | None:
        raise RuntimeError("no answer")

    assert DemandForCalls(silent)() is None
    assert "the pending demand of Ray is unknown: RuntimeError: no answer" in caplog.text
