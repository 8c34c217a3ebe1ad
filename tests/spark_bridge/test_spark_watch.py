"""When something that waits for Spark is over: decided from looks at Spark, without Spark and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from fake_spark import FakeContext, fake_context

from tidegate.spark_bridge.errors import SparkLostError
from tidegate.spark_bridge.spark_calls import (
    DRIVER_TIMEOUT,
    EXECUTOR_TIMEOUT,
    STEP_S_MAX,
    SparkLimits,
    SparkLook,
    SparkRules,
    driver_gone,
    limits_of,
    look_at,
    watched,
)
from tidegate.storage.errors import ConfigurationError

LIMITS = SparkLimits(driver_s=3, executors_s=10)


@pytest.fixture
def context() -> Iterator[FakeContext]:
    """A session whose driver lives."""
    with fake_context() as context:
        yield context


def verdicts(looks: list[SparkLook | None], limits: SparkLimits = LIMITS, step_s: float = 1.0) -> list[str | None]:
    """What the rules say after each look; looks come a step apart."""
    rules = SparkRules(limits, 0.0)
    return [rules.over((number + 1) * step_s, look) for number, look in enumerate(looks)]


def test_executors_may_take_their_time() -> None:
    """With one of them an action goes on for ever."""
    assert verdicts([SparkLook(1)] * 1_000) == [None] * 1_000


def test_without_executors_it_is_over_after_a_time() -> None:
    """Not before; and the reason says how long it was, and which setting that is."""
    *before, last = verdicts([SparkLook(0)] * 11)
    assert before == [None] * 10
    assert last is not None
    assert f"no executor for 10 s ({EXECUTOR_TIMEOUT})" in last


def test_an_executor_that_registers_begins_the_time_anew() -> None:
    """It was replaced, and may die again."""
    gone = [SparkLook(0)] * 10
    assert verdicts([*gone, SparkLook(1), *gone]) == [None] * 21
    assert verdicts([*gone, SparkLook(1), *gone, SparkLook(0)])[-1] is not None


def test_time_between_two_answers_counts() -> None:
    """An answer may come with every second look only."""
    seen = verdicts([None, SparkLook(0)] * 6)
    assert seen[:-1] == [None] * 11
    assert seen[-1] is not None


def test_spark_without_executors_of_its_own_needs_none() -> None:
    """Its driver does the work."""
    assert verdicts([SparkLook(None)] * 100) == [None] * 100


def test_who_needs_no_executors_waits_without() -> None:
    """A query that has no rows to write."""
    assert verdicts([SparkLook(0)] * 100, SparkLimits(3, None)) == [None] * 100


def test_a_silent_driver_is_lost_after_a_time() -> None:
    """An answer begins the time anew."""
    assert verdicts([None] * 3 + [SparkLook(1)] + [None] * 3) == [None] * 7
    assert f"not answered for 3 s ({DRIVER_TIMEOUT})" in str(verdicts([None] * 4)[-1])


def test_a_process_that_slept_hears_the_answer_first() -> None:
    """An hour between two looks is not an hour of silence, nor one without executors."""
    limits = SparkLimits(STEP_S_MAX, STEP_S_MAX)
    assert verdicts([None, SparkLook(1)], limits, step_s=3_600) == [None] * 2
    assert verdicts([SparkLook(0), SparkLook(1)], limits, step_s=3_600) == [None] * 2


def test_a_stopped_session_is_over_at_once() -> None:
    """Whoever stopped it."""
    assert "session was stopped" in str(verdicts([SparkLook(0, stopped=True)])[0])


def test_a_look_reports_the_state_of_the_session(context: FakeContext) -> None:
    """What a session says comes to the rules as it is."""
    context.executors = 3
    assert look_at(context) == SparkLook(3)  # type: ignore[arg-type]
    context.local = True
    assert look_at(context) == SparkLook(None)  # type: ignore[arg-type]
    context.stopped = True
    assert look_at(context) == SparkLook(0, stopped=True)  # type: ignore[arg-type]


def test_limits_come_from_the_configuration(context: FakeContext) -> None:
    """Of Spark. What is no time is refused, with its name."""
    assert limits_of(context, True) == SparkLimits(60.0, 120.0)  # type: ignore[arg-type]
    context.settings = {DRIVER_TIMEOUT: "5s", EXECUTOR_TIMEOUT: "7s"}
    assert limits_of(context, True) == SparkLimits(5.0, 7.0)  # type: ignore[arg-type]
    assert limits_of(context, False) == SparkLimits(5.0, None)  # type: ignore[arg-type]
    context.settings = {EXECUTOR_TIMEOUT: "soon"}
    with pytest.raises(ConfigurationError, match=EXECUTOR_TIMEOUT):
        limits_of(context, True)  # type: ignore[arg-type]


def test_a_driver_that_has_ended_is_named(context: FakeContext) -> None:
    """With its process, and how it ended."""
    assert driver_gone(context) is None  # type: ignore[arg-type]
    context.kill_driver()
    gone = str(driver_gone(context))  # type: ignore[arg-type]
    assert gone.endswith(f"Java process {context.driver.pid}) has ended, by SIGKILL")


def test_a_broken_connection_is_a_lost_driver_if_it_ends_then(context: FakeContext) -> None:
    """The connection breaks while the process is still there. A moment later it has ended."""

    def break_down() -> None:
        context._gateway.proc = SimpleNamespace(pid=17, poll=lambda: None, wait=lambda timeout: -9)
        raise ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(SparkLostError, match=r"reading was given up: .*process 17\) has ended, by SIGKILL\. Close the"):
        watch(context, break_down)


def test_an_error_beside_a_living_driver_stays_as_it_is(context: FakeContext) -> None:
    """It has another cause."""

    def fail() -> None:
        raise ValueError("another cause")

    with pytest.raises(ValueError, match="another cause"):
        watch(context, fail)


def test_a_stopped_session_is_not_even_asked(context: FakeContext) -> None:
    """PySpark would say that None has no attribute."""
    context._jsc = None
    with pytest.raises(SparkLostError, match="reading was given up: the Spark session was stopped"):
        watch(context, lambda: pytest.fail("the block must not run"))


def watch(context: FakeContext, call: Callable[[], None]) -> None:
    """Call something that waits for Spark."""
    with watched(context, "reading"):  # type: ignore[arg-type]
        call()
