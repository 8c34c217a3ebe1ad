"""Windows by time: small ones before slow receivers, full ones before fast ones, and never on the way down for ever."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from fixed_cost import FixedCost
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.actors.task.turn_pacer import (
    BATCHES_A_WINDOW,
    CHANGE_MIN,
    ROWS_UNLIMITED,
    Debloater,
    SenderPace,
    TurnPacer,
)

TARGET_MS = 200
FIRST, LEAST, MOST = 65_536, 4_096, 8 * 1024 * 1024
ROW_BYTES = 24
WHOLE_BATCH = 262_144
SHARE = 0.75
"""Part of the throughput with the full window that is kept, whatever a batch costs."""


@dataclass
class Loop:
    """A sender that always has rows, and a receiver, with so many ms between the two, each way.

    The sender makes batches of half the window; the receiver cuts them as a task does, and grants credit as a channel
    does. Without a debloater the window is the largest one, and batches are as large as a source makes them.
    """

    latency_ms: float
    seed: int
    debloater: Debloater | None = field(
        default_factory=lambda: Debloater(TARGET_MS, FIRST, LEAST, MOST),
    )

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.pacer = TurnPacer(learns=True)
        self.now_ms = self.over_ms = 0.0
        self.credit_bytes, self.sent_rows, self.taken_rows = self.window_bytes, 0, 0
        self.told_bytes = self.window_bytes
        """The window that the sender knows."""
        self.arriving: deque[tuple[float, int]] = deque()
        self.answers: deque[tuple[float, int, int]] = deque()
        self.waiting = False
        self.last = 0, 0.0

    @property
    def window_bytes(self) -> int:
        """What the receiver wants to be in flight."""
        return MOST if self.debloater is None else self.debloater.window_bytes

    def send(self) -> None:
        """What credit allows, with what has come back until now."""
        while self.answers and self.answers[0][0] <= self.now_ms:
            _, total_bytes, self.told_bytes = self.answers.popleft()
            self.credit_bytes = max(self.credit_bytes, total_bytes)
        while self.sent_rows * ROW_BYTES < self.credit_bytes:
            rows = WHOLE_BATCH
            if self.told_bytes < MOST:
                rows = max(1, min(rows, self.told_bytes // BATCHES_A_WINDOW // ROW_BYTES))
            self.arriving.append((self.now_ms + self.latency_ms, rows))
            self.sent_rows += rows

    def turn(self, receiver: FixedCost) -> None:
        """The receiver takes a batch, or as much of it as it may, when there is one."""
        self.send()
        while not self.arriving:
            self.now_ms = self.answers[0][0]
            self.send()
        at_ms, left = self.arriving.popleft()
        self.now_ms = max(self.now_ms, at_ms)
        rows, ms = self.last
        self.pacer.took(rows, int(ms))
        if self.debloater is not None:
            waited_ms = self.now_ms - self.over_ms if self.waiting else 0
            self.debloater.took(rows * ROW_BYTES, rows, int(ms + waited_ms))
            if self.debloater.resize(1, self.pacer.fixed_ms):
                self.answer()
        rows = min(left, self.pacer.rows_max)
        if rows < left:
            self.arriving.appendleft((at_ms, left - rows))
        ms = receiver.ms(rows, self.chance)
        self.now_ms += ms
        self.over_ms, self.last = self.now_ms, (rows, ms)
        self.taken_rows += rows
        self.answer()
        self.send()
        self.waiting = bool(self.arriving) and self.arriving[0][0] <= self.now_ms

    def answer(self) -> None:
        """Grant what was taken and a window."""
        total_bytes = self.taken_rows * ROW_BYTES + self.window_bytes
        self.answers.append((self.now_ms + self.latency_ms, total_bytes, self.window_bytes))

    def rows_a_ms(self, receiver: FixedCost, turns_min: int = 100, ms_min: float = 5_000) -> float:
        """Throughput of so many turns, and at least so long."""
        begin_ms, begin_rows, turns = self.now_ms, self.taken_rows, 0
        while turns < turns_min or (self.now_ms - begin_ms < ms_min and turns < 20 * turns_min):
            self.turn(receiver)
            turns += 1
        return (self.taken_rows - begin_rows) / max(1e-6, self.now_ms - begin_ms)


def full_rows_a_ms(receiver: FixedCost, latency_ms: float) -> float:
    """Throughput with the largest window, once turns have found their size."""
    loop = Loop(latency_ms, 5, debloater=None)
    loop.rows_a_ms(receiver)
    return loop.rows_a_ms(receiver)


receivers = st.builds(
    FixedCost,
    st.one_of(st.just(0.0), st.floats(0.1, 300)),
    st.one_of(st.floats(1e-5, 1.0), st.floats(-5, 0).map(lambda power: 10.0**power)),
    st.floats(0, 0.25),
)


@settings(max_examples=20, deadline=None)
@given(receivers, receivers, st.sampled_from([0.0, 1.0, 5.0]), st.integers(0, 2**32))
@example(FixedCost(100.0, 1e-5), FixedCost(0.0, 0.01), 1.0, 1)
@example(FixedCost(0.0, 0.01), FixedCost(100.0, 1e-5), 1.0, 2)
@example(FixedCost(40.0, 1e-4), FixedCost(8.0, 0.01, 0.2), 5.0, 3)
@example(FixedCost(0.0, 1.0), FixedCost(0.0, 1e-5), 5.0, 4)
@example(FixedCost(0.0, 1.7e-5, 0.13), FixedCost(243.0, 0.54, 0.14), 1.0, 2)
def test_throughput_is_that_of_the_full_window_also_after_a_change(
    before: FixedCost, after: FixedCost, latency_ms: float, seed: int
) -> None:
    """Within a share, whatever a batch and a row cost, with noise, latency, and a change of both on the way."""
    loop = Loop(latency_ms, seed)
    loop.rows_a_ms(before)
    assert loop.rows_a_ms(before) >= SHARE * full_rows_a_ms(before, latency_ms)
    loop.rows_a_ms(after)
    assert loop.rows_a_ms(after) >= SHARE * full_rows_a_ms(after, latency_ms)


@pytest.mark.parametrize("slope_ms", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_a_slow_receiver_has_no_more_in_flight_than_it_does_in_its_time(slope_ms: float, noise: float) -> None:
    """Half of the target is the receiver's window, the other half the sender's queue."""
    loop, receiver = Loop(1.0, 3), FixedCost(0.5, slope_ms, noise)
    loop.rows_a_ms(receiver)
    for _ in range(200):
        loop.turn(receiver)
        assert loop.window_bytes / ROW_BYTES * slope_ms <= (1 + 2 * CHANGE_MIN) * TARGET_MS / 2
        in_flight = loop.sent_rows - loop.taken_rows
        assert in_flight * slope_ms <= (1 + 2 * CHANGE_MIN) * TARGET_MS / 2 * (1 + 1 / BATCHES_A_WINDOW)


def test_a_fast_receiver_has_the_full_window() -> None:
    """Ten million rows a second: nothing is held back, nor is a batch cut."""
    loop = Loop(1.0, 3)
    loop.rows_a_ms(FixedCost(0.3, 1e-4))
    assert loop.window_bytes == MOST
    assert loop.rows_a_ms(FixedCost(0.3, 1e-4)) >= 0.98 * full_rows_a_ms(FixedCost(0.3, 1e-4), 1.0)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**8), st.integers(0, 10**6), st.integers(0, 60_000), st.floats(0, 10_000)),
        max_size=200,
    ),
    st.integers(1, 64),
    receivers,
)
def test_whatever_durations_come_windows_stay_in_bounds_and_find_back(
    turns: list[tuple[int, int, int, float]], channels: int, receiver: FixedCost
) -> None:
    """A window keeps its bounds, and is at most twice, at least half the one before; nothing spoils what comes."""
    loop = Loop(1.0, 9)
    assert loop.debloater is not None
    for size_bytes, rows, ms, fixed_ms in turns:
        before_bytes = loop.window_bytes
        loop.debloater.took(size_bytes, rows, ms)
        changed = loop.debloater.resize(channels, fixed_ms)
        assert changed == (loop.window_bytes != before_bytes)
        assert max(LEAST, before_bytes // 2) <= loop.window_bytes <= min(MOST, 2 * before_bytes)
    loop.rows_a_ms(receiver)
    assert loop.rows_a_ms(receiver) >= SHARE * full_rows_a_ms(receiver, 1.0)


def test_one_pause_of_the_process_is_forgotten_soon() -> None:
    """However long it was: some turns later the window is what it had been."""
    loop, receiver = Loop(1.0, 3), FixedCost(0.0, 0.01)
    loop.rows_a_ms(receiver)
    before_bytes = loop.window_bytes
    loop.turn(FixedCost(60_000.0, 0.01))
    loop.rows_a_ms(receiver)
    assert loop.window_bytes == pytest.approx(before_bytes, rel=2 * CHANGE_MIN)


def test_what_costs_the_same_whatever_comes_gets_ever_larger_batches() -> None:
    """A model that needs 40 ms a call: small batches would only be dearer, and each would make the next one smaller."""
    loop = Loop(1.0, 3)
    loop.rows_a_ms(FixedCost(40.0, 0.0))
    assert loop.window_bytes == MOST


def test_channels_share_the_time() -> None:
    """Two senders have half as much in flight each; the fixed cost of a batch counts for each alone."""
    windows = []
    for channels in (1, 2, 8):
        debloater = Debloater(TARGET_MS, FIRST, LEAST, MOST)
        for _ in range(100):
            debloater.took(20_000, 1_000, 10)
            debloater.resize(channels, 1.0)
        windows.append(debloater.window_bytes)
    assert windows == pytest.approx([200_000, 100_000, 25_000], rel=CHANGE_MIN / (1 - CHANGE_MIN))


def test_what_a_user_says_about_rows_holds() -> None:
    """`batch_rows=(least, most)`: a batch has room for the least rows, however long they take."""
    debloater = Debloater(TARGET_MS, FIRST, LEAST, MOST)
    for _ in range(1_000):
        debloater.took(1_000, 10, 100)
        debloater.resize(1, 0.0, rows_min=5_000)
    assert debloater.window_bytes == BATCHES_A_WINDOW * 5_000 * 100


def test_what_is_not_measured_changes_nothing() -> None:
    """Turns without rows, and none at all."""
    debloater = Debloater(TARGET_MS, FIRST, LEAST, MOST)
    assert not debloater.resize(1, 0.0)
    debloater.took(0, 0, 10_000)
    assert not debloater.resize(1, 0.0)
    assert debloater.window_bytes == FIRST


def test_a_sender_makes_batches_of_half_a_window() -> None:
    """It learns from each turn how many rows that is, and is free again when no receiver has a small window."""
    pace = SenderPace()
    pace.took(1_000, 0.0)
    assert pace.rows_max == ROWS_UNLIMITED
    pace.took(1_000, 2.0)
    assert pace.rows_max == 250
    pace.took(250, 0.25)
    assert pace.rows_max == 500
    pace.took(0, 0.0)
    assert pace.rows_max == 500, "a turn of timers says nothing about rows"
    pace.took(500, 10_000.0)
    assert pace.rows_max == 1
    for _ in range(30):
        pace.took(1, 0.0)
    assert pace.rows_max == ROWS_UNLIMITED
