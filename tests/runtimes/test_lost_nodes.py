"""Nodes that may be lost: who is asked, for how long, and what waits for the answer. Without Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.placement_group import PlacementGroup
from ray_fakes import (
    SINK,
    SINK_WORKER,
    SOURCE,
    SOURCE_WORKER,
    LaterMailbox,
    Method,
    Reference,
    source_to_sink,
)

from tidegate.actors.ray import lost_nodes
from tidegate.actors.ray import lost_nodes as reconnections
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.lost_nodes import (
    ASKED_MS_MAX,
    BREAKS_MAX,
    FAILURES_MAX,
    SUSPECT_MS_MAX,
    LostNodes,
    Reconnections,
    SuspectNodes,
)
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import PoolOptions, Slot, SlotPlacement
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.file_system_store import open_store

TIMEOUT_MS = 10_000
AWAY, DEAD = ActorUnavailableError("Connection reset by peer", None), ActorDiedError()


class Handle:
    """A process that is asked for a sign of life."""

    def __init__(self) -> None:
        self.pulse, self.identify, self.live = Method(), Method(), Method()

    def answer(self, error: BaseException | None) -> None:
        """To the oldest question."""
        call, _ = self.pulse.calls.get_nowait()
        call.set_result(None) if error is None else call.set_exception(error)


def process(name: str, node: str | None) -> WorkerHandle:
    """One that has started on a node, or has not started."""
    return WorkerHandle(name, Handle(), None, Future(), None if node is None else ProcessInfo(1, node))


class Watched:
    """What is known of nodes, and what follows from calls that broke."""

    def __init__(self) -> None:
        self.mailbox = LaterMailbox()
        self.evicted: list[WorkerHandle] = []
        self.settled = 0
        self.kept = True
        self.heard: list[tuple[str, str]] = []
        suspects, again = SuspectNodes("here", TIMEOUT_MS), Reconnections(TIMEOUT_MS)
        told = self._give_up, self._count, suspects, again, lambda _: self.kept
        self.nodes = LostNodes(cast(Mailbox, self.mailbox), *told, self._probe)
        self.probed: list[tuple[str, Reference]] = []

    def break_call(self, member: WorkerHandle, error: BaseException = AWAY) -> bool:
        """A call to a process breaks."""

        def dead(error: BaseException) -> None:
            assert member.dead
            self.heard.append((member.name, type(error).__name__))

        return self.nodes.broke(member, error, dead, lambda: self.heard.append((member.name, "again")))

    def lose(self, member: WorkerHandle) -> None:
        """A call to a process breaks, and it cannot be asked."""
        self.break_call(member)
        for _ in range(FAILURES_MAX):
            member.handle.answer(AWAY)
            self.mailbox.pass_time()

    def _probe(self, node: str) -> Future[None]:
        self.probed.append((node, Reference()))
        return self.probed[-1][1].future()

    def _give_up(self, member: WorkerHandle, why: str) -> None:
        self.evicted.append(member)

    def _count(self) -> None:
        self.settled += 1


def test_a_process_that_answers_goes_on() -> None:
    """A link was cut: each call that broke is made again, and nothing else happens. Until then it gets no task."""
    watched, one = Watched(), process("a", "north")
    for _ in range(2):
        assert watched.break_call(one)
    assert one.handle.pulse.calls.qsize() == 1, "it is asked once, however many calls broke"
    assert (one.fit, one.usable, watched.nodes.doubtful) == (False, True, {"north"})
    one.handle.answer(AWAY)
    watched.mailbox.pass_time()
    one.handle.answer(None)
    assert (watched.heard, watched.evicted, watched.settled) == ([("a", "again")] * 2, [], 1)
    assert (one.fit, watched.nodes.doubtful) == (True, frozenset())


def test_a_process_that_has_not_started_is_asked_too() -> None:
    """Nobody knows where it would be: then that is all."""
    for answer, heard in ((None, "again"), (DEAD, "ActorDiedError"), (AWAY, "ActorUnavailableError")):
        watched, one = Watched(), process("a", None)
        watched.break_call(one)
        for _ in range(FAILURES_MAX if answer is AWAY else 1):
            one.handle.answer(answer)
            watched.mailbox.pass_time()
        assert (watched.heard, watched.settled, watched.nodes.doubtful) == ([("a", heard)], 1, frozenset())
        assert one.handle.pulse.calls.empty()


def test_a_node_is_in_doubt_until_ray_says_that_a_process_there_is_dead() -> None:
    """A connection that broke says nothing of why; Ray is asked until it knows. Who waits for the process does not."""
    watched, one = Watched(), process("a", "north")
    watched.break_call(one)
    for number in range(1, FAILURES_MAX + 3):
        assert watched.nodes.doubtful == {"north"}
        one.handle.answer(AWAY)
        assert one.dead == (number >= FAILURES_MAX)
        watched.mailbox.pass_time()
    assert watched.heard == [("a", "ActorUnavailableError")]
    watched.break_call(one)
    assert watched.heard == [("a", "ActorUnavailableError")] * 2, "what breaks later has the same end"
    one.handle.answer(DEAD)
    assert (watched.nodes.doubtful, watched.settled, watched.evicted) == (frozenset(), 1, [])


def test_what_ray_says_of_an_end_is_told() -> None:
    """With its node, say: whoever counts lost nodes has to hear it."""
    watched, one = Watched(), process("a", "north")
    watched.break_call(one)
    one.handle.answer(DEAD)
    assert (watched.heard, watched.settled) == ([("a", "ActorDiedError")], 1)


def test_a_process_that_has_died_on_a_node_that_lives_raises_no_doubt() -> None:
    """Its raylet has seen it. Nor does a call that came back."""
    watched, one = Watched(), process("a", "north")
    assert not watched.break_call(one, DEAD)
    assert not watched.nodes.broke(one, None, lambda _: None, lambda: None)
    assert (watched.nodes.doubtful, one.fit, watched.heard) == (frozenset(), True, [])


def test_all_doubts_have_to_be_settled() -> None:
    """One node may be lost, and another one not."""
    watched, one, other = Watched(), process("a", "north"), process("b", "north")
    for member in (one, other):
        watched.break_call(member)
    one.handle.answer(DEAD)
    assert (watched.nodes.doubtful, watched.settled) == ({"north"}, 0)
    other.handle.answer(None)
    assert (watched.nodes.doubtful, watched.settled) == (frozenset(), 1)


def test_a_process_that_answers_too_late_is_given_up() -> None:
    """Its task has been given to another one; it would keep its place for ever."""
    watched, one = Watched(), process("a", "north")
    watched.lose(one)
    one.handle.answer(None)
    assert (watched.evicted, watched.settled) == ([one], 1)


def test_a_process_whose_place_was_taken_meanwhile_is_given_up() -> None:
    """Another task has failed, and it got none. One that was given up already is left alone."""
    for kept, hangs, evicted in ((False, False, 1), (False, True, 0), (True, True, 0)):
        watched, one = Watched(), process("a", "north")
        watched.break_call(one)
        watched.kept, one.evicted = kept, hangs
        one.handle.answer(None)
        assert (len(watched.evicted), watched.heard, watched.settled) == (evicted, [], 1)


def test_nobody_waits_for_an_answer_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question may be on its way for as long as it likes. Its answer is late then."""
    watched, one, now_ms = Watched(), process("a", "north"), [0]
    monkeypatch.setattr(lost_nodes, "monotonic_ms", lambda: now_ms[0])
    watched.break_call(one)
    now_ms[0] = TIMEOUT_MS
    watched.mailbox.pass_time()
    assert (watched.heard, one.dead) == ([("a", "ActorUnavailableError")], True)
    one.handle.answer(None)
    assert watched.evicted == [one]


def test_a_call_that_breaks_just_before_the_answer_cuts_off_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard of after the answer to the question about another call: the process is asked again."""
    watched, one = Watched(), process("a", "north")
    watched.break_call(one)
    posted: list[Callable[[], object]] = []
    with monkeypatch.context() as patch:
        patch.setattr(watched.mailbox, "post", posted.append)
        watched.break_call(one)
    one.handle.answer(None)
    posted[0]()
    assert (one.fit, watched.nodes.doubtful) == (False, {"north"})
    one.handle.answer(None)
    assert one.fit


def test_no_node_is_in_doubt_for_ever_because_of_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may never come back, nor break. Then the node is used again."""
    watched, one, now_ms = Watched(), process("a", "north"), [0]
    monkeypatch.setattr(lost_nodes, "monotonic_ms", lambda: now_ms[0])
    watched.break_call(one)
    for now_ms[0] in range(TIMEOUT_MS, TIMEOUT_MS + ASKED_MS_MAX, TIMEOUT_MS):
        watched.mailbox.pass_time()
        assert (watched.nodes.doubtful, watched.settled) == ({"north"}, 0)
    now_ms[0] = TIMEOUT_MS + ASKED_MS_MAX
    watched.mailbox.pass_time()
    assert (watched.nodes.doubtful, watched.settled, watched.mailbox.later) == (frozenset(), 1, [])


def test_the_time_of_an_earlier_break_is_not_that_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was there again in between."""
    watched, one, now_ms = Watched(), process("a", "north"), [0]
    monkeypatch.setattr(lost_nodes, "monotonic_ms", lambda: now_ms[0])
    watched.break_call(one)
    one.handle.answer(None)
    now_ms[0] = TIMEOUT_MS
    watched.break_call(one)
    watched.mailbox.pass_time()
    assert watched.heard == [("a", "again")]


def test_a_connection_that_breaks_again_and_again_is_given_up() -> None:
    """It would be called again without end."""
    watched, one = Watched(), process("a", "north")
    for _ in range(BREAKS_MAX - 1):
        watched.break_call(one)
        one.handle.answer(None)
    watched.break_call(one)
    assert watched.heard[-2:] == [("a", "again"), ("a", "ActorUnavailableError")]
    one.handle.answer(None)
    assert watched.evicted == [one]


def test_nobody_waits_for_ray_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After many questions the node is used again."""
    monkeypatch.setattr(reconnections, "ASKS_MAX", FAILURES_MAX + 2)
    watched, one = Watched(), process("a", "north")
    watched.lose(one)
    for _ in range(2):
        assert watched.settled == 0
        one.handle.answer(AWAY)
        watched.mailbox.pass_time()
    assert watched.settled == 1


@pytest.mark.parametrize("error", [None, DEAD])
def test_a_node_that_is_suspect_is_in_doubt_until_it_answers_or_ray_gives_it_up(error: Exception | None) -> None:
    """Something small is given to it, once; what becomes of that says which of the two it is."""
    watched = Watched()
    for _ in range(2):
        watched.nodes.silent("north", [TIMEOUT_MS])
    assert (watched.nodes.doubtful, [node for node, _ in watched.probed], watched.settled) == ({"north"}, ["north"], 0)
    call = watched.probed[0][1].call
    call.set_result(None) if error is None else call.set_exception(error)
    assert (watched.nodes.doubtful, watched.settled) == (frozenset(), 1)


def test_nobody_suspects_a_node_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while it is used again, whatever it says later."""
    watched, now_ms = Watched(), [0]
    monkeypatch.setattr(lost_nodes, "monotonic_ms", lambda: now_ms[0])
    watched.nodes.silent("north", [])
    now_ms[0] = SUSPECT_MS_MAX
    watched.mailbox.pass_time()
    assert (watched.nodes.doubtful, watched.settled) == (frozenset(), 1)
    watched.probed[0][1].call.set_result(None)
    assert watched.settled == 1


class SomeFleet(WorkerPool):
    """A fleet whose new processes are only noted."""

    made: list[str]

    def _create(
        self, name: str, slot: Slot, shown_as: str, spare: bool = False, avoided: Collection[str] = ()
    ) -> WorkerHandle:
        self.made.append(name)
        return process(f"{name}#new", None)


SLOT = SlotPlacement(cast(PlacementGroup, None), (0,))


def fleet(sink_node: str, standbys: Iterable[WorkerHandle], placement: SlotPlacement | None = SLOT) -> SomeFleet:
    """A source on node north, a sink somewhere, and spare processes."""
    _, graph = source_to_sink()
    options = PoolOptions("job", "namespace", placement, 0, 1, open_store)
    found = SomeFleet(graph, None, None, options, lambda action: action())
    found.made = []
    found.members = {SOURCE_WORKER: process("source", "north"), SINK_WORKER: process("sink", sink_node)}
    found.standbys = list(standbys)
    return found


BOTH: tuple[TaskId, ...] = (SOURCE, SINK)


def test_spare_processes_elsewhere_take_over_from_a_node_in_doubt() -> None:
    """At once, also from processes there whose end is not known yet; nothing new is started."""
    spare = process("spare", "south")
    some = fleet("south", [process("near", "north"), spare])
    assert not some.lacks(BOTH, frozenset({"north"}))
    assert some.staff(BOTH, frozenset({"north"})) == {SOURCE: spare, SINK: some.members[SINK_WORKER]}
    assert some.made == []


@pytest.mark.parametrize(
    ("sink_node", "standbys", "lacks"),
    [
        ("south", [], True),
        ("south", [("spare", "north")], True),
        ("south", [("spare", None)], True),
        ("south", [("spare", "south")], False),
        ("north", [("spare", "south")], True),
    ],
)
def test_an_attempt_waits_where_spare_processes_do_not_suffice(
    sink_node: str, standbys: list[tuple[str, str | None]], lacks: bool
) -> None:
    """Those on the node in doubt, and those that have not started, are none."""
    some = fleet(sink_node, [process(name, node) for name, node in standbys])
    assert some.lacks(BOTH, frozenset({"north"})) is lacks
    some.members[SINK_WORKER].dead = True
    assert not some.lacks(BOTH, frozenset())


def test_an_attempt_does_not_wait_where_nothing_is_reserved() -> None:
    """New processes start on another node."""
    some = fleet("south", [], placement=None)
    assert not some.lacks(BOTH, frozenset({"north"}))


def test_a_spare_process_that_goes_with_its_node_is_no_failure_of_spare_processes() -> None:
    """They would not be started any more after three of them."""
    for error, made in ((AWAY, 5), (DEAD, 2)):
        some = fleet("south", [])
        some.refill()
        for _ in range(4):
            if some.standbys:
                some.lost(some.standbys[0], error)
        assert len(some.made) == made + (error is DEAD)


def test_a_process_is_asked_again_who_it_is_when_its_connection_broke() -> None:
    """One that nobody knows where it runs would count as starting for ever."""
    watched, some = Watched(), fleet("south", [])
    some.broke, one = watched.nodes.broke, process("spare", None)
    some.standbys.append(one)
    some.identify(one)
    one.handle.identify.calls.get_nowait()[0].set_exception(AWAY)
    assert one.handle.identify.calls.empty()
    one.handle.answer(None)
    one.handle.identify.calls.get_nowait()[0].set_result(ProcessInfo(1, "south"))
    assert (some.ready_standbys, some.starting_standbys) == (1, 0)
