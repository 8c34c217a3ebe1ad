"""What counts as hung: decided from times that are told, so that whoever was asleep itself accuses nobody."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.drivers.job_context import HeartbeatSettings
from tidegate.actors.ray.heartbeats import HeartbeatMonitor, Hung

SETTINGS = HeartbeatSettings(interval_ms=10_000, timeout_ms=50_000, call_timeout_ms=300_000)
TICK_MS = SETTINGS.tick_ms
HOUR_MS = 3_600_000
LAST_MS = SETTINGS.timeout_ms // 5
"""How long the answer to a last question may take."""


def ticks(monitor: HeartbeatMonitor, now_ms: int, count: int, answers: dict[str, int | None]) -> tuple[int, list[Hung]]:
    """So many ticks; those that are in `answers` answer at once, with the call that they are in. Looks take no time."""
    found: list[Hung] = []
    for _ in range(count):
        now_ms += TICK_MS
        asked, doubted, hung = monitor.tick(now_ms)
        found += hung
        for name in asked:
            if name in answers:
                monitor.answered(name, answers[name])
        for name in doubted:
            monitor.looked(name)
    return now_ms, found


def watching(*names: str, settings: HeartbeatSettings = SETTINGS) -> HeartbeatMonitor:
    """A monitor of these processes, at time 0."""
    monitor = HeartbeatMonitor(settings)
    monitor.tick(0)
    for name in names:
        monitor.watch(name)
    return monitor


def test_defaults_are_those_of_flink() -> None:
    """A question each 10 s, and 50 s without an answer; no limit for a call unless the job has one."""
    assert HeartbeatSettings() == HeartbeatSettings(10_000, 50_000, None)


def test_a_process_that_stops_answering_is_named_once_and_others_are_not() -> None:
    """50 s after it was heard last, and the time for a last question."""
    monitor = watching("stopped", "well")
    now_ms, found = ticks(monitor, 0, 100, {"stopped": None, "well": None})
    assert found == []
    _, found = ticks(monitor, now_ms, 200, {"well": None})
    (hung,) = found
    assert (hung.name, hung.kind) == ("stopped", "silent")
    assert SETTINGS.timeout_ms + LAST_MS <= hung.for_ms <= SETTINGS.timeout_ms + LAST_MS + 2 * TICK_MS
    assert monitor.watched == {"well"}


@given(
    pauses=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5 * HOUR_MS)), max_size=8),
    delay_ticks=st.integers(1, 15),
)
@settings(max_examples=60)
def test_whoever_was_asleep_accuses_nobody(pauses: Sequence[tuple[int, int]], delay_ticks: int) -> None:
    """The coordinator is stopped again and again for any time, and answers come some ticks after it has woken up."""
    monitor = watching("a", "b", "c")
    now_ms = 0
    waiting: dict[str, int] = {}
    for awake_ticks, pause_ms in (*pauses, (200, 0)):
        now_ms += pause_ms
        for _ in range(awake_ticks):
            now_ms += TICK_MS
            for name in [name for name, due in waiting.items() if due <= 0]:
                del waiting[name]
                monitor.answered(name, None)
            asked, doubted, hung = monitor.tick(now_ms)
            assert (doubted, hung) == ([], [])
            waiting = {name: due - 1 for name, due in waiting.items()} | dict.fromkeys(asked, delay_ticks)


@given(gaps=st.lists(st.integers(1, 3 * TICK_MS), min_size=200, max_size=200), silent_from=st.integers(0, 60))
@settings(max_examples=30)
def test_a_silent_process_is_found_however_uneven_the_ticks_are(gaps: list[int], silent_from: int) -> None:
    """It takes at least the timeout since it was heard, and no more than that and a last question in counted time."""
    monitor = watching("victim")
    now_ms = counted_ms = 0
    limit_ms = SETTINGS.timeout_ms + LAST_MS + 4 * TICK_MS
    heard_ms, heard_counted_ms = 0, 0
    for number, gap_ms in enumerate(gaps):
        now_ms += gap_ms
        counted_ms += min(gap_ms, 2 * TICK_MS)
        asked, doubted, hung = monitor.tick(now_ms)
        for name in doubted:
            monitor.looked(name)
        if asked and number < silent_from:
            monitor.answered("victim", None)
            heard_ms, heard_counted_ms = now_ms, counted_ms
        if hung:
            assert now_ms - heard_ms >= SETTINGS.timeout_ms
            return
        assert counted_ms - heard_counted_ms < limit_ms


def test_one_call_may_take_as_long_as_the_limit_says_and_no_longer() -> None:
    """The same call in each answer for 5 min; a process that is busy with one call after the other is well."""
    monitor = watching("stuck", "busy")
    now_ms, found = 0, []
    for number in range(2_000):
        now_ms, hung = ticks(monitor, now_ms, 1, {"stuck": 7, "busy": number})
        found += hung
        if hung:
            break
    ((name, kind, for_ms),) = [(h.name, h.kind, h.for_ms) for h in found]
    assert (name, kind) == ("stuck", "busy")
    assert 300_000 <= for_ms <= 300_000 + SETTINGS.interval_ms
    _, found = ticks(monitor, now_ms, 20, {"busy": None})
    assert found == []


def test_a_stop_of_everything_is_no_long_call() -> None:
    """The machine slept for an hour while a call was under way: no more than a moment has passed for anybody."""
    monitor = watching("one")
    now_ms, found = ticks(monitor, 0, 50, {"one": 3})
    now_ms, more = ticks(monitor, now_ms + HOUR_MS, 50, {"one": 3})
    assert found + more == []


def test_without_a_limit_a_call_may_take_for_ever() -> None:
    """Only who does not answer counts as hung."""
    monitor = watching("one", settings=HeartbeatSettings())
    _, found = ticks(monitor, 0, 10_000, {"one": 3})
    assert found == []


def test_there_is_one_question_at_a_time_and_a_lost_one_is_asked_again() -> None:
    """A process that does not answer gets no pile of questions; a call that failed says nothing about it."""
    monitor = watching("one")
    assert monitor.tick(TICK_MS).ask == ["one"]
    now_ms = TICK_MS
    for _ in range(20):
        now_ms += TICK_MS
        assert monitor.tick(now_ms).ask == []
    monitor.not_answered("one")
    assert monitor.tick(now_ms + TICK_MS).ask == ["one"]


def test_who_is_gone_is_not_missed() -> None:
    """A process that has ended is another matter; what it still answers is ignored."""
    monitor = watching("one")
    monitor.forget("one")
    monitor.forget("one")
    monitor.answered("one", 1)
    _, found = ticks(monitor, 0, 200, {})
    assert found == []
