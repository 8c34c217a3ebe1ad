"""Copies of a detached job's program: where they are made and moved, and what is said when none is left."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tidegate.actors.ray import detached as held_program
from tidegate.actors.ray.detached import (
    End,
    Make,
    ProgramKeeper,
    holders_of,
    next_step,
    read_program,
)
from tidegate.storage.errors import JobFailedError
from tidegate.storage.ids import JobId

JOB = JobId("delays-1")
FIRST, SECOND = holders_of(JOB)


@pytest.mark.parametrize(
    ("places", "nodes", "step"),
    [
        ({FIRST: None, SECOND: None}, ["a"], Make(FIRST, "a")),
        ({FIRST: "a", SECOND: None}, ["a"], Make(SECOND, None)),
        ({FIRST: "a", SECOND: None}, ["a", "b"], Make(SECOND, "b")),
        ({FIRST: None, SECOND: "a"}, ["b", "a"], Make(FIRST, "b")),
        ({FIRST: "a", SECOND: "a"}, ["a"], None),
        ({FIRST: "a", SECOND: "a"}, ["a", "b"], End(SECOND)),
        ({FIRST: "b", SECOND: "a"}, ["a", "b"], None),
    ],
)
def test_two_nodes_have_a_copy_each_where_there_are_two(
    places: Mapping[str, str | None], nodes: list[str], step: Make | End | None
) -> None:
    """What is missing is made where no copy is; one moves only while the other lives."""
    assert next_step(places, nodes) == step


@pytest.mark.parametrize("lost", ["a", "b"])
def test_any_node_may_go(lost: str) -> None:
    """Step by step, from any loss, both copies are on nodes of their own again, and there always was one."""
    places: dict[str, str | None] = {FIRST: "a", SECOND: "b"}
    nodes = [node for node in ("a", "b", "c") if node != lost]
    places = {name: None if node == lost else node for name, node in places.items()}
    for _ in range(4):
        match next_step(places, nodes):
            case Make(name, node):
                places[name] = node
            case End(name):
                places[name] = None
        assert any(places.values())
    assert set(places.values()) == set(nodes)


class Actors:
    """Named actors: what `node` and `read` answer, or raise."""

    def __init__(self, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = answers
        self.killed: list[str] = []
        monkeypatch.setattr(held_program.ray, "get_actor", self._actor)
        monkeypatch.setattr(held_program.ray, "get", self._get)
        monkeypatch.setattr(held_program.ray, "wait", lambda calls, **_: (calls[:1], calls[1:]))
        monkeypatch.setattr(held_program.ray, "kill", lambda actor, **_: self.killed.append(actor.name))
        monkeypatch.setattr(
            held_program.ray, "nodes", lambda: [{"NodeID": n, "Alive": n != "dead"} for n in self.nodes]
        )
        self.nodes = ["a", "b", "dead"]

    def _actor(self, name: str, namespace: str) -> Any:
        if name not in self.answers:
            raise ValueError(name)
        answer = SimpleNamespace(remote=lambda: self.answers[name])
        return SimpleNamespace(name=name, node=answer, read=answer)

    def _get(self, answer: Any, timeout: float | None = None) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_program_is_read_from_the_copy_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be on a node of which Ray does not know yet that it is lost."""
    Actors({FIRST: ActorUnavailableError("away", None), SECOND: b"program"}, monkeypatch)
    assert read_program(JOB, "tidegate") == b"program"


def test_a_program_that_nobody_holds_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with what to do."""
    Actors({}, monkeypatch)
    with pytest.raises(JobFailedError, match="the nodes of both copies were lost; execute the job again"):
        read_program(JOB, "tidegate")


def test_copies_on_one_node_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one goes; a node that Ray knows to be dead is no place for it."""
    actors = Actors({FIRST: "a", SECOND: "a"}, monkeypatch)
    keeper = ProgramKeeper(JOB, "tidegate", b"program")
    assert keeper.look()
    assert actors.killed == [SECOND]
    actors.nodes = ["a", "dead"]
    assert not keeper.look()


def test_a_copy_of_a_lost_node_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its actor is dead, and where nobody has its name any more."""
    for answers in ({FIRST: "a", SECOND: ActorDiedError()}, {FIRST: "a"}):
        Actors(dict(answers), monkeypatch)
        made: list[tuple[str, str | None]] = []

        def make(self: ProgramKeeper, name: str, node: str | None, made: Any = made) -> Any:
            made.append((name, node))
            return SimpleNamespace(node=SimpleNamespace(remote=lambda: node))

        monkeypatch.setattr(ProgramKeeper, "_make", make)
        assert ProgramKeeper(JOB, "tidegate", b"program").look()
        assert made == [(SECOND, "b")]
