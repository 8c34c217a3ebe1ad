"""Processes that get no task any more: nobody ends them before the event log says so. Without Ray."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import cast

import pytest
from ray_fakes import SINK, SINK_WORKER, SOURCE_WORKER, LaterMailbox, Method, source_to_sink

from tidegate.actors.drivers.job_context import HeartbeatSettings
from tidegate.actors.ray import attempt_supervisor as given_up
from tidegate.actors.ray import heartbeats
from tidegate.actors.ray.attempt_supervisor import Evictions
from tidegate.actors.ray.health_endpoint import ProcessInfo, Pulse
from tidegate.actors.ray.heartbeats import Heartbeats
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import PoolOptions
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.storage.files.file_system_store import open_store

SETTINGS = HeartbeatSettings(interval_ms=1_000, timeout_ms=3_000)


class Handle:
    """A process that says nothing by itself."""

    def __init__(self) -> None:
        self.pulse, self.kill_peer, self.peer_stack = Method(), Method(), Method()


class Beside(WorkerPool):
    """Two processes on one node, without the coordinator; who is ended is noted."""

    ended: list[str]

    def kill(self, member: WorkerHandle) -> None:
        member.dead = True
        self.ended.append(member.name)


def fleet() -> Beside:
    """The processes of a source and of a sink."""
    _, graph = source_to_sink()
    options = PoolOptions("job", "namespace", None, 0, 0, open_store)
    made = Beside(graph, None, None, options, lambda action: action(), "here")
    made.ended = []
    for worker, name in ((SOURCE_WORKER, "source"), (SINK_WORKER, "sink")):
        made.members[worker] = WorkerHandle(
            name, Handle(), None, Future(), ProcessInfo(7, "there", actor_id=f"id of {name}")
        )
    return made


def test_a_process_is_ended_when_the_log_says_that_it_was_given_up() -> None:
    """By Ray, and by a process beside it: one that is stopped does not hear Ray. It gets no task meanwhile."""
    processes, told = fleet(), []
    given = Evictions(processes, told.append)
    sink, source = processes.members[SINK_WORKER], processes.members[SOURCE_WORKER]
    for _ in range(2):
        given.evict(sink, "sink hangs")
    assert [(event.process, event.reason) for event in told] == [("id of sink", "sink hangs")]
    assert (sink.usable, processes.ended, source.handle.kill_peer.calls.qsize()) == (False, [], 0)
    given.kill("id of sink")
    assert (processes.ended, source.handle.kill_peer.calls.get_nowait()[1]) == (["sink"], (sink.info,))
    given.kill("id of sink")
    given.kill("what a predecessor has given up")
    assert processes.ended == ["sink"]


def test_a_process_on_the_node_of_the_coordinator_is_ended_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else need be there."""
    processes, ended = fleet(), []
    monkeypatch.setattr(given_up, "kill_process", lambda pid, descriptor: ended.append(pid))
    processes.node_id = "there"
    given = Evictions(processes, lambda event: None)
    given.evict(processes.members[SINK_WORKER], "sink hangs")
    assert ended == []
    given.kill("id of sink")
    assert (ended, processes.members[SOURCE_WORKER].handle.kill_peer.calls.qsize()) == ([7], 0)


def test_one_that_has_not_started_is_called_by_its_name() -> None:
    """It has not said yet what no other process is called."""
    processes, told = fleet(), []
    processes.members[SINK_WORKER].info = None
    given = Evictions(processes, told.append)
    given.evict(processes.members[SINK_WORKER], "sink hangs")
    given.kill("sink")
    assert ([event.process for event in told], processes.ended) == (["sink"], ["sink"])


class Beats:
    """The heartbeats of the two processes, with the calls that they make, and what they tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes, self.mailbox = fleet(), LaterMailbox()
        self.told: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.silent: list[tuple[str, list[int]]] = []
        self.pulse = Pulse()
        clock = iter(range(0, 1_000_000, SETTINGS.tick_ms))
        monkeypatch.setattr(heartbeats, "monotonic_ms", lambda: next(clock))
        Heartbeats(
            SETTINGS,
            self.processes,
            cast(Mailbox, self.mailbox),
            lambda member: partial(self.failed, member),
            self.evict,
            lambda node, others_ms: self.silent.append((node, list(others_ms))),
        ).start()

    def failed(self, member: WorkerHandle, text: str) -> None:
        self.told.append(("failed", member.name))
        self.texts.append(text)

    def evict(self, member: WorkerHandle, why: str) -> None:
        member.evicted = True
        self.told.append(("given up", member.name))

    def run(self, ticks: int, *answering: str) -> None:
        """So many ticks, in which these answer, also what they were asked before."""
        for _ in range(ticks):
            for member in self.processes.members.values():
                while member.name in answering and not member.handle.pulse.calls.empty():
                    member.handle.pulse.calls.get()[0].set_result(self.pulse)
            self.mailbox.pass_time()


def test_a_coordinator_that_hears_nobody_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all of them for hung, and says so: the failure of each task first. Who wrote the log decides."""
    beats = Beats(monkeypatch)
    beats.run(100)
    told = beats.told
    assert [what for what, _ in told] == ["failed", "given up"] * 2
    assert [who for _, who in told[::2]] == [who for _, who in told[1::2]]
    assert {who for _, who in told} == {"source", "sink"}
    assert not any(member.usable for member in beats.processes.members.values())
    assert beats.processes.ended == []
    assert beats.silent == [("there", [SETTINGS.timeout_ms])] * 2


def test_a_process_that_answers_after_all_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was heard for longer than the timeout. Meanwhile they get no task; with the first answers all is well."""
    beats = Beats(monkeypatch)
    members = beats.processes.members.values()
    beats.run(10, "source", "sink")
    assert all(member.fit for member in members)
    beats.run(SETTINGS.timeout_ms // SETTINGS.tick_ms + 3)
    assert all(member.usable and not member.fit for member in members)
    beats.run(100, "source", "sink")
    assert beats.told == []
    assert all(member.fit for member in members)


def test_it_is_noted_which_subtask_of_a_process_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of its last answer: it is what hangs, if the process does."""
    beats = Beats(monkeypatch)
    source, sink = (beats.processes.members[worker] for worker in (SOURCE_WORKER, SINK_WORKER))
    beats.pulse = Pulse(1, None, SINK)
    beats.run(10, "sink")
    assert (source.acting, sink.acting) == (None, SINK)
    beats.run(100)
    assert ("failed", "sink") in beats.told
    assert sink.acting == SINK


def test_the_failure_says_what_was_seen_before_the_last_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process beside it looks, which answers itself."""
    beats = Beats(monkeypatch)
    beats.run(10, "source", "sink")
    source, sink = (beats.processes.members[task] for task in (SOURCE_WORKER, SINK_WORKER))
    while not sink.doubted:
        beats.run(1, "source")
    call, arguments = source.handle.peer_stack.calls.get_nowait()
    assert arguments == (sink.info,)
    call.set_result("it is stopped")
    beats.run(100, "source")
    assert beats.told == [("failed", "sink"), ("given up", "sink")]
    assert beats.texts[0].endswith("(heartbeat.timeout); it is stopped")
    assert source.fit


def test_one_that_answers_looks_at_another_if_there_is_one() -> None:
    """One in doubt may be unable to."""
    processes = fleet()
    source, sink = (processes.members[task] for task in (SOURCE_WORKER, SINK_WORKER))
    source.doubted = True
    assert processes.neighbour_of(sink) is source
    processes.standbys.append(WorkerHandle("spare", Handle(), None, Future(), ProcessInfo(8, "there")))
    assert processes.neighbour_of(sink) is processes.standbys[0]


def test_one_whose_task_went_elsewhere_while_it_was_in_doubt_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would end it: it may be stopped."""
    beats = Beats(monkeypatch)
    sink = beats.processes.members[SINK_WORKER]
    beats.run(10, "source", "sink")
    while not sink.doubted:
        beats.run(1, "source")
    assert beats.processes.is_lost(SINK_WORKER, ())
    del beats.processes.members[SINK_WORKER]
    beats.run(2, "source")
    assert beats.told == [("given up", "sink")]
