"""What follows when calls to a process broke: who is asked, how often, for how long, and what its answer means."""

from __future__ import annotations

import pytest

from tidegate.actors.ray.lost_nodes import (
    ASKED_MS_MAX,
    ASKS_MAX,
    BREAKS_MAX,
    BREAKS_MS,
    FAILURES_MAX,
    LIMIT_MS_MIN,
    Reconnections,
    Step,
    limit_ms,
)

LIMIT_MS = 10_000


def broken() -> Reconnections:
    """A call to process a broke at 0."""
    found = Reconnections(LIMIT_MS)
    assert found.broke("a", 0) == Step(None, ask=True)
    return found


def test_a_process_that_answers_goes_on() -> None:
    """However many calls broke it is asked once. Of a process that is not asked for no answer says anything."""
    found = broken()
    assert found.broke("a", 0) == Step(None)
    assert found.answered("a") == Step("alive", over=True)
    assert found.answered("a") == Step(None)
    assert found.broke("a", 1) == Step(None, ask=True)


def test_a_process_is_dead_when_it_cannot_be_asked_several_times() -> None:
    """Once may be the link that is just coming back. Then it is asked on, and an answer comes too late."""
    found = broken()
    for _ in range(FAILURES_MAX - 1):
        assert found.failed("a", 0, final=False) == Step(None, ask=True)
    assert found.failed("a", 0, final=False) == Step("dead", ask=True)
    assert found.broke("a", 0) == Step("dead"), "what breaks later has the same end"
    assert found.failed("a", 0, final=False) == Step(None, ask=True)
    assert found.answered("a") == Step("late", over=True)


def test_a_process_is_dead_when_ray_says_so() -> None:
    """Nothing more is asked, also where it counted as dead before."""
    assert broken().failed("a", 0, final=True) == Step("dead", over=True)
    found = broken()
    for _ in range(FAILURES_MAX):
        found.failed("a", 0, final=False)
    assert found.failed("a", 0, final=True) == Step(None, over=True)
    assert found.failed("a", 0, final=True) == Step(None), "one that nobody asks about any more"


@pytest.mark.parametrize("after_ms", [LIMIT_MS - 1, LIMIT_MS])
def test_an_answer_takes_a_bounded_time(after_ms: int) -> None:
    """A question may be on its way for ever, or break when the time is over."""
    over = after_ms == LIMIT_MS
    found = broken()
    assert found.pass_time("a", after_ms) == Step("dead" if over else None)
    assert found.pass_time("a", after_ms) == Step(None), "it is said once"
    assert found.answered("a").verdict == ("late" if over else "alive")
    assert broken().failed("a", after_ms, final=False) == Step("dead" if over else None, ask=True)


def test_nobody_is_asked_for_ever() -> None:
    """Ray may never say what became of a process."""
    found = broken()
    for _ in range(ASKS_MAX - 1):
        assert found.failed("a", 0, final=False).ask
    assert found.failed("a", 0, final=False) == Step(None, over=True)


def test_a_question_without_an_answer_has_an_end() -> None:
    """It neither comes back nor breaks, and so it is no failure that counts."""
    found, end_ms = broken(), LIMIT_MS + ASKED_MS_MAX
    assert found.pass_time("a", LIMIT_MS) == Step("dead")
    assert found.pass_time("a", end_ms - 1) == Step(None)
    assert found.pass_time("a", end_ms) == Step(None, over=True)
    assert found.answered("a") == Step(None)


@pytest.mark.parametrize("within_ms", [BREAKS_MS - 1, BREAKS_MS])
def test_a_connection_that_breaks_again_and_again_is_of_no_use(within_ms: int) -> None:
    """It would be called again without end. Once a day is nothing, and another process is another one."""
    found = Reconnections(LIMIT_MS)
    for number in range(BREAKS_MAX - 1):
        assert found.broke("a", number).ask
        assert found.answered("a").verdict == "alive"
    assert found.broke("b", within_ms) == Step(None, ask=True)
    assert found.broke("a", within_ms) == Step("dead" if within_ms < BREAKS_MS else None, ask=True)


def test_who_has_ended_is_forgotten() -> None:
    """Its breaks are not counted for whoever is called so later."""
    found = Reconnections(LIMIT_MS)
    for _ in range(BREAKS_MAX + 1):
        assert found.broke("a", 0) == Step(None, ask=True)
        assert found.failed("a", 0, final=True) == Step("dead", over=True)
    found.broke("a", 0)
    found.forget("a")
    assert found.broke("a", 0) == Step(None, ask=True)


def test_the_limit_follows_the_heartbeats() -> None:
    """As long as a process has for its last question, but never less than a busy one needs."""
    assert [limit_ms(timeout_ms) for timeout_ms in (50_000, 1_000)] == [10_000, LIMIT_MS_MIN]
