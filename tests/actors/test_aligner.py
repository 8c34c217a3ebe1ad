"""Every rule of the barrier aligner, one by one, and all of them against a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.elements import Barrier
from tidegate.actors.identity import ChannelId
from tidegate.actors.task.aligner import REMEMBERED_ABORTS_MAX, BarrierAligner, Outcome
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, SubtaskIndex

A, B, C = (ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(3))
NAMES = {"a": A, "b": B, "c": C}


def barrier(checkpoint_id: int) -> Barrier:
    """A barrier of this checkpoint."""
    return Barrier(CheckpointId(checkpoint_id), triggered_at_ms=0)


def drive(channels: str, steps: str) -> tuple[list[str], BarrierAligner]:
    """Run steps such as `a1` (barrier 1 on a), `~1` (abort), `a~1` (cancel barrier), `a$` (end of a).

    Returns what each had as a consequence: `-`, `snapshot 1`, `cancel 1`, or several of them.
    """
    aligner = BarrierAligner(frozenset(NAMES[name] for name in channels))
    return [_text(_step(aligner, step)) for step in steps.split()], aligner


def _step(aligner: BarrierAligner, step: str) -> Outcome:
    if step.startswith("~"):
        return aligner.abort(CheckpointId(int(step[1:])))
    channel, what = NAMES[step[0]], step[1:]
    if what == "$":
        return aligner.channel_ended(channel)
    if what.startswith("~"):
        return aligner.cancel_barrier(channel, CheckpointId(int(what[1:])))
    return aligner.barrier(channel, barrier(int(what)), at_ms=0)


def _text(outcome: Outcome) -> str:
    parts = [f"cancel {n}" for n in outcome.cancelled]
    if outcome.snapshot is not None:
        parts.append(f"snapshot {outcome.snapshot.checkpoint_id}")
    return ", ".join(parts) or "-"


@pytest.mark.parametrize(
    ("channels", "steps", "expected", "blocked"),
    [
        pytest.param("a", "a1 a2", ["snapshot 1", "snapshot 2"], "", id="one channel never waits"),
        pytest.param("abc", "a1 c1", ["-", "-"], "ac", id="blocked until all are there"),
        pytest.param("abc", "a1 c1 b1", ["-", "-", "snapshot 1"], "", id="the last barrier aligns and unblocks"),
        pytest.param("ab", "a2 b2 a3 b3", ["-", "snapshot 2", "-", "snapshot 3"], "", id="one after the other"),
        pytest.param("ab", "a2 b2 b1", ["-", "snapshot 2", "-"], "", id="a barrier older than what ended is stale"),
        pytest.param("abc", "a2 b1", ["-", "-"], "a", id="a barrier older than what is pending is stale"),
        pytest.param("abc", "a1 b2", ["-", "cancel 1"], "b", id="a newer barrier supersedes"),
        pytest.param("abc", "a1 b2 c1", ["-", "cancel 1", "-"], "b", id="what was superseded stays over"),
        pytest.param("ab", "a1 b2 a2", ["-", "cancel 1", "snapshot 2"], "", id="the superseding one completes"),
        pytest.param("ab", "~1 a1 b1", ["-", "cancel 1", "-"], "", id="abort before the first barrier"),
        pytest.param("a", "~1 a1", ["-", "cancel 1"], "", id="abort before the only barrier"),
        pytest.param("ab", "~1 ~1 a1 a2 b2", ["-", "-", "cancel 1", "-", "snapshot 2"], "", id="abort told twice"),
        pytest.param("ab", "~2 a1 b1 a2", ["-", "-", "snapshot 1", "cancel 2"], "", id="abort of a later one"),
        pytest.param("ab", "~1 a2 b1 b2", ["-", "-", "-", "snapshot 2"], "", id="abort that a newer one overtook"),
        pytest.param("ab", "a1 ~1 b1", ["-", "cancel 1", "-"], "", id="abort during alignment unblocks"),
        pytest.param("ab", "a1 b1 ~1", ["-", "snapshot 1", "-"], "", id="abort after the snapshot"),
        pytest.param("ab", "a1 ~2 b1 a2", ["-", "-", "snapshot 1", "cancel 2"], "", id="abort of another one"),
        pytest.param("ab", "~2 a1 b2", ["-", "-", "cancel 1, cancel 2"], "", id="superseded by an aborted one"),
        pytest.param("ab", "a1 b~1", ["-", "cancel 1"], "", id="a cancel barrier unblocks"),
        pytest.param("ab", "a~1 b~1", ["cancel 1", "-"], "", id="a cancel barrier is sent on once"),
        pytest.param("ab", "a~1 b1", ["cancel 1", "-"], "", id="a cancel barrier before the barrier"),
        pytest.param("ab", "a1 b~2", ["-", "cancel 1, cancel 2"], "", id="a cancel barrier of a newer checkpoint"),
        pytest.param("ab", "a2 b~1", ["-", "-"], "a", id="a cancel barrier of an older checkpoint"),
        pytest.param("ab", "a$ b1", ["-", "snapshot 1"], "", id="an ended channel needs no barrier"),
        pytest.param("abc", "a1 b1 c$", ["-", "-", "snapshot 1"], "", id="the end of the last channel aligns"),
        pytest.param("abc", "a1 b$", ["-", "-"], "a", id="the end of one of two channels does not"),
        pytest.param("ab", "a$ b$", ["-", "-"], "", id="all channels end"),
    ],
)
def test_rules(channels: str, steps: str, expected: list[str], blocked: str) -> None:
    """Each rule of the module's docstring, as inputs, their consequences, and the channels blocked in the end."""
    found, aligner = drive(channels, steps)

    assert found == expected
    assert "".join(name for name in channels if aligner.blocks(NAMES[name])) == blocked


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("a1 a1", id="a blocked channel repeats its barrier"),
        pytest.param("a1 a2", id="a blocked channel delivers the next barrier"),
        pytest.param("a$ a1", id="an ended channel delivers a barrier"),
        pytest.param("a$ a~1", id="an ended channel delivers a cancel barrier"),
        pytest.param("a$ a$", id="a channel ends twice"),
        pytest.param("c1", id="a channel of somebody else"),
    ],
)
def test_what_cannot_happen_is_refused_and_changes_nothing(steps: str) -> None:
    """A barrier where there can be none is a ProtocolError, and the aligner is as it was before."""
    *before, wrong = steps.split()
    _, aligner = drive("ab", " ".join(before))
    pending, blocked = aligner.pending, aligner.blocks(A)

    with pytest.raises(ProtocolError):
        _step(aligner, wrong)

    assert (aligner.pending, aligner.blocks(A)) == (pending, blocked)


def test_alignment_lasts_from_the_first_barrier_on() -> None:
    """The duration counts from the first barrier of the checkpoint, not of the one that it superseded."""
    aligner = BarrierAligner(frozenset({A, B, C}))
    aligner.barrier(A, barrier(1), at_ms=100)
    aligner.barrier(B, barrier(2), at_ms=150)
    aligner.barrier(A, barrier(2), at_ms=170)
    aligner.barrier(C, barrier(2), at_ms=190)

    assert aligner.alignment_ms(190) == 40


def test_remembered_aborts_are_bounded() -> None:
    """Of many aborts the newest are remembered; barriers of forgotten ones block, and are superseded."""
    aligner = BarrierAligner(frozenset({A, B}))
    for n in range(1, REMEMBERED_ABORTS_MAX + 2):
        aligner.abort(CheckpointId(n))

    assert aligner.barrier(A, barrier(1), at_ms=0) == Outcome()
    assert aligner.blocks(A)
    assert aligner.barrier(B, barrier(2), at_ms=0) == Outcome(cancelled=(CheckpointId(1), CheckpointId(2)))


@dataclass
class Model:
    """The same rules over plain facts: what each channel has delivered, which ids have ended and how."""

    channels: frozenset[ChannelId]
    over: int = 0
    aborted: set[int] = field(default_factory=set)
    at: dict[ChannelId, int] = field(default_factory=dict)
    ended: set[ChannelId] = field(default_factory=set)

    @property
    def pending(self) -> int | None:
        return max(self.at.values(), default=None)

    def finish(self, checkpoint_id: int) -> None:
        self.over = checkpoint_id
        self.at.clear()

    def barrier(self, channel: ChannelId, n: int) -> tuple[list[int], int | None]:
        if n <= self.over or (self.pending is not None and n < self.pending):
            return [], None
        cancelled = []
        if self.pending is not None and self.pending < n:
            cancelled.append(self.pending)
            self.finish(self.pending)
        if n in self.aborted:
            self.finish(n)
            return [*cancelled, n], None
        self.at[channel] = n
        return cancelled, self.aligned()

    def aligned(self) -> int | None:
        pending = self.pending
        if pending is None or set(self.at) | self.ended != self.channels:
            return None
        self.finish(pending)
        return pending

    def cancel(self, n: int) -> list[int]:
        pending = self.pending
        if n <= self.over or (pending is not None and n < pending):
            return []
        self.finish(n)
        return [n] if pending in (None, n) else [pending, n]

    def abort(self, n: int) -> list[int]:
        self.aborted.add(n)
        if self.pending != n:
            return []
        self.finish(n)
        return [n]


@given(data=st.data(), width=st.integers(1, 4))
@settings(max_examples=150)
def test_any_history_agrees_with_the_model(data: st.DataObject, width: int) -> None:
    """Whatever arrives in whatever order, consequences, blocked channels and the pending checkpoint are the model's."""
    channels = [ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(width)]
    aligner, model = BarrierAligner(frozenset(channels)), Model(frozenset(channels))
    snapshots: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        free = [c for c in channels if c not in model.ended and c not in model.at]
        kinds = ["abort", *(["barrier", "barrier", "barrier", "cancel", "end"] if free else [])]
        kind = data.draw(st.sampled_from(kinds))
        n = data.draw(st.integers(1, 5)) + max(0, model.over - 2)
        if kind == "abort":
            outcome = aligner.abort(CheckpointId(n))
            cancelled, snapshot = model.abort(n), None
        else:
            channel = data.draw(st.sampled_from(free))
            if kind == "barrier":
                outcome = aligner.barrier(channel, barrier(n), 0)
                cancelled, snapshot = model.barrier(channel, n)
            elif kind == "cancel":
                outcome = aligner.cancel_barrier(channel, CheckpointId(n))
                cancelled, snapshot = model.cancel(n), None
            else:
                outcome = aligner.channel_ended(channel)
                model.ended.add(channel)
                cancelled, snapshot = [], model.aligned()
        found = None if outcome.snapshot is None else outcome.snapshot.checkpoint_id
        assert (list(outcome.cancelled), found) == (cancelled, snapshot)
        assert aligner.pending == model.pending
        assert [aligner.blocks(c) for c in channels] == [c in model.at for c in channels]
        snapshots += [] if found is None else [found]
    assert snapshots == sorted(set(snapshots)), "a checkpoint is taken once, and ids only grow"
