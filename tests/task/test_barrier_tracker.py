"""Every rule of at-least-once barrier handling, one by one."""

from __future__ import annotations

import pytest
from barrier_script import A, B, Script, barrier, channels_of
from test_barrier_aligner import fields_of

from tidegate.actors.task.barrier_handler import REMEMBERED_ABORTS_MAX, TRACKED_MAX, BarrierTracker, Outcome
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

SUBSUMED = "(SUBSUMED)"
CANCEL = "(CANCEL_BARRIER)"

# name: (channels, steps, answers, checkpoint pending in the end)
RULES = {
    "one channel": ("a", "a1 a2", "s1, s2", None),
    "the last barrier makes the snapshot": ("abc", "a1 c1 b1", "-, -, s1", None),
    "a barrier told twice counts once": ("ab", "a1 a1 b1", "-, -, s1", None),
    "an announced barrier does not count": ("ab", "a!1 b1 a1", "-, -, s1", None),
    "an unaligned announcement does not count either": ("ab", "a!1u b!1u", "-, -", None),
    "several are pending": ("ab", "a1 a2 b1 b2", "-, -, s1, s2", None),
    "the newest is named": ("ab", "a1 a2", "-, -", 2),
    "one that overtakes supersedes": ("ab", "a1 a2 b2 b1", f"-, -, x1{SUBSUMED} s2, -", None),
    "a newer one stays pending": ("ab", "a1 a2 a3 b2", f"-, -, -, x1{SUBSUMED} s2", 3),
    "a stale barrier": ("ab", "a2 b2 a1 b1", "-, s2, -, -", None),
    "barriers out of order": ("ab", "a2 b1 b2 a1", f"-, -, x1{SUBSUMED} s2, -", None),
    "abort before the first barrier": ("ab", "~1 a1 b1", "-, x1, -", None),
    "abort concerns one only": ("ab", "a1 a2 ~2 b2 b1", "-, -, x2, -, s1", None),
    "early abort concerns one only": ("ab", "~2 a1 a2 b1 b2", "-, -, x2, s1, -", None),
    "abort told twice": ("ab", "a1 ~1 ~1 b1", "-, x1, -, -", None),
    "abort after the snapshot": ("ab", "a1 b1 ~1", "-, s1, -", None),
    "a cancel barrier": ("ab", "a1 b~1 a~1 b1", f"-, x1{CANCEL}, -, -", None),
    "a cancel barrier before the barrier": ("ab", "a~1 b1", f"x1{CANCEL}, -", None),
    "a cancel barrier of a newer one": ("ab", "a1 b~2 b1", f"-, x1{SUBSUMED} x2{CANCEL}, -", None),
    "a cancel barrier spares newer ones": ("ab", "a1 a2 b~1 b2", f"-, -, x1{CANCEL}, s2", None),
    "a cancel barrier of an aborted one": ("ab", "~1 a~1", "-, x1", None),
    "an ended channel needs no barrier": ("ab", "a$ b1", "-, s1", None),
    "an end completes": ("abc", "a1 b1 c$", "-, -, s1", None),
    "an end completes the newest": ("ab", "a1 a2 b$", f"-, -, x1{SUBSUMED} s2", None),
    "the end of one that was counted": ("abc", "a1 a$ b1 c1", "-, -, -, s1", None),
    "a source": ("", "*1 *1 *2", "s1, -, s2", None),
    "a triggered task waits for the ends": ("ab", "*1 a$ b$", "-, -, s1", None),
    "no timer": ("ab", "a!1t a1t @100 T b1t", "-, -, -, s1", None),
}


@pytest.mark.parametrize(
    ("channels", "steps", "expected", "pending"), [pytest.param(*rule, id=name) for name, rule in RULES.items()]
)
def test_rules_of_the_tracker(channels: str, steps: str, expected: str, pending: int | None) -> None:
    """Each rule as inputs, the answers to them, and what is pending in the end; nothing is ever blocked."""
    script = Script(BarrierTracker(channels_of(channels)))
    answers = []
    for step in steps.split():
        answers += script.run(step)
        assert script.blocked(channels) == ""

    assert expected.split(", ") == answers
    assert pending == script.handler.pending


@pytest.mark.parametrize("steps", ["a$ a1", "a$ a!1", "a$ a~1", "a$ a$", "c1", "c!1"])
def test_what_cannot_happen_is_refused_by_the_tracker(steps: str) -> None:
    """An element of a channel that has ended, or of somebody else's, is a ProtocolError and changes nothing."""
    *before, wrong = steps.split()
    script = Script(BarrierTracker(channels_of("ab")))
    script.run(" ".join(before))
    fields = fields_of(script.handler)

    with pytest.raises(ProtocolError):
        script.step(wrong)

    assert fields == fields_of(script.handler)


def test_what_the_tracker_has_pending_is_bounded() -> None:
    """One checkpoint too many supersedes the oldest, whose barriers no longer count; one older than all is refused."""
    tracker = BarrierTracker(channels_of("ab"))
    for n in range(2, TRACKED_MAX + 2):
        assert Outcome() == tracker.barrier(A, barrier(n), at_ms=0)
    oldest, newest = CheckpointId(2), CheckpointId(TRACKED_MAX + 2)

    subsumed = ((CheckpointId(1), CheckpointFailureReason.SUBSUMED),)
    assert Outcome(cancelled=subsumed) == tracker.barrier(B, barrier(1), at_ms=0)
    subsumed = ((oldest, CheckpointFailureReason.SUBSUMED),)
    assert Outcome(cancelled=subsumed) == tracker.barrier(A, barrier(newest), at_ms=0)
    assert Outcome() == tracker.barrier(B, barrier(oldest), at_ms=0)


def test_the_trackers_remembered_aborts_are_bounded() -> None:
    """Of many aborts the newest are remembered; the forgotten one completes."""
    tracker = BarrierTracker(channels_of("a"))
    for n in range(1, REMEMBERED_ABORTS_MAX + 2):
        tracker.abort(CheckpointId(n))

    assert Outcome(snapshot=barrier(1)) == tracker.barrier(A, barrier(1), at_ms=0)
    assert Outcome(cancelled=((CheckpointId(2), None),)) == tracker.barrier(A, barrier(2), at_ms=0)


def test_the_tracker_counts_time_from_the_first_barrier() -> None:
    """The duration is that of the checkpoint whose snapshot was taken last, 0 before there is one."""
    tracker = BarrierTracker(channels_of("ab"))
    assert tracker.alignment_ms(1_000) == 0
    tracker.barrier(A, barrier(1), at_ms=10)
    tracker.barrier(A, barrier(2), at_ms=30)
    tracker.barrier(B, barrier(1), at_ms=40)

    assert tracker.alignment_ms(45) == 35
    assert [tracker.passed(A, CheckpointId(2)), tracker.passed(B, CheckpointId(1))] == [True, True]
    assert not tracker.passed(B, CheckpointId(2))
