"""What a job waits for whose processes have no place: in words, and until it has taken too long. Without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from ray_fakes import LaterMailbox
from waiting import until

from tidegate.actors.runtimes.ray.fleet import room as room_module
from tidegate.actors.runtimes.ray.fleet.room import LOOK_EVERY_MS, Room, what_is_missing
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox

WAIT_MS_MAX = 60_000


def group(*nodes: str, state: str = "RESCHEDULING", cpus: float = 1.0) -> dict[str, Any]:
    """As Ray describes a placement group."""
    return {
        "state": state,
        "bundles": {index: {"CPU": cpus} for index in range(len(nodes))},
        "bundles_to_node_id": dict(enumerate(nodes)),
    }


def test_slots_that_all_have_a_node_wait_for_nothing() -> None:
    """Processes in them are only slow to start."""
    assert what_is_missing(group("a", "b", state="CREATED"), 2, {}) is None


def test_what_is_missing_names_bundles_what_they_need_and_what_is_free() -> None:
    """So that whoever reads it knows how large a node to add."""
    one = what_is_missing(group("", "b"), 1, {"memory": 1e9})
    assert one == "1 of its 2 slots has no node (bundle 0: 1 CPU); free on the nodes that live (1): 0 CPU"
    two = what_is_missing(group("", "b", "", cpus=2), 3, {"CPU": 1.5})
    assert two == "2 of its 3 slots have no node (bundle 0, 2: 2 CPU each); free on the nodes that live (3): 1.5 CPU"


def test_slots_that_were_removed_are_not_waited_for_in_silence() -> None:
    """They belong to a session, which may have ended."""
    assert what_is_missing(group("", state="REMOVED"), 1, {}) == (
        "its placement group was removed, with the session or the driver that it belonged to"
    )


class Waiting:
    """A job that waits for room, by a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mailbox = LaterMailbox()
        self.now_ms = 0
        self.missing: str | None = "a slot"
        self.starting = ["job/rows (1/1)#0"]
        self.gave_up: list[str] = []
        self.looks = 0
        monkeypatch.setattr(room_module, "monotonic_ms", lambda: self.now_ms)
        self.room = Room(
            cast(Mailbox, self.mailbox), self._look, lambda: self.starting, self.gave_up.append, WAIT_MS_MAX
        )

    def _look(self) -> str | None:
        self.looks += 1
        return self.missing

    def look(self) -> None:
        """The next look, and its answer."""
        looks = self.looks
        self.mailbox.pass_time()
        if self.starting:
            until("a look", lambda: self.looks > looks and self.mailbox.later)
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
    assert waiting.room.waits_for == "room since 5 s, for job/rows (1/1)#0: a slot"
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
    assert waiting.room.waits_for == "room since 0 s, for job/rows (1/1)#0: a slot"


def test_ray_that_does_not_answer_ends_no_wait(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again."""

    def broken() -> str | None:
        waiting.looks += 1
        raise ConnectionError("no GCS")

    look: Callable[[], str | None] = waiting.room._look
    monkeypatch.setattr(waiting.room, "_look", broken)
    waiting.look()
    monkeypatch.setattr(waiting.room, "_look", look)
    waiting.look()
    assert waiting.room.waits_for == "room since 0 s, for job/rows (1/1)#0: a slot"
