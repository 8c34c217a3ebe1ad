"""Processes that get no task any more: nobody ends them before the event log says so. Without Ray."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest
from ray_fakes import SINK, SOURCE, LaterMailbox, Method, source_to_sink

from tidegate.actors.hosts.heartbeat_settings import HeartbeatSettings
from tidegate.actors.runtimes.ray.fleet import given_up, heartbeats
from tidegate.actors.runtimes.ray.fleet.fleet import Fleet
from tidegate.actors.runtimes.ray.fleet.given_up import GivenUp
from tidegate.actors.runtimes.ray.fleet.heartbeats import Heartbeats
from tidegate.actors.runtimes.ray.fleet.member import Member
from tidegate.actors.runtimes.ray.fleet_options import FleetOptions
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.storage.files.file_system_store import open_store

SETTINGS = HeartbeatSettings(interval_ms=1_000, timeout_ms=3_000)


class Handle:
    """A process that says nothing by itself."""

    def __init__(self) -> None:
        self.pulse, self.kill_beside, self.look_beside = Method(), Method(), Method()


class Beside(Fleet):
    """Two processes on one node, without the coordinator; who is ended is noted."""

    ended: list[str]

    def kill(self, member: Member) -> None:
        member.dead = True
        self.ended.append(member.name)


def fleet() -> Beside:
    """The processes of a source and of a sink."""
    _, graph = source_to_sink()
    options = FleetOptions("job", "namespace", None, 0, 0, open_store)
    made = Beside(graph, None, None, options, lambda action: action(), "here")
    made.ended = []
    for task, name in ((SOURCE, "source"), (SINK, "sink")):
        made.members[task] = Member(name, Handle(), None, Future(), ProcessInfo(7, "there", actor_id=f"id of {name}"))
    return made


def test_a_process_is_ended_when_the_log_says_that_it_was_given_up() -> None:
    """By Ray, and by a process beside it: one that is stopped does not hear Ray. It gets no task meanwhile."""
    processes, told = fleet(), []
    given = GivenUp(processes, told.append)
    sink, source = processes.members[SINK], processes.members[SOURCE]
    for _ in range(2):
        given.give_up(sink, "sink hangs")
    assert [(event.process, event.reason) for event in told] == [("id of sink", "sink hangs")]
    assert (sink.usable, processes.ended, source.handle.kill_beside.calls.qsize()) == (False, [], 0)
    given.kill("id of sink")
    assert (processes.ended, source.handle.kill_beside.calls.get_nowait()[1]) == (["sink"], (sink.info,))
    given.kill("id of sink")
    given.kill("what a predecessor has given up")
    assert processes.ended == ["sink"]


def test_a_process_on_the_node_of_the_coordinator_is_ended_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else need be there."""
    processes, ended = fleet(), []
    monkeypatch.setattr(given_up, "kill_process", lambda pid, descriptor: ended.append(pid))
    processes.node_id = "there"
    given = GivenUp(processes, lambda event: None)
    given.give_up(processes.members[SINK], "sink hangs")
    assert ended == []
    given.kill("id of sink")
    assert (ended, processes.members[SOURCE].handle.kill_beside.calls.qsize()) == ([7], 0)


def test_one_that_has_not_started_is_called_by_its_name() -> None:
    """It has not said yet what no other process is called."""
    processes, told = fleet(), []
    processes.members[SINK].info = None
    given = GivenUp(processes, told.append)
    given.give_up(processes.members[SINK], "sink hangs")
    given.kill("sink")
    assert ([event.process for event in told], processes.ended) == (["sink"], ["sink"])


def test_a_coordinator_that_hears_nobody_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all of them for hung, and says so: the failure of each task first. Who wrote the log decides."""
    processes, mailbox = fleet(), LaterMailbox()
    told: list[tuple[str, str]] = []
    silent: list[tuple[str, list[int]]] = []
    clock = iter(range(0, 1_000_000, SETTINGS.tick_ms))
    monkeypatch.setattr(heartbeats, "monotonic_ms", lambda: next(clock))
    beats = Heartbeats(
        SETTINGS,
        processes,
        cast(Mailbox, mailbox),
        lambda member: lambda text: told.append(("failed", member.name)),
        lambda member, why: told.append(("given up", member.name)),
        lambda node, others_ms: silent.append((node, list(others_ms))),
    )
    beats.start()
    for _ in range(100):
        mailbox.pass_time()
    assert [what for what, _ in told] == ["failed", "given up"] * 2
    assert [who for _, who in told[::2]] == [who for _, who in told[1::2]]
    assert {who for _, who in told} == {"source", "sink"}
    assert not any(member.usable for member in processes.members.values())
    assert processes.ended == []
    assert silent == [("there", [SETTINGS.timeout_ms]), ("there", [])]
