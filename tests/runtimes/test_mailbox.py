"""`Mailbox`: when ticks come."""

from __future__ import annotations

import queue

from waiting import LIMIT_S

from tidegate.actors.runtimes.ray.process.mailbox import Mailbox

LONG_MS = 3_600_000
"""Longer than any test waits."""


def test_ticks_come_with_work_and_hardly_ever_without() -> None:
    """What is done brings the next tick near; while nothing is done the thread sleeps, and does not look around."""
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ticked() -> None:
        seen.put("tick")

    def broke_down(error: BaseException) -> None:
        seen.put(str(error))

    mailbox = Mailbox("tidegate-test", lambda: False, ticked, 0, broke_down, idle_tick_ms=LONG_MS)
    mailbox.start()
    assert seen.get(timeout=LIMIT_S) == "tick"
    for number in range(20):
        mailbox.post(lambda number=number: seen.put(str(number)))  # type: ignore[misc]
        assert [seen.get(timeout=LIMIT_S) for _ in range(2)] == [str(number), "tick"]
    assert seen.empty()


def test_ticks_come_as_often_as_ever_where_nobody_says_otherwise() -> None:
    """Whether there is work or not: a coordinator looks at what is late."""
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    mailbox = Mailbox("tidegate-test", lambda: False, lambda: seen.put("tick"), 1, lambda error: None)
    mailbox.start()
    assert [seen.get(timeout=LIMIT_S) for _ in range(3)] == ["tick"] * 3
