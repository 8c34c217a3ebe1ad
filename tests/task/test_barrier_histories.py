"""Random histories of barriers: what must hold in all of them, and where a simple model says exactly what happens.

A history is a sequence of elements a channel, in order; what is drawn is how arrivals, takings, aborts, and time
interleave. Channels deliver ahead of what is taken, as far as they like.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from barrier_script import NAMES, barrier
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.task.barrier_aligner import BarrierAligner
from tidegate.actors.task.barrier_handler import BarrierHandler, BarrierTracker, Outcome
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Alignment, Barrier
from tidegate.storage.ids import CheckpointId

BATCH = "batch"
END = "end"
Queued = Barrier | int | str
"""A barrier, a cancel barrier (the checkpoint's number), a batch, or the end."""

CHECKPOINTS = 4


@dataclass
class World:
    """A handler, the queues before it, and all that came of it."""

    handler: BarrierHandler
    queues: dict[ChannelId, list[Queued]]
    arrived: dict[ChannelId, int] = field(default_factory=dict)
    taken: dict[ChannelId, int] = field(default_factory=dict)
    at_ms: int = 0
    snapshots: list[Barrier] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrived = dict.fromkeys(self.queues, 0)
        self.taken = dict.fromkeys(self.queues, 0)

    def can_arrive(self) -> list[ChannelId]:
        return [c for c in self.queues if self.arrived[c] < len(self.queues[c])]

    def can_take(self) -> list[ChannelId]:
        return [c for c in self.queues if self.taken[c] < self.arrived[c] and not self.handler.blocks(c)]

    def arrive(self, channel: ChannelId) -> Outcome:
        element = self.queues[channel][self.arrived[channel]]
        self.arrived[channel] += 1
        if isinstance(element, Barrier):
            return self.note(self.handler.announced(channel, element, self.at_ms))
        return Outcome()

    def take(self, channel: ChannelId) -> Outcome:
        element = self.queues[channel][self.taken[channel]]
        self.taken[channel] += 1
        if isinstance(element, Barrier):
            return self.note(self.handler.barrier(channel, element, self.at_ms))
        if isinstance(element, int):
            return self.note(self.handler.cancel_barrier(channel, CheckpointId(element), self.at_ms))
        return self.note(self.handler.channel_ended(channel, self.at_ms)) if element == END else Outcome()

    def note(self, outcome: Outcome) -> Outcome:
        self.cancelled += [n for n, _ in outcome.cancelled]
        if outcome.snapshot is not None:
            if outcome.snapshot.options.alignment in (Alignment.ALIGNED, Alignment.FORCED_ALIGNED):
                self.check_cut(outcome.snapshot.checkpoint_id)
            self.snapshots.append(outcome.snapshot)
        return outcome

    def check_cut(self, checkpoint_id: int) -> None:
        """An aligned snapshot cuts each channel exactly behind its barrier: nothing missing, nothing too much."""
        for channel, queue in self.queues.items():
            done = queue[: self.taken[channel]]
            last = done[-1] if done else None
            assert last == END or (isinstance(last, Barrier) and last.checkpoint_id == checkpoint_id)

    def run(self, data: st.DataObject, aborts: bool) -> None:
        """Random steps, until all that can move has moved."""
        for _ in range(200):
            moves = ["arrive"] * bool(self.can_arrive()) + ["take"] * bool(self.can_take())
            if not moves:
                return
            move = data.draw(st.sampled_from([*moves, *moves, "time", *(["abort"] if aborts else [])]))
            self.move(data, move)
        raise AssertionError("the history does not end")

    def move(self, data: st.DataObject, move: str) -> None:
        if move == "time":
            self.at_ms += data.draw(st.sampled_from([1, 60]))
            self.note(self.handler.timer(self.at_ms))
        elif move == "abort":
            self.note(self.handler.abort(CheckpointId(data.draw(st.integers(1, CHECKPOINTS)))))
        elif move == "arrive":
            self.arrive(data.draw(st.sampled_from(self.can_arrive())))
        else:
            self.take(data.draw(st.sampled_from(self.can_take())))


def draw_queues(data: st.DataObject, options: str, lossless: bool) -> dict[ChannelId, list[Queued]]:
    """A queue a channel. Lossless: each delivers the barrier of every checkpoint, or ends before."""
    width = data.draw(st.integers(1, 4))
    return {channel: _draw_queue(data, options, lossless) for channel in list(NAMES.values())[:width]}


def _draw_queue(data: st.DataObject, options: str, lossless: bool) -> list[Queued]:
    queue: list[Queued] = []
    for n in range(1, CHECKPOINTS + 1):
        queue += [BATCH] * data.draw(st.integers(0, 2))
        what = data.draw(st.sampled_from(["barrier"] * 5 + ["end"] + ([] if lossless else ["cancel", "nothing"])))
        if what == "end":
            return [*queue, END]
        if what == "barrier":
            queue.append(barrier(n, data.draw(st.sampled_from(options.split(",")))))
        elif what == "cancel":
            queue.append(n)
    return queue


@pytest.mark.parametrize("exactly_once", [True, False])
@given(data=st.data())
@settings(max_examples=30)
def test_no_history_breaks_a_rule(exactly_once: bool, data: st.DataObject) -> None:
    """Ids of snapshots only grow, each checkpoint ends in one way, and aligned snapshots are exact cuts.

    Only an unaligned snapshot may be given up after it was taken, while its barriers are being collected.
    """
    queues = draw_queues(data, ",u,f,t,t", lossless=False) if exactly_once else draw_queues(data, "", lossless=False)
    handler = BarrierAligner(frozenset(queues)) if exactly_once else _TrackerWithoutCuts(frozenset(queues))
    world = World(handler, queues)
    world.run(data, aborts=True)

    ids = [snapshot.checkpoint_id for snapshot in world.snapshots]
    assert sorted(set(ids)) == ids
    assert sorted(set(world.cancelled)) == sorted(world.cancelled)
    unaligned = {s.checkpoint_id for s in world.snapshots if s.options.alignment is Alignment.UNALIGNED}
    assert set(ids) & set(world.cancelled) <= unaligned


class _TrackerWithoutCuts(BarrierTracker):
    """A tracker whose snapshots say that they are at least once, so that nobody looks for an exact cut."""

    def barrier(self, channel: ChannelId, barrier: Barrier, at_ms: int) -> Outcome:
        return _as_at_least_once(super().barrier(channel, barrier, at_ms))

    def channel_ended(self, channel: ChannelId, at_ms: int) -> Outcome:
        return _as_at_least_once(super().channel_ended(channel, at_ms))


def _as_at_least_once(outcome: Outcome) -> Outcome:
    if outcome.snapshot is None:
        return outcome
    options = replace(outcome.snapshot.options, alignment=Alignment.AT_LEAST_ONCE)
    return replace(outcome, snapshot=replace(outcome.snapshot, options=options))


@given(data=st.data())
@settings(max_examples=80)
def test_aligned_checkpoints_all_happen(data: st.DataObject) -> None:
    """When every channel delivers every barrier or ends, each aligned checkpoint is taken, however they interleave."""
    queues = draw_queues(data, ",f", lossless=True)
    world = World(BarrierAligner(frozenset(queues)), queues)
    world.run(data, aborts=False)

    expected = max((sum(isinstance(e, Barrier) for e in queue) for queue in queues.values()), default=0)
    assert list(range(1, expected + 1)) == [snapshot.checkpoint_id for snapshot in world.snapshots]
    assert world.cancelled == []
    assert world.handler.pending is None


@given(data=st.data(), option=st.sampled_from(["", "f", "u", "t", "t,u", "f,u", ",f,u,t"]))
@settings(max_examples=80)
def test_one_checkpoint_happens_whatever_its_barriers_are(data: st.DataObject, option: str) -> None:
    """A checkpoint with nothing newer, cancelled or aborted is taken once, and is over when all barriers were taken."""
    queues = draw_queues(data, option, lossless=True)
    for queue in queues.values():
        first = next((i for i, e in enumerate(queue) if isinstance(e, Barrier)), None)
        if first is not None:
            queue[first + 1 :] = [BATCH, END]
    world = World(BarrierAligner(frozenset(queues)), queues)
    world.run(data, aborts=False)

    barriers = any(isinstance(element, Barrier) for queue in queues.values() for element in queue)
    assert [1] * barriers == [snapshot.checkpoint_id for snapshot in world.snapshots]
    assert world.cancelled == []
    assert world.handler.pending is None
    assert all(world.taken[c] == len(queue) for c, queue in queues.items())


@given(data=st.data())
@settings(max_examples=100)
def test_unaligned_checkpoints_are_taken_when_the_first_barrier_arrives(data: st.DataObject) -> None:
    """The first arrival of a barrier newer than all before makes its snapshot there and then, and blocks nobody."""
    queues = draw_queues(data, "u", lossless=True)
    world = World(BarrierAligner(frozenset(queues)), queues)
    newest = 0
    while world.can_arrive():
        moving = data.draw(st.sampled_from(world.can_arrive() + world.can_take()))
        if world.arrived[moving] == len(queues[moving]) or (moving in world.can_take() and data.draw(st.booleans())):
            world.take(moving)
            continue
        element = queues[moving][world.arrived[moving]]
        outcome = world.arrive(moving)
        if isinstance(element, Barrier):
            assert (element if element.checkpoint_id > newest else None) == outcome.snapshot
            newest = max(newest, element.checkpoint_id)
        assert not any(world.handler.blocks(channel) for channel in queues)


@dataclass
class Model:
    """Aligned barriers over plain facts: what each channel has delivered, which ids have ended and how."""

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

    def supersede(self) -> list[tuple[int, str | None]]:
        pending = self.pending
        if pending is None:
            return []
        self.finish(pending)
        return [(pending, "SUBSUMED")]

    def is_old(self, n: int) -> bool:
        return n <= self.over or (self.pending is not None and n < self.pending)

    def take(self, channel: ChannelId, element: Queued) -> tuple[list[tuple[int, str | None]], int | None]:
        if element == BATCH:
            return [], None
        if element == END:
            self.ended.add(channel)
            return [], self.aligned()
        n = int(element.checkpoint_id) if isinstance(element, Barrier) else int(element)
        if self.is_old(n):
            return [], None
        cancelled = [] if self.pending == n else self.supersede()
        if n in self.aborted or not isinstance(element, Barrier):
            self.finish(n)
            return [*cancelled, (n, None if n in self.aborted else "CANCEL_BARRIER")], None
        self.at[channel] = n
        return cancelled, self.aligned()

    def aligned(self) -> int | None:
        pending = self.pending
        if pending is None or set(self.at) | self.ended != self.channels:
            return None
        self.finish(pending)
        return pending

    def abort(self, n: int) -> list[tuple[int, str | None]]:
        if n != self.pending:
            self.aborted.add(n)
            return []
        self.finish(n)
        return [(n, None)]


def told(outcome: Outcome) -> tuple[list[tuple[int, str | None]], int | None]:
    """An outcome in the model's words."""
    cancelled = [(int(n), None if reason is None else reason.name) for n, reason in outcome.cancelled]
    return cancelled, None if outcome.snapshot is None else int(outcome.snapshot.checkpoint_id)


@given(data=st.data())
@settings(max_examples=100)
def test_aligned_histories_agree_with_the_model(data: st.DataObject) -> None:
    """Whatever comes in whatever order, answers, blocked channels and the pending checkpoint are the model's."""
    queues = draw_queues(data, ",f", lossless=False)
    world, model = World(BarrierAligner(frozenset(queues)), queues), Model(frozenset(queues))
    while moves := ["arrive"] * bool(world.can_arrive()) + ["take"] * bool(world.can_take()):
        if data.draw(st.integers(0, 9)) == 0:
            n = data.draw(st.integers(1, CHECKPOINTS))
            assert (model.abort(n), None) == told(world.handler.abort(CheckpointId(n)))
        if data.draw(st.sampled_from(moves)) == "arrive":
            assert Outcome() == world.arrive(data.draw(st.sampled_from(world.can_arrive())))
        elif takes := world.can_take():
            channel = data.draw(st.sampled_from(takes))
            element = queues[channel][world.taken[channel]]
            assert model.take(channel, element) == told(world.take(channel))
        assert model.pending == world.handler.pending
        assert [c in model.at for c in queues] == [world.handler.blocks(c) for c in queues]
