"""A clock that is set while a job runs, local runtime: timers fire, and checkpoints are taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, opening
from waiting import until

import tidegate as tg
from tidegate.storage import clock

HOUR_NS = 3_600_000_000_000
DELAY_MS = 20


class Clock:
    """The clocks of the machine; the wall clock is set by as much as a test says."""

    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self.set_by_ns = 0

    def time_ns(self) -> int:
        """The wall clock."""
        return 400_000 * HOUR_NS + self.monotonic_ns() + self.set_by_ns


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the runtime looks at."""
    wall = Clock()
    monkeypatch.setattr(clock, "time", wall)
    return wall


class Alarm(tg.ProcessFunction):
    """Each row sets a timer."""

    fired: list[int]
    waiting: list[int]

    def __deepcopy__(self, memo: object) -> Alarm:
        return self

    def process(self, row: tg.Row, context: tg.ProcessContext) -> None:
        now_ms = context.timer_service.current_processing_time()
        context.timer_service.register_processing_time_timer(now_ms + DELAY_MS)
        self.waiting.append(now_ms + DELAY_MS)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, object]]:
        self.fired.append(timestamp)
        yield from ()


@pytest.mark.parametrize("hours", [-1, 1])
def test_processing_time_timers_fire_although_the_clock_is_set(wall: Clock, tmp_path: Path, hours: int) -> None:
    """With the timestamps that they were registered for; those that are registered afterwards fire as well."""
    source, alarm = GatedSource(3, gates=[1, 2]), Alarm()
    alarm.fired, alarm.waiting = [], []
    with tg.StreamEnvironment.local(1) as env, opening(source):
        env.from_source(source).key_by("x").process(alarm, schema=pa.schema([("x", pa.int64())])).collect()
        job = env.execute("alarms", checkpoints=config(tmp_path), restart=NO_RESTART)
        until("the first timer", lambda: alarm.waiting)
        wall.set_by_ns = hours * HOUR_NS
        until("it fires", lambda: alarm.fired == alarm.waiting, lambda: (alarm.fired, alarm.waiting))
        source.open_gate(1)
        until("the second one", lambda: len(alarm.fired) == 2 and alarm.fired == alarm.waiting)
        source.open_all()
        assert job.wait("4min") == "finished"


@pytest.mark.parametrize("hours", [-1, 1])
def test_periodic_checkpoints_go_on_although_the_clock_is_set(wall: Clock, tmp_path: Path, hours: int) -> None:
    """In their rhythm."""
    source = GatedSource(2, gates=[1])
    with tg.StreamEnvironment.local(1) as env, opening(source):
        env.from_source(source).collect()
        job = env.execute("rhythm", checkpoints=config(tmp_path, interval="20ms", min_pause="5ms"), restart=NO_RESTART)
        until("two checkpoints", lambda: job.progress().completed_checkpoints >= 2)
        wall.set_by_ns = hours * HOUR_NS
        seen = job.progress().completed_checkpoints
        until("more of them", lambda: job.progress().completed_checkpoints >= seen + 3)
        source.open_all()
        assert job.wait("4min") == "finished"
