"""What a job waits for whose processes have no place: in words, and until it has taken too long. Without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray_fakes import LaterMailbox
from waiting import received

from tidegate.actors.ray import resource_waits as room_module
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import JobSlots
from tidegate.actors.ray.reservation import NodeRoom
from tidegate.actors.ray.resource_waits import LOOK_EVERY_MS, RoomWatch, look_at, what_is_missing

WAIT_MS_MAX = 60_000


def group(*nodes: str, state: str = "RESCHEDULING", cpus: float = 1.0) -> dict[str, Any]:
    """As Ray describes a placement group."""
    return {
        "state": state,
        "bundles": {index: {"CPU": cpus} for index in range(len(nodes))},
        "bundles_to_node_id": dict(enumerate(nodes)),
    }


NODES = [NodeRoom("north", {"CPU": 1.5}, {"CPU": 4.0})]


def test_slots_that_all_have_a_node_wait_for_nothing() -> None:
    """Processes in them are only slow to start."""
    assert what_is_missing(group("a", "b", state="CREATED"), {}, NODES) is None


def test_what_is_missing_says_how_many_of_which_kind() -> None:
    """So that whoever reads it knows how large a node to add."""
    assert what_is_missing(group("", "b", "", cpus=2), {}, NODES) == (
        "2 bundles of 2 CPU for the common slots have no node. 4 CPU needed, and 1.5 CPU free of 4 CPU. Free on the "
        "nodes that live (1): north: 1.5 of 4 CPU"
    )
    missing = what_is_missing(group("a", "", cpus=2), {1: "score"}, NODES)
    assert missing is not None
    assert missing.startswith("1 bundle of 2 CPU for score has no node.")


def test_slots_that_were_removed_are_not_waited_for_in_silence() -> None:
    """They belong to a session, which may have ended."""
    assert what_is_missing(group("", state="REMOVED"), {}, NODES) == (
        "its placement group was removed, with the session or the driver that it belonged to"
    )


def test_a_job_that_waits_for_slots_of_several_kinds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step with resources lie in a group of their own."""
    tables = {"common": group("a", ""), "own": group("", cpus=8)}
    monkeypatch.setattr(room_module, "_table", tables.__getitem__)
    monkeypatch.setattr(room_module, "nodes_that_live", lambda: NODES)
    slots = SimpleNamespace(groups=[("common", {}), ("own", {0: "score"})])
    missing = look_at(cast(JobSlots, slots))
    assert missing is not None
    common, own = missing.split("; ")
    assert common.startswith("1 bundle of 1 CPU for the common slots has no node.")
    assert own.startswith("1 bundle of 8 CPU for score has no node. No node has 8 CPU, not even when it is empty.")
    tables |= {"common": group("a"), "own": group("a")}
    assert look_at(cast(JobSlots, slots)) is None


class AnswersLater(LaterMailbox):
    """A mailbox whose answers are handled on the thread of the test, as on the loop of a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def post(self, action: Callable[[], object]) -> None:
        self.answers.put(action)


class Waiting:
    """A job that waits for room, by a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mailbox = AnswersLater()
        self.now_ms = 0
        self.missing: str | None = "a slot"
        self.starting = ["job/rows (1/1)#0"]
        self.gave_up: list[str] = []
        monkeypatch.setattr(room_module, "monotonic_ms", lambda: self.now_ms)
        self.room = RoomWatch(
            cast(Mailbox, self.mailbox), lambda: self.missing, lambda: self.starting, self.gave_up.append, WAIT_MS_MAX
        )

    def look(self) -> None:
        """The next look, and its answer."""
        self.mailbox.pass_time()
        if self.starting:
            received("a look", self.mailbox.answers)()
        self.now_ms += LOOK_EVERY_MS


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    """Closed at the end."""
    made = Waiting(monkeypatch)
    made.room.watch()
    yield made
    made.room.close()


def test_a_wait_says_for_what_and_for_how_long(waiting: Waiting) -> None:
    """As soon as it is known, until everything has started."""
    waiting.look()
    waiting.look()
    assert waiting.room.waits_for == "room for job/rows (1/1)#0 (for 5 s so far): a slot"
    waiting.starting = []
    waiting.look()
    assert waiting.room.waits_for is None
    assert waiting.mailbox.later == []


def test_a_wait_that_is_too_long_fails_and_begins_anew(waiting: Waiting) -> None:
    """The failure says all that is known; the restart strategy decides what follows."""
    for _ in range(WAIT_MS_MAX // LOOK_EVERY_MS):
        waiting.look()
    assert waiting.gave_up == []
    waiting.look()
    (text,) = waiting.gave_up
    assert text.startswith("the cluster had no room for its process for 60 s: a slot. Add nodes")
    waiting.look()
    assert len(waiting.gave_up) == 1


def test_processes_that_are_slow_to_start_wait_for_nothing(waiting: Waiting) -> None:
    """Time in which there was room does not count."""
    waiting.look()
    waiting.missing = None
    waiting.look()
    assert waiting.room.waits_for is None
    waiting.missing = "a slot"
    waiting.look()
    assert waiting.room.waits_for == "room for job/rows (1/1)#0 (for 0 s so far): a slot"


def test_ray_that_does_not_answer_ends_no_wait(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again."""

    def broken() -> str | None:
        raise ConnectionError("no GCS")

    look: Callable[[], str | None] = waiting.room._look
    monkeypatch.setattr(waiting.room, "_look", broken)
    waiting.look()
    monkeypatch.setattr(waiting.room, "_look", look)
    waiting.look()
    assert waiting.room.waits_for == "room for job/rows (1/1)#0 (for 0 s so far): a slot"
