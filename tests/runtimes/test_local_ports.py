"""What a local job's timers hold on to."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.actors.runtimes.local.local_ports import LocalTaskPort
from tidegate.actors.runtimes.timers import Timers
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.messages.events import TaskTimer
from tidegate.storage.ids import SubtaskIndex, VertexId

TASK = TaskId(VertexId("task"), SubtaskIndex(0))


class Host:
    """Stands for a task and its state."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def handle(self, event: Any) -> None:
        """Note it."""
        self.told.append(event)


def test_a_timer_that_is_far_away_does_not_keep_a_task_that_is_over() -> None:
    """Each attempt of a job would leave its state behind, for as long as users set timers ahead."""
    timers = Timers()
    job: Any = SimpleNamespace(timers=timers, guarded=lambda task, host, action: action())
    no_pool: Any = None
    port = LocalTaskPort(job, TASK, no_pool)
    host: Any = Host()
    port.host = host
    port.set_timer(do.SetTaskTimer(TaskTimer.PROCESSING_TIME, 0), 0)
    timers.pop()()
    assert [event.timer for event in host.told] == [TaskTimer.PROCESSING_TIME]

    port.set_timer(do.SetTaskTimer(TaskTimer.PROCESSING_TIME, MAX_WATERMARK_MS), MAX_WATERMARK_MS)
    over = weakref.ref(host)
    del host, port
    gc.collect()

    assert over() is None
    timers.pop()()
