"""Every rule of exactly-once barrier handling, one by one."""

from __future__ import annotations

import copy

import pytest
from barrier_script import TIMEOUT_MS, A, B, C, Script, barrier, channels_of

from tidegate.actors.task.barrier_aligner import ANNOUNCED_MAX, BarrierAligner, make_handler
from tidegate.actors.task.barrier_handler import REMEMBERED_ABORTS_MAX, BarrierTracker, Outcome
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.stream_elements import Alignment
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

SUBSUMED = "(SUBSUMED)"
CANCEL = "(CANCEL_BARRIER)"

# name: (channels, steps, answers, channels blocked in the end, checkpoint pending in the end)
ALIGNED = {
    "one channel never waits": ("a", "a1 a2", "s1, s2", "", None),
    "blocked until all are there": ("abc", "a1 c1", "-, -", "ac", 1),
    "the last barrier aligns and unblocks": ("abc", "a1 c1 b1", "-, -, s1", "", None),
    "one after the other": ("ab", "a2 b2 a3 b3", "-, s2, -, s3", "", None),
    "a barrier older than what ended is stale": ("ab", "a2 b2 b1", "-, s2, -", "", None),
    "a barrier older than what is pending is stale": ("abc", "a2 b1", "-, -", "a", 2),
    "a newer barrier supersedes": ("abc", "a1 b2", f"-, x1{SUBSUMED}", "b", 2),
    "what was superseded stays over": ("abc", "a1 b2 c1", f"-, x1{SUBSUMED}, -", "b", 2),
    "the superseding one completes": ("ab", "a1 b2 a2", f"-, x1{SUBSUMED}, s2", "", None),
    "forced aligned is aligned": ("ab", "a1f @500 T b1f", "-, -, s1", "", None),
    "an announced barrier blocks nobody": ("ab", "a!1", "-", "", None),
    "an announced barrier disturbs no older one": ("ab", "a!1 a1 b!1 b!2 b1", "-, -, -, -, s1", "", None),
    "abort before the first barrier": ("ab", "~1 a1 b1", "-, x1, -", "", None),
    "abort before the only barrier": ("a", "~1 a1", "-, x1", "", None),
    "abort told twice": ("ab", "~1 ~1 a1 a2 b2", "-, -, x1, -, s2", "", None),
    "abort of a later one": ("ab", "~2 a1 b1 a2", "-, -, s1, x2", "", None),
    "abort that a newer one overtook": ("ab", "~1 a2 b1 b2", "-, -, -, s2", "", None),
    "abort during alignment unblocks": ("ab", "a1 ~1 b1", "-, x1, -", "", None),
    "abort after the snapshot": ("ab", "a1 b1 ~1", "-, s1, -", "", None),
    "abort of another one": ("ab", "a1 ~2 b1 a2", "-, -, s1, x2", "", None),
    "abort of an announced one": ("ab", "a!1 ~1 a1 b1", "-, -, x1, -", "", None),
    "an aligned announcement of an aborted one": ("ab", "~1 a!1 a1", "-, -, x1", "", None),
    "superseded by an aborted one": ("ab", "~2 a1 b2", f"-, -, x1{SUBSUMED} x2", "", None),
    "a cancel barrier unblocks": ("ab", "a1 b~1", f"-, x1{CANCEL}", "", None),
    "a cancel barrier is sent on once": ("ab", "a~1 b~1", f"x1{CANCEL}, -", "", None),
    "a cancel barrier before the barrier": ("ab", "a~1 b1", f"x1{CANCEL}, -", "", None),
    "a cancel barrier of a newer one": ("ab", "a1 b~2", f"-, x1{SUBSUMED} x2{CANCEL}", "", None),
    "a cancel barrier of an older one": ("ab", "a2 b~1", "-, -", "a", 2),
    "a cancel barrier of an aborted one": ("ab", "~1 a~1", "-, x1", "", None),
    "an ended channel needs no barrier": ("ab", "a$ b1", "-, s1", "", None),
    "the end of the last channel aligns": ("abc", "a1 b1 c$", "-, -, s1", "", None),
    "the end of one of two channels does not": ("abc", "a1 b$", "-, -", "a", 1),
    "all channels end": ("ab", "a$ b$", "-, -", "", None),
}
UNALIGNED = {
    "the first one to arrive makes the snapshot": ("ab", "a!1u", "s1u", "", 1),
    "the rest is collected": ("ab", "a!1u b!1u", "s1u, -", "", None),
    "the rest is collected, aligned or not": ("abc", "a!1u b!1 c!1f", "s1u, -, -", "", None),
    "a channel's end is collected": ("ab", "a!1u b$", "s1u, -", "", None),
    "its barriers block nobody when they are taken": ("abc", "a!1u a1u b!1f b1f", "s1u, -, -, -", "", 1),
    "a barrier that was not announced counts when taken": ("ab", "a1u b1u", "s1u, -", "", None),
    "one channel has nothing to collect": ("a", "a!1u a1u", "s1u, -", "", None),
    "what was announced before is collected": ("ab", "a!1 b!1u", "-, s1u", "", None),
    "it unblocks what is aligned": ("abc", "a1f b!1u", "-, s1u", "", 1),
    "an aligned one that was taken is collected": ("ab", "a1f b!1u", "-, s1u", "", None),
    "it supersedes an older one when it arrives": ("abc", "a1 b!2u", f"-, x1{SUBSUMED} s2u", "", 2),
    "it is superseded while it collects": ("ab", "a!1u a!2u", f"s1u, x1{SUBSUMED} s2u", "", 2),
    "an aligned one supersedes it when taken": ("ab", "a!1u a1u a!2 a2", f"s1u, -, -, x1{SUBSUMED}", "a", 2),
    "it is cancelled while it collects": ("ab", "a!1u b~1", f"s1u, x1{CANCEL}", "", None),
    "it is aborted while it collects": ("ab", "a!1u ~1 b!1u", "s1u, x1, -", "", None),
    "it was aborted before": ("ab", "~1 a!1u b!1u", "-, x1, -", "", None),
    "an old one is stale": ("ab", "a2 a!1u b!1u", "-, -, -", "a", 2),
    "an end counts once with the barrier before it": ("abc", "a!1u a1u a$ b!1u", "s1u, -, -, -", "", 1),
    "it is over when it was collected": ("ab", "a!1u b!1u ~1 b~1", "s1u, -, -, -", "", None),
}
TIMEOUT = {
    "the first announcement arms the timer, once": ("ab", "a!1t b!1t a1t", "T100, -, -", "a", 1),
    "the first barrier taken arms it too": ("ab", "a1t b!1t", "T100, -", "a", 1),
    "all in time is plainly aligned": ("ab", "a!1t a1t b!1t b1t @100 T", "T100, -, -, s1, -", "", None),
    "over, none taken": ("ab", "a!1t @100 T", "T100, s1u", "", 1),
    "over, some taken": ("abc", "a1t @100 T", "T100, s1u", "", 1),
    "over, what had arrived is collected": ("ab", "a!1t b!1t @100 T", "T100, -, s1u", "", None),
    "not over": ("ab", "a1t @99 T", "T100, -", "a", 1),
    "over when it arrives": ("ab", "@100 a!1t", "s1u", "", 1),
    "over when the first is taken": ("ab", "@100 a1t", "s1u", "", 1),
    "over when a second one arrives, before the timer": ("abc", "a1t @100 b!1t T", "T100, s1u, -", "", 1),
    "over when a second of three is taken": ("abc", "a1t @100 b1t", "T100, s1u", "", 1),
    "the last one taken aligns however late": ("ab", "a1t @100 b1t", "T100, s1", "", None),
    "the last end aligns however late": ("ab", "a1t @100 b$ T", "T100, s1, -", "", None),
    "one that was forced aligned switches with it": ("ab", "a1f b!1t @100 T", "-, T100, s1u", "", None),
    "one unaligned barrier switches at once": ("abc", "a1t b!1u @100 T", "T100, s1u, -", "", 1),
    "an announcement disturbs no older one": ("ab", "a1 b!2t b1", "-, T100, s1", "", None),
    "its time passes while an older one is pending": ("ab", "a1 b!2t @100 T", f"-, T100, x1{SUBSUMED} s2u", "", 2),
    "its time passes after an older one": ("ab", "a1 b!2t b1 @100 T", "-, T100, s1, s2u", "", 2),
    "an older one may still come": ("ab", "a!2t b1 a1 b2 a2", "T100, -, s1, -, s2", "", None),
    "two are over": ("ab", "a!1t a!2t @100 T T", f"T100, T100, s1u T100, x1{SUBSUMED} s2u", "", 2),
    "an overtaken announcement does not come up again": ("ab", "a!1t b2 @100 T", "T100, -, -", "b", 2),
    "an overtaken announcement delays no other": ("ab", "a!1t b2t @100 T", "T100, T100, s2u", "", 2),
    "aborted before it arrives": ("ab", "~1 a!1t @100 T a1t", "-, -, -, x1", "", None),
    "aborted before its time": ("ab", "a!1t ~1 @100 T", "T100, -, -", "", None),
    "cancelled before its time": ("ab", "a!1t b~1 @100 T", f"T100, x1{CANCEL}, -", "", None),
    "over and aborted before": ("ab", "~1 @100 a!1t", "-, x1", "", None),
}
TRIGGERED = {
    "a source": ("", "*1 *2u *3t", "s1, s2u, s3", "", None),
    "a source is triggered late": ("", "@100 *1t", "s1", "", None),
    "a source is triggered again": ("", "*2 *2 *1", "s2, -, -", "", None),
    "an aborted source": ("", "~1 *1 *1 *2", "-, x1, -, s2", "", None),
    "the ends are waited for": ("ab", "*1 a$ b$", "-, -, s1", "", None),
    "nothing is blocked": ("ab", "*1 a$", "-, -", "", 1),
    "all have ended": ("ab", "a$ b$ *1", "-, -, s1", "", None),
    "all have ended, and late": ("a", "a$ @100 *1t", "-, s1", "", None),
    "triggered again": ("ab", "*1 *1 a$ b$", "-, -, -, s1", "", None),
    "unaligned": ("ab", "*1u a$ b$", "s1u, -, -", "", None),
    "with a timeout": ("ab", "*1t a$ @100 T b$", "T100, -, s1u, -", "", None),
    "with a timeout that is over": ("ab", "@100 *1t", "s1u", "", 1),
    "a newer trigger": ("ab", "*1 *2 a$ b$", f"-, x1{SUBSUMED}, -, s2", "", None),
    "a newer trigger supersedes an alignment": ("ab", "a1 *2", f"-, x1{SUBSUMED}", "", 2),
    "aborted": ("ab", "*1 ~1 a$ b$", "-, x1, -, -", "", None),
    "cancelled": ("ab", "*1 b~1", f"-, x1{CANCEL}", "", None),
    "a barrier all the same": ("ab", "*1 a!1 a1 b$", "-, -, -, s1", "", None),
    "an unaligned barrier all the same": ("ab", "*1 a!1u b$", "-, s1u, -", "", None),
}
RULES = [
    pytest.param(*rule, id=f"{group}: {name}")
    for group, rules in {
        "aligned": ALIGNED,
        "unaligned": UNALIGNED,
        "timeout": TIMEOUT,
        "triggered": TRIGGERED,
    }.items()
    for name, rule in rules.items()
]


@pytest.mark.parametrize(("channels", "steps", "expected", "blocked", "pending"), RULES)
def test_rules_of_the_aligner(channels: str, steps: str, expected: str, blocked: str, pending: int | None) -> None:
    """Each rule as inputs, the answers to them, and what is blocked and pending in the end."""
    script = Script(BarrierAligner(channels_of(channels)))

    assert expected.split(", ") == script.run(steps)
    assert blocked == script.blocked(channels)
    assert pending == script.handler.pending


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("a1 a1", id="a blocked channel repeats its barrier"),
        pytest.param("a1 a2", id="a blocked channel delivers the next barrier"),
        pytest.param("a1 a2u", id="a blocked channel delivers an unaligned barrier"),
        pytest.param("a1 a~1", id="a blocked channel delivers a cancel barrier"),
        pytest.param("a1 a$", id="a blocked channel ends"),
        pytest.param("a$ a1", id="an ended channel delivers a barrier"),
        pytest.param("a$ a!1", id="an ended channel announces a barrier"),
        pytest.param("a$ a~1", id="an ended channel delivers a cancel barrier"),
        pytest.param("a$ a$", id="a channel ends twice"),
        pytest.param("c1", id="a channel of somebody else"),
        pytest.param("c!1", id="an announcement of somebody else"),
    ],
)
def test_what_cannot_happen_is_refused_by_the_aligner(steps: str) -> None:
    """An element where there can be none is a ProtocolError, and every field is as it was before."""
    *before, wrong = steps.split()
    script = Script(BarrierAligner(channels_of("ab")))
    script.run(" ".join(before))
    fields = fields_of(script.handler)

    with pytest.raises(ProtocolError):
        script.step(wrong)

    assert fields == fields_of(script.handler)


def fields_of(value: object) -> object:
    """Everything that an object holds, as values that can be compared."""
    if isinstance(value, dict):
        return {key: fields_of(item) for key, item in value.items()}
    if type(value).__module__ in {BarrierAligner.__module__, BarrierTracker.__module__} and hasattr(value, "__dict__"):
        return {name: fields_of(item) for name, item in vars(value).items()}
    return copy.deepcopy(value)


def test_a_timeout_changes_nothing_but_the_alignment() -> None:
    """What becomes unaligned keeps its trigger time and its other options; what aligns in time keeps all of them."""
    late, in_time = BarrierAligner(channels_of("ab")), BarrierAligner(channels_of("a"))
    late.announced(A, barrier(1, "t"), at_ms=0)

    snapshot = late.timer(TIMEOUT_MS).snapshot

    assert snapshot is not None
    assert (snapshot.options.alignment, snapshot.options.aligned_timeout_ms) == (Alignment.UNALIGNED, TIMEOUT_MS)
    assert barrier(1, "t") == in_time.barrier(A, barrier(1, "t"), at_ms=0).snapshot


def test_alignment_lasts_from_the_first_barrier_that_was_taken() -> None:
    """The duration counts from the first barrier of the checkpoint, not of the one that it superseded."""
    aligner = BarrierAligner(channels_of("abc"))
    assert aligner.alignment_ms(1_000) == 0
    aligner.barrier(A, barrier(1), at_ms=100)
    aligner.announced(B, barrier(2), at_ms=120)
    aligner.barrier(B, barrier(2), at_ms=150)
    aligner.barrier(A, barrier(2), at_ms=170)
    aligner.barrier(C, barrier(2), at_ms=190)

    assert aligner.alignment_ms(190) == 40


def test_alignment_with_a_timeout_lasts_from_the_announcement() -> None:
    """A barrier with a timeout counts from when it arrived, also if an older checkpoint was pending then."""
    aligner = BarrierAligner(channels_of("ab"))
    aligner.barrier(A, barrier(1), at_ms=5)
    aligner.announced(B, barrier(2, "t"), at_ms=10)
    aligner.barrier(B, barrier(1), at_ms=20)
    assert aligner.alignment_ms(20) == 15
    aligner.timer(TIMEOUT_MS)

    assert aligner.alignment_ms(TIMEOUT_MS) == TIMEOUT_MS - 10


def test_passed_means_taken_in_order_or_ended() -> None:
    """An announced barrier has not passed; a taken one has, for its checkpoint and older ones; an end passes all."""
    aligner = BarrierAligner(channels_of("abc"))
    one, two = CheckpointId(1), CheckpointId(2)
    aligner.announced(A, barrier(1, "u"), at_ms=0)
    aligner.barrier(B, barrier(1, "u"), at_ms=0)
    aligner.channel_ended(C, at_ms=0)

    assert [aligner.passed(channel, one) for channel in (A, B, C)] == [False, True, True]
    assert [aligner.passed(channel, two) for channel in (A, B, C)] == [False, False, True]
    aligner.barrier(A, barrier(1, "u"), at_ms=0)
    assert aligner.passed(A, one)


def test_the_aligners_remembered_aborts_are_bounded() -> None:
    """Of many aborts the newest are remembered; barriers of forgotten ones block, and are superseded."""
    aligner = BarrierAligner(channels_of("ab"))
    for n in range(1, REMEMBERED_ABORTS_MAX + 2):
        aligner.abort(CheckpointId(n))

    assert Outcome() == aligner.barrier(A, barrier(1), at_ms=0)
    assert aligner.blocks(A)
    subsumed = (CheckpointId(1), CheckpointFailureReason.SUBSUMED)
    assert Outcome(cancelled=(subsumed, (CheckpointId(2), None))) == aligner.barrier(B, barrier(2), at_ms=0)


def test_remembered_announcements_are_bounded() -> None:
    """Beyond the bound an announcement asks for no timer; its checkpoint starts when a barrier of it is taken."""
    aligner = BarrierAligner(channels_of("ab"))
    for n in range(1, ANNOUNCED_MAX + 1):
        assert aligner.announced(A, barrier(n, "t"), at_ms=0).timer_at_ms == TIMEOUT_MS
    beyond = barrier(ANNOUNCED_MAX + 1, "t")

    assert Outcome() == aligner.announced(A, beyond, at_ms=0)
    assert Outcome(timer_at_ms=TIMEOUT_MS) == aligner.barrier(A, beyond, at_ms=0)
    assert beyond == aligner.barrier(B, beyond, at_ms=0).snapshot


def test_the_mode_chooses_the_handler() -> None:
    """Exactly-once aligns, at-least-once tracks."""
    assert isinstance(make_handler(channels_of("ab"), exactly_once=True), BarrierAligner)
    assert isinstance(make_handler(channels_of("ab"), exactly_once=False), BarrierTracker)
