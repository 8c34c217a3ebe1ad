"""Waiting goes by a clock that nobody sets: neither timers nor checkpoints stop when the wall clock is set back."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.coordinator.checkpoint_requests import Demand, Pause, Start, decide
from tidegate.actors.coordinator.job_spec import CheckpointSettings
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.runtimes.timers import Timers
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage import clock

HOUR_MS = 3_600_000


class Clock:
    """A wall clock that is set, and a monotonic one that goes on."""

    def __init__(self) -> None:
        self.wall_ms = 10 * HOUR_MS
        self.passed_ms = 0

    def time_ns(self) -> int:
        """The wall clock."""
        return (self.wall_ms + self.passed_ms) * 1_000_000

    def monotonic_ns(self) -> int:
        """The other one."""
        return self.passed_ms * 1_000_000


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that runtimes look at, to be set by hand."""
    hands = Clock()
    monkeypatch.setattr(clock, "time", hands)
    return hands


@pytest.mark.parametrize("jump_ms", [-HOUR_MS, 0, HOUR_MS])
def test_a_wait_is_as_long_as_it_was_when_it_began(hands: Clock, jump_ms: int) -> None:
    """However the wall clock is set meanwhile."""
    timers, ran = Timers(), list[str]()
    timers.after(1_500, lambda: ran.append("it"))
    assert timers.wait_ms == 1_500
    hands.wall_ms += jump_ms
    hands.passed_ms = 1_499
    assert not timers.due
    hands.passed_ms = 1_500
    assert timers.due
    timers.pop()()
    assert ran == ["it"]


def test_a_named_action_replaces_the_one_before_it(hands: Clock) -> None:
    """Also where that one was due already, and waits for its turn."""
    timers, ran = Timers(), list[str]()
    timers.after(10, lambda: ran.append("first"), "name")
    hands.passed_ms = 10
    taken = timers.pop()
    timers.after(10, lambda: ran.append("second"), "name")
    taken()
    hands.passed_ms = 20
    timers.pop()()
    assert (ran, timers.wait_ms, len(timers)) == (["second"], None, 0)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5), st.booleans()), max_size=30))
def test_timers_do_what_a_dictionary_of_names_does(steps: list[tuple[str, int, bool]]) -> None:
    """Whatever is set, set again and cancelled: the newest action of each name runs, in the order of their times."""
    timers, waiting, ran = Timers(), dict[str, tuple[int, int]](), list[str]()
    for number, (name, delay_ms, cancels) in enumerate(steps):
        if cancels:
            timers.cancel(name)
            waiting.pop(name, None)
        else:
            timers.after(delay_ms - 1_000_000, lambda name=name: ran.append(name), name)  # type: ignore[misc]
            waiting[name] = (0, number)
        assert len(timers) == len(waiting)
    while timers.due:
        timers.pop()()
    assert sorted(ran) == sorted(waiting)


def test_a_timer_that_was_cancelled_takes_no_memory(hands: Clock) -> None:
    """However far away it was."""
    timers = Timers()
    timers.after(HOUR_MS, lambda: None)
    for number in range(1_000):
        timers.after(HOUR_MS, lambda: None, str(number))
        timers.cancel(str(number))
        assert len(timers._heap) <= 3
    assert timers.wait_ms == HOUR_MS


def test_a_moment_at_the_end_of_time_is_waited_for_in_parts(hands: Clock) -> None:
    """No queue takes a wait of millions of years: one that is longer than it can be is not over at its end."""
    timers = Timers()
    timers.after(MAX_WATERMARK_MS, lambda: None)
    assert timers.wait_ms is not None
    assert timers.wait_ms / 1000 <= threading.TIMEOUT_MAX
    hands.passed_ms += timers.wait_ms
    assert not timers.due


def test_actions_run_in_the_order_of_their_deadlines(hands: Clock) -> None:
    """Of two with the same one, the first that was asked for goes first; what is long ago is due at once."""
    timers, ran = Timers(), list[str]()
    assert timers.wait_ms is None
    timers.after(20, lambda: ran.append("b"))
    timers.after(-HOUR_MS, lambda: ran.append("a"))
    timers.after(20, lambda: ran.append("c"))
    hands.passed_ms = 20
    while timers.due:
        timers.pop()()
    assert ran == ["a", "b", "c"]


def test_messages_and_timers_of_a_mailbox_go_before_each_turn(hands: Clock) -> None:
    """A timer that becomes due while there is much to do waits for one turn, not for as many as there are."""
    did: list[str] = []

    def turn() -> bool:
        did.append("turn")
        hands.passed_ms += 100
        if len(did) == 5:
            mailbox.post(lambda: did.append("message"))
        return True

    mailbox = Mailbox("mailbox", turn, lambda: None, 60_000, lambda error: None)
    mailbox._thread = threading.current_thread()
    mailbox.call_later(150, lambda: did.append("timer"))
    for _ in range(3):
        mailbox._round()
    assert did[:7] == ["turn", "turn", "timer", "turn", "turn", "message", "turn"]


def test_a_pause_ends_when_the_clock_is_set_back_before_it() -> None:
    """Else it would begin anew each time that it is over: the last completion stays in the future."""
    demand = Demand((), True, False, 0, 0, False, last_completed_at_ms=10 * HOUR_MS)
    settings = CheckpointSettings(interval_ms=1_000, min_pause_ms=500)
    assert decide(demand, settings, 10 * HOUR_MS + 100) == Pause(10 * HOUR_MS + 500)
    assert isinstance(decide(demand, settings, 9 * HOUR_MS), Start)
