"""Restart strategies decide from the failures and a number alone, and travel with the job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.recovery import RestartStrategy
from tidegate.recovery.restart_strategy import (
    ExponentialDelay,
    FailureHistory,
    FailureRate,
    FixedDelay,
    default_strategy,
)
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError

NEVER_RAN = None
DAY_MS = 86_400_000

exponential = st.builds(
    lambda initial, factor, multiplier, jitter, reset: ExponentialDelay(
        initial, initial * factor, multiplier, jitter, reset
    ),
    st.integers(1, 5_000),
    st.integers(1, 500),
    st.floats(1.0001, 50.0),
    st.floats(0.0, 1.0),
    st.integers(1, DAY_MS),
)
chances = st.floats(0.0, 1.0, exclude_max=True)


def after(strategy: RestartStrategy, failures: int, ran_ms: int | None = NEVER_RAN) -> FailureHistory:
    """So many failures, one a second."""
    history = FailureHistory()
    for number in range(failures):
        history = strategy.count(history, 1_000 * number, ran_ms)
    return history


def waits(strategy: RestartStrategy, times_ms: Sequence[int], ran_ms: int | None = NEVER_RAN) -> list[int | None]:
    """What is decided at each of these failures."""
    history, found = FailureHistory(), []
    for time_ms in times_ms:
        history = strategy.count(history, time_ms, ran_ms)
        found.append(strategy.decide(history, 0.5))
    return found


def test_none_gives_up_at_once() -> None:
    """The first failure is the last."""
    strategy = RestartStrategy.none()
    assert strategy.decide(after(strategy, 1), 0.5) is None


class TestFixedDelay:
    """So many restarts in a row, each after the same wait."""

    @given(attempts=st.integers(0, 6), failures=st.integers(1, 12), delay_ms=st.integers(0, 10_000))
    @settings(max_examples=30)
    def test_restarts_so_many_times(self, attempts: int, failures: int, delay_ms: int) -> None:
        """Each of the first `attempts` failures is followed by a restart after the delay, and no other."""
        strategy = RestartStrategy.fixed_delay(attempts, delay_ms)
        assert strategy.decide(after(strategy, failures), 0.5) == (delay_ms if failures <= attempts else None)

    def test_a_completed_checkpoint_begins_a_new_row(self) -> None:
        """The job gets on: what has failed before counts no more."""
        strategy = RestartStrategy.fixed_delay(1, "1s")
        history = strategy.after_checkpoint(after(strategy, 1))
        assert strategy.decide(strategy.count(history, 0, None), 0.5) == 1_000


class TestExponentialDelay:
    """Waits that grow up to a bound, until the job has run for a while."""

    def test_waits_grow_by_the_multiplier_up_to_the_maximum(self) -> None:
        """Without jitter the waits are initial * multiplier ** n, and then the maximum."""
        strategy = RestartStrategy.exponential_delay("1s", "10s", 2.0, 0.0, "1h")
        assert waits(strategy, range(7)) == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000, 10_000]

    @given(strategy=exponential, in_a_row=st.integers(1, 10**9), chance=chances)
    def test_no_wait_is_above_the_maximum(self, strategy: ExponentialDelay, in_a_row: int, chance: float) -> None:
        """However often the job has failed: a power that no float can hold is no error either."""
        wait_ms = strategy.decide(FailureHistory(in_a_row), chance)
        assert wait_ms is not None
        assert 0 <= wait_ms <= strategy.maximum_ms == strategy.wait_ms_max

    @given(strategy=exponential, in_a_row=st.integers(1, 10_000), chance=chances)
    def test_jitter_stays_within_its_factor(self, strategy: ExponentialDelay, in_a_row: int, chance: float) -> None:
        """A wait lies no further from the back-off than the factor says, in whole ms."""
        backoff_ms = strategy.backoff_ms(in_a_row)
        wait_ms = strategy.decide(FailureHistory(in_a_row), chance)
        assert wait_ms is not None
        assert abs(wait_ms - backoff_ms) <= backoff_ms * strategy.jitter

    def test_jitter_reaches_both_ends(self) -> None:
        """Chance goes both ways: shorter and longer, as far as the factor reaches."""
        strategy = RestartStrategy.exponential_delay("1s", "1min", 2.0, 0.25, "1h")
        ends = [strategy.decide(FailureHistory(1), chance) for chance in (0.0, 0.5, 1 - 2**-53)]
        assert ends == [750, 1_000, 1_250]

    @given(strategy=exponential, failures=st.integers(1, 200), ran_ms=st.integers(0, 2 * DAY_MS))
    def test_resets_after_the_threshold(self, strategy: ExponentialDelay, failures: int, ran_ms: int) -> None:
        """A job that ran for as long begins anew with the first wait; one that ran a ms less does not."""
        history = strategy.count(after(strategy, failures), 0, ran_ms)
        assert history.in_a_row == (1 if ran_ms >= strategy.reset_after_ms else failures + 1)

    def test_an_attempt_that_never_ran_resets_nothing(self) -> None:
        """Deploying for hours is no success."""
        strategy = RestartStrategy.exponential_delay("1s", "10s", 2.0, 0.0, "1s")
        assert waits(strategy, [0, DAY_MS, 2 * DAY_MS]) == [1_000, 2_000, 4_000]

    def test_checkpoints_change_nothing(self) -> None:
        """A job that fails right after each checkpoint does not spin: its waits grow all the same."""
        strategy = RestartStrategy.exponential_delay()
        history = after(strategy, 5)
        assert strategy.after_checkpoint(history) == history

    @given(strategy=exponential, chance=chances)
    @settings(max_examples=50)
    def test_it_cannot_spiral(self, strategy: ExponentialDelay, chance: float) -> None:
        """A job that fails at once each time restarts less and less often: its restarts follow a bound, not a loop."""
        now_ms, restarts, history = 0, 0, FailureHistory()
        while now_ms < 100 * strategy.maximum_ms and restarts <= 2_000:
            history = strategy.count(history, now_ms, 0)
            wait_ms = strategy.decide(history, chance)
            assert wait_ms is not None
            assert wait_ms <= strategy.maximum_ms
            now_ms += max(1, wait_ms)
            restarts += 1
        growing = math.log(strategy.maximum_ms / strategy.initial_ms) / math.log(strategy.multiplier) + 2
        least_ms = max(1, strategy.maximum_ms - int(strategy.maximum_ms * strategy.jitter))
        assert restarts <= growing + 101 * strategy.maximum_ms / least_ms or restarts > 2_000 > growing

    def test_a_limit_of_attempts_is_kept_until_the_reset(self) -> None:
        """Two restarts in a row, and no third; after the threshold there are two again."""
        strategy = RestartStrategy.exponential_delay("1s", "10s", 2.0, 0.0, "1h", attempts=2)
        assert waits(strategy, range(3)) == [1_000, 2_000, None]
        assert waits(strategy, range(3), ran_ms=3_600_000) == [1_000, 1_000, 1_000]

    def test_its_memory_does_not_grow(self) -> None:
        """A job that has failed a thousand times stores as much as one that has failed once."""
        strategy = RestartStrategy.exponential_delay()
        assert len(encode(after(strategy, 1_000))) <= len(encode(after(strategy, 1))) + 8


class TestFailureRate:
    """So many failures in any interval."""

    @given(
        failures=st.integers(1, 5),
        interval_ms=st.integers(1, 100),
        gaps=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    )
    def test_counts_a_sliding_window(self, failures: int, interval_ms: int, gaps: list[int]) -> None:
        """It gives up at the first failure with which an interval holds too many, and at no other."""
        strategy = FailureRate(failures, interval_ms, 7)
        times_ms, history = [], FailureHistory()
        for gap_ms in gaps:
            times_ms.append((times_ms[-1] if times_ms else 0) + gap_ms)
            history = strategy.count(history, times_ms[-1], 0)
            window = [t for t in times_ms if times_ms[-1] - t <= interval_ms]
            assert strategy.decide(history, 0.5) == (7 if len(window) <= failures else None)
            assert len(history.times_ms) <= failures + 1

    def test_a_clock_that_is_set_back_forgets_nothing_and_invents_nothing(self) -> None:
        """The failures before it stay as far apart as they were, and age from now on."""
        strategy = FailureRate(2, 1_000, 0)
        assert waits(strategy, [DAY_MS, DAY_MS + 600, 0]) == [0, 0, None]
        assert waits(strategy, [DAY_MS, DAY_MS + 600, 0, 1_001, 2_002])[3:] == [0, 0]

    def test_checkpoints_change_nothing(self) -> None:
        """The rate is one of failures in time, whatever else happens."""
        strategy = RestartStrategy.failure_rate()
        history = after(strategy, 1)
        assert strategy.after_checkpoint(history) == history


def test_defaults_are_those_of_flink() -> None:
    """With periodic checkpoints back-off without a limit of attempts, without them none."""
    assert default_strategy(periodic_checkpoints=False) == RestartStrategy.none()
    default = default_strategy(periodic_checkpoints=True)
    assert default == ExponentialDelay(1_000, 60_000, 1.5, 0.1, 3_600_000, None)
    assert default == RestartStrategy.exponential_delay()
    assert RestartStrategy.failure_rate() == FailureRate(1, 60_000, 1_000)
    assert default.decide(FailureHistory(10**7), 0.5) == 60_000


@pytest.mark.parametrize("delay", ["1500ms", "1.5s", 1500, timedelta(seconds=1.5)])
def test_a_delay_may_be_written_in_any_way(delay: str | int | timedelta) -> None:
    """Text, number and timedelta mean the same strategy."""
    assert RestartStrategy.fixed_delay(1, delay) == FixedDelay(1, 1500)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("fixed_delay", {"attempts": -1, "delay": "1s"}, "attempts.*-1"),
        ("fixed_delay", {"attempts": True, "delay": "1s"}, "attempts.*True"),
        ("fixed_delay", {"attempts": 1, "delay": "soon"}, "delay.*'soon'"),
        ("exponential_delay", {"initial": 0}, "initial.* 1 ms or more"),
        ("exponential_delay", {"initial": "2min"}, "initial='2min', maximum='1min'"),
        ("exponential_delay", {"maximum": "800d"}, "maximum.*at most a year"),
        ("exponential_delay", {"multiplier": 1.0}, "multiplier=1.0.*above 1"),
        ("exponential_delay", {"multiplier": math.inf}, "multiplier=inf"),
        ("exponential_delay", {"multiplier": math.nan}, "multiplier.*nan"),
        ("exponential_delay", {"multiplier": "2"}, "multiplier.*'2'"),
        ("exponential_delay", {"jitter": 1.1}, "jitter=1.1.*from 0 to 1"),
        ("exponential_delay", {"jitter": -0.1}, "jitter=-0.1"),
        ("exponential_delay", {"reset_after": 0}, "reset_after.* 1 ms or more"),
        ("exponential_delay", {"attempts": -1}, "attempts.*-1"),
        ("failure_rate", {"failures": 0}, "failures.*0"),
        ("failure_rate", {"failures": 10_001}, "failures=10001.*10000"),
        ("failure_rate", {"interval": 0}, "interval.* 1 ms or more"),
        ("failure_rate", {"delay": -1}, "delay.*negative"),
    ],
)
def test_refuses_what_makes_no_sense(name: str, arguments: dict[str, object], named: str) -> None:
    """A wrong argument is named, with what may be written instead."""
    with pytest.raises(ConfigurationError, match=f"{name}.*{named}"):
        getattr(RestartStrategy, name)(**arguments)


ALL = [
    RestartStrategy.none(),
    RestartStrategy.fixed_delay(3, "1s"),
    RestartStrategy.exponential_delay(attempts=4),
    RestartStrategy.failure_rate(3, "5min", "10s"),
]


@pytest.mark.parametrize("strategy", ALL, ids=lambda strategy: type(strategy).__name__)
def test_survives_the_event_log(strategy: RestartStrategy) -> None:
    """A coordinator that comes back decides by the same strategy, and remembers the same failures."""
    assert decode(encode(strategy)) == strategy
    assert decode(encode(after(strategy, 5))) == after(strategy, 5)
