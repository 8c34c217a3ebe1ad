"""`Mailbox`: when ticks come, and when what was gathered is sent."""

from __future__ import annotations

import queue

from waiting import LIMIT_S

from tidegate.actors.ray.mailbox import Mailbox

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


def test_what_messages_bring_about_is_sent_before_the_thread_sleeps() -> None:
    """Of several messages of one round at once, after the last of them. What a tick and a timer bring about as well."""
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    gathered: list[str] = []

    def flush() -> None:
        if gathered:
            seen.put(" ".join(gathered))
            gathered.clear()

    def soon() -> None:
        gathered.append("message")
        mailbox.call_later(0, lambda: gathered.append("timer"))

    def ticked() -> None:
        gathered.append("tick")

    mailbox = Mailbox("tidegate-test", lambda: False, ticked, LONG_MS, lambda error: None, flush=flush)
    mailbox.start()
    assert seen.get(timeout=LIMIT_S) == "tick"

    def two() -> None:
        mailbox.post(lambda: gathered.append("two"))
        gathered.append("one")

    mailbox.post(two)
    assert seen.get(timeout=LIMIT_S) == "one two"
    mailbox.post(soon)
    assert [seen.get(timeout=LIMIT_S) for _ in range(2)] == ["message", "timer"]
