"""Restart strategies decide from the failures alone, and travel with the job."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.recovery import RestartStrategy
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ConfigurationError


def test_none_gives_up_at_once() -> None:
    """The first failure is the last."""
    assert RestartStrategy.none().decide((5,), 5) is None


@given(attempts=st.integers(0, 6), failures=st.integers(1, 12), delay_ms=st.integers(0, 10_000))
@settings(max_examples=30)
def test_fixed_delay_restarts_so_many_times(attempts: int, failures: int, delay_ms: int) -> None:
    """Each of the first `attempts` failures is followed by a restart after the delay, and no other."""
    strategy = RestartStrategy.fixed_delay(attempts, delay_ms)

    times_ms = tuple(range(failures))
    assert strategy.decide(times_ms, failures) == (delay_ms if failures <= attempts else None)


@pytest.mark.parametrize("delay", ["1500ms", "1.5s", 1500, timedelta(seconds=1.5)])
def test_a_delay_may_be_written_in_any_way(delay: str | int | timedelta) -> None:
    """Text, number and timedelta mean the same strategy."""
    assert RestartStrategy.fixed_delay(1, delay) == RestartStrategy.fixed_delay(1, 1500)


@pytest.mark.parametrize(("attempts", "delay", "named"), [(-1, "1s", "attempts=-1"), (1, "soon", "delay")])
def test_refuses_what_makes_no_sense(attempts: int, delay: str, named: str) -> None:
    """A wrong argument is named."""
    with pytest.raises(ConfigurationError, match=named):
        RestartStrategy.fixed_delay(attempts, delay)


@pytest.mark.parametrize("strategy", [RestartStrategy.none(), RestartStrategy.fixed_delay(3, "1s")])
def test_survives_the_event_log(strategy: RestartStrategy) -> None:
    """A coordinator that comes back decides by the same strategy."""
    assert decode(encode(strategy)) == strategy
