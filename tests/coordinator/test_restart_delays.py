"""Restarts as the coordinator decides them: what is counted, from the log alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import SINK, Coordinator, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.recovery.restart_strategy import ExponentialDelay, FailureHistory, RestartStrategy
from tidegate.storage.errors import InvariantError

DOUBLING = RestartStrategy.exponential_delay("1s", "10s", 2.0, 0.0, "1h")
JITTERED = RestartStrategy.exponential_delay("1s", "10s", 2.0, 0.5, "1h")
HOUR_MS = 3_600_000


def wait_after_failure(coordinator: Coordinator, at_ms: int) -> int:
    """Let the attempt fail, and the next one run; returns the wait in between."""
    coordinator.at_ms = at_ms
    (timer,) = only(coordinator.fail(), do.SetTimer)
    coordinator.fire(timer.timer, timer.due_at_ms)
    coordinator.all_ready()
    return timer.due_at_ms - at_ms


def test_waits_grow_and_checkpoints_do_not_reset_them() -> None:
    """A job that fails again and again right after a checkpoint does not spin."""
    coordinator = Coordinator(spec(DOUBLING)).run()
    found = []
    for number in range(5):
        coordinator.complete()
        found.append(wait_after_failure(coordinator, 60_000 * (number + 1)))
    assert found == [1_000, 2_000, 4_000, 8_000, 10_000]


@pytest.mark.parametrize(
    ("errors", "ends_after"), [("aaaa", 4), ("aabaaaaaa", 7), ("a a a a a a", None), ("ababababab", None)]
)
def test_an_error_that_comes_back_identically_ends_the_job(errors: str, ends_after: int | None) -> None:
    """Four times the same error at the same row; another error, or one that may pass, begins the count anew."""
    coordinator = Coordinator(spec(RestartStrategy.exponential_delay(jitter=0.0))).run()
    for number, letter in enumerate(errors, 1):
        failed = ev.TaskFailed(coordinator.at_ms, coordinator.state.attempt, SINK, "no", False, letter.strip())
        instructions = coordinator.tell(failed)
        if number == ends_after:
            assert "came back 4 times at the same row" in (coordinator.state.ending_reason or "")
            return
        (timer,) = only(instructions, do.SetTimer)
        coordinator.fire(timer.timer, timer.due_at_ms)
        coordinator.all_ready()
    assert ends_after is None


def test_the_time_that_all_tasks_have_run_resets_the_waits() -> None:
    """It begins when the last task is ready, and not with the restart."""
    coordinator = Coordinator(spec(DOUBLING)).run()
    assert [wait_after_failure(coordinator, at_ms) for at_ms in (1_000, 5_000)] == [1_000, 2_000]
    running_since_ms = coordinator.at_ms
    assert wait_after_failure(coordinator, running_since_ms + HOUR_MS - 1) == 4_000
    assert wait_after_failure(coordinator, coordinator.at_ms + HOUR_MS) == 1_000


def test_an_attempt_that_never_runs_resets_nothing() -> None:
    """However long it was being deployed."""
    coordinator = Coordinator(spec(DOUBLING)).run()
    wait_after_failure(coordinator, 1_000)
    coordinator.fail()
    coordinator.fire("restart:2")
    coordinator.at_ms += 2 * HOUR_MS
    (timer,) = only(coordinator.fail(), do.SetTimer)
    assert timer.due_at_ms - coordinator.at_ms == 4_000


def test_a_lost_coordinator_is_no_failure() -> None:
    """It is not counted, and the time before it is no time that the new attempt has run."""
    coordinator = Coordinator(spec(DOUBLING)).run()
    wait_after_failure(coordinator, 1_000)
    coordinator.at_ms += 2 * HOUR_MS
    coordinator.start(generation=2)
    coordinator.all_ready()
    assert wait_after_failure(coordinator, coordinator.at_ms + 1) == 2_000


def test_jitter_is_the_same_in_each_replay_and_another_for_each_failure() -> None:
    """It comes from the seed and the attempt, which the log has; jobs with other seeds come back at other times."""

    def waits(seed: int) -> list[int]:
        coordinator = Coordinator(replace(spec(JITTERED), seed=seed)).run()
        return [wait_after_failure(coordinator, 60_000 * number) for number in range(1, 12)]

    assert waits(7) == waits(7)
    assert len({tuple(waits(seed)) for seed in range(20)}) == 20
    at_the_maximum = waits(7)[5:]
    assert len(set(at_the_maximum)) > 1
    assert all(5_000 <= wait <= 10_000 for wait in at_the_maximum)


def test_a_rate_ends_the_job_with_the_failure_that_is_too_much() -> None:
    """Two in ten seconds are put up with, wherever checkpoints fall; a third one is not."""
    coordinator = Coordinator(spec(RestartStrategy.failure_rate(2, "10s", "100ms"))).run()
    for at_ms in (1_000, 9_000, 12_000, 20_000):
        assert wait_after_failure(coordinator, at_ms) == 100
        coordinator.complete()
    coordinator.at_ms = 21_000
    assert only(coordinator.fail("again"), do.EndJob) == [do.EndJob("failed", "sink[0]: again")]


def test_the_default_still_gives_up_at_once_on_what_can_never_pass() -> None:
    """A program that is wrong in itself is not tried for ever."""
    coordinator = Coordinator(spec(RestartStrategy.exponential_delay())).run()
    failed = ev.TaskFailed(0, coordinator.state.attempt, SINK, "ConfigurationError: no", permanent=True)
    assert only(coordinator.tell(failed), do.EndJob) == [do.EndJob("failed", "sink[0]: ConfigurationError: no")]


def test_a_wait_that_no_strategy_may_give_is_a_fault() -> None:
    """The machine does not put off a restart for longer than the strategy's longest wait."""
    coordinator = Coordinator(spec(_Endless(1_000, 2_000, 2.0, 0.0, 1_000))).run()
    with pytest.raises(InvariantError, match="limited time"):
        coordinator.fail()


class _Endless(ExponentialDelay):
    def decide(self, failures: FailureHistory, chance: float) -> int | None:
        return self.maximum_ms + 1
