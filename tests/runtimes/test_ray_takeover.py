"""What outlives a coordinator on Ray, without Ray: processes, what they have to say, and whom they obey."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray_fakes import (
    FIRST,
    ROWS,
    SINK,
    SINK_WORKER,
    SOURCE,
    SOURCE_WORKER,
    Method,
    Process,
    source_to_sink,
    task_processes,
)

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.graph.slot_plan import WorkerId, slot_plan
from tidegate.actors.ray import attempt_supervisor
from tidegate.actors.ray import coordinator_liveness as lifeline
from tidegate.actors.ray import discovery as inheritance
from tidegate.actors.ray import worker_actor as ray_worker
from tidegate.actors.ray.actor_calls import WAITING_MAX, Ended, Outbox, Outcome, Report
from tidegate.actors.ray.attempt_supervisor import AttemptSupervisor
from tidegate.actors.ray.coordinator_liveness import CoordinatorLiveness
from tidegate.actors.ray.discovery import FoundProcess, by_worker
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.lost_nodes import FAILURES_MAX
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import JobSlots, PoolOptions
from tidegate.actors.ray.task_deployment import ProcessStatus
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import EndOfData, EndOfPartition
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId

AWAY = ActorUnavailableError("it is restarted", None)
SECOND = AttemptNumber(1)


@dataclass
class Now:
    """A mailbox that does everything at once, and what is due later when the test says so."""

    later: list[Callable[[], object]] = field(default_factory=list)

    def post(self, action: Callable[[], object]) -> None:
        action()

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        self.later.append(action)


def finished(number: int = 0) -> co.TaskFinished:
    """A report."""
    return co.TaskFinished(number, FIRST, SINK)


class Sender:
    """An outbox whose coordinator answers when the test says so."""

    def __init__(self) -> None:
        self.report, self.mailbox = Method(), Now()
        self.outbox = Outbox(self.report.remote, self.mailbox)  # type: ignore[arg-type]

    def send(self, *reports: Report) -> list[Future[None]]:
        """Report these with one message. Each is done when the coordinator has received it."""
        sent = [self.outbox.send(report) for report in reports]
        self.outbox.flush()
        return [each.future() for each in sent]

    def call(self) -> tuple[Future[None], list[Report]]:
        """The next call of the coordinator, and the reports in it."""
        call, (reports,) = self.report.calls.get_nowait()
        return call, list(reports)


def test_a_report_waits_for_a_coordinator_that_is_restarted() -> None:
    """It is sent again until somebody has heard it; whoever waits for that hears nothing before."""
    sender = Sender()
    (heard,) = sender.send(finished())
    for _ in range(3):
        sender.call()[0].set_exception(AWAY)
        assert not heard.done()
        sender.mailbox.later.pop()()
    sender.call()[0].set_result(None)
    assert heard.result(0) is None


def test_reports_of_one_round_go_in_one_message_and_keep_their_order() -> None:
    """Nothing goes before the round is over, and no empty message. What waits is sent again as one message."""
    sender = Sender()
    reports: list[Report] = [finished(1), finished(2), Ended(FIRST, SINK, Outcome("finished")), finished(3)]
    for report in reports:
        sender.outbox.send(report)
    assert sender.report.calls.empty()
    for _ in range(2):
        sender.outbox.flush()
    call, sent = sender.call()
    assert (sent, sender.report.calls.empty()) == (reports, True)
    call.set_exception(AWAY)
    sender.mailbox.later.pop()()
    assert sender.call()[1] == reports


def test_how_far_a_subtask_is_in_event_time_does_not_wait() -> None:
    """It counts as received, and what was in the same message is sent again without it."""
    sender = Sender()
    watermark = co.WatermarkReported(0, FIRST, SINK, 7, False)
    event_time, end = sender.send(watermark, finished())
    sender.call()[0].set_exception(AWAY)
    assert (event_time.result(0), end.done()) == (None, False)
    sender.mailbox.later.pop()()
    assert sender.call()[1] == [finished()]
    sender.send(watermark)
    sender.call()[0].set_exception(AWAY)
    assert sender.mailbox.later == []


@pytest.mark.parametrize("error", [ActorDiedError(), ConnectionError("cut")])
def test_a_report_that_nobody_will_ever_hear_is_lost(error: Exception) -> None:
    """The coordinator is gone for good, or lives behind a connection that broke: that fails the task, as ever."""
    sender = Sender()
    (heard,) = sender.send(finished())
    sender.call()[0].set_exception(error)
    assert heard.exception(0) is error
    assert not sender.mailbox.later


@pytest.mark.slow
def test_what_waits_is_bounded() -> None:
    """Over all messages. What is more than that is lost; what waits is not."""
    sender = Sender()
    waiting = [heard for half in range(2) for heard in sender.send(*map(finished, range(WAITING_MAX // 2)))]
    for _ in range(2):
        sender.call()[0].set_exception(AWAY)
    (late,) = sender.send(finished())
    sender.call()[0].set_exception(AWAY)
    assert late.exception(0) is AWAY
    assert not any(heard.done() for heard in waiting)
    sender.mailbox.later.pop(0)()
    sender.call()[0].set_result(None)
    assert sum(heard.done() for heard in waiting) == WAITING_MAX // 2


@pytest.mark.parametrize("error", [AWAY, ConnectionError("cut")])
def test_an_end_is_reported_until_it_is_received(error: Exception) -> None:
    """However much waits, and whatever stands against it: nobody else would report it."""
    sender = Sender()
    sender.send(*map(finished, range(WAITING_MAX)))
    (heard,) = sender.send(Ended(FIRST, SINK, Outcome("failed", "boom")))
    sender.call()[0].set_exception(AWAY)
    for _ in range(3):
        sender.call()[0].set_exception(error)
        assert not heard.done()
        (again,) = sender.mailbox.later
        sender.mailbox.later.clear()
        again()
    sender.call()[0].set_result(None)
    assert heard.result(0) is None


def test_a_process_ends_when_its_coordinator_is_gone_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is restarted, and not at the first word of its death."""
    timers: list[Callable[[], None]] = []

    class Timer:
        daemon = False

        def __init__(self, delay_s: float, action: Callable[[], None]) -> None:
            self.action = action

        def start(self) -> None:
            timers.append(self.action)

    monkeypatch.setattr(lifeline.threading, "Timer", Timer)
    live, left = Method(), []
    CoordinatorLiveness(live.remote, lambda: left.append("left")).hold()
    for error in (AWAY, ActorDiedError(), AWAY, ActorDiedError(), ActorDiedError()):
        assert not left
        live.calls.get_nowait()[0].set_exception(error)
        while timers:
            timers.pop()()
    assert left == ["left"]
    assert live.calls.empty()


def found(name: str, *tasks: TaskId, attempt: int = 0, actor_id: str = "") -> FoundProcess:
    """A process that a coordinator has left."""
    info = ProcessInfo(1, "node", actor_id=actor_id)
    return FoundProcess(
        name, None, ProcessStatus(JobId("job-12345678"), info, dict.fromkeys(tasks, AttemptNumber(attempt)))
    )


def workers(slot_sharing: bool = False) -> Mapping[TaskId, WorkerId]:
    """The worker of each subtask."""
    graph = source_to_sink(slot_sharing=slot_sharing)[1]
    return slot_plan(graph, {vertex.vertex: vertex.name for vertex in graph.vertices}).workers


def test_of_two_processes_of_one_worker_the_newer_attempt_counts() -> None:
    """The older one is of no use; what has no task is spare."""
    old, new = found("a", SINK, attempt=1), found("b", SINK, attempt=2)
    spare, other = found("c"), found("d", SOURCE)
    kept = {SINK_WORKER: new, SOURCE_WORKER: other}
    assert by_worker([new, old, spare, other], workers()) == (kept, [spare], [old])


def test_a_worker_that_runs_several_subtasks_is_one_process() -> None:
    """Its newest attempt counts, of whichever subtask: another process may have begun only some of them."""
    shared = workers(slot_sharing=True)
    worker = shared[SINK]
    assert worker == shared[SOURCE]
    both, late = found("a", SOURCE, SINK, attempt=1), found("b", SINK, attempt=2)
    assert by_worker([late, both], shared) == ({worker: late}, [], [both])
    held = replace(both.held, tasks={SOURCE: AttemptNumber(3), SINK: AttemptNumber(1)})
    newest = replace(both, held=held)
    assert by_worker([late, newest], shared) == ({worker: newest}, [], [late])


def test_a_process_that_was_started_for_a_worker_and_has_no_tasks_is_of_no_use() -> None:
    """It keeps what its slot has, and a spare one keeps nothing."""
    started, spare = found("a"), found("b")
    started = replace(started, held=replace(started.held, spare=False))
    assert by_worker([started, spare], workers()) == ({}, [spare], [started])


def test_who_was_given_up_is_not_adopted() -> None:
    """What its coordinator has asked for may still be on its way to it: another process takes its task."""
    gone, spare = found("a", SINK, attempt=2, actor_id="first"), found("b", actor_id="second")
    older = found("c", SINK, attempt=1, actor_id="third")
    kept = {SINK_WORKER: older}
    assert by_worker([gone, spare, older], workers(), {"first", "second"}) == (kept, [], [gone, spare])


def test_a_process_to_which_only_a_connection_broke_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, a few times, while others are waited for. One that has died is not, and is no use to kill."""
    held = {task: found("", task).held for task in (SINK, SOURCE)}
    script: dict[str, list[ProcessStatus | Exception | None]] = {
        "job/back#0": [AWAY, held[SINK]],
        "job/away#0": [AWAY] * FAILURES_MAX,
        "job/dead#0": [ActorDiedError()],
        "job/silent#0": [None],
    }
    asked: list[str] = []

    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [one for one in references if script[one.partition("?")[0]][0] is not None][:1], []

    def get(reference: str) -> ProcessStatus:
        answer = script[reference.partition("?")[0]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    def handle(name: str, namespace: str) -> object:
        def remote() -> str:
            asked.append(name)
            return f"{name}?{len(asked)}"

        return SimpleNamespace(held=SimpleNamespace(remote=remote))

    listed = [{"name": name, "namespace": "n"} for name in script]
    fake = SimpleNamespace(wait=wait, get=get, util=SimpleNamespace(list_named_actors=lambda all_namespaces: listed))
    monkeypatch.setattr(inheritance, "ray", fake)
    monkeypatch.setattr(inheritance, "find_actor", handle)
    monkeypatch.setattr(inheritance, "ASK_AGAIN_MS", 1)
    there, silent = inheritance.find_processes("job", "n", JobId("job-12345678"), {SINK, SOURCE}, timeout_s=0.05)
    assert [(one.name, list(one.held.tasks)) for one in there] == [("job/back#0", [SINK])]
    assert list(silent) == ["job/silent#0"]
    assert {name: asked.count(name) for name in script} == {
        "job/back#0": 2,
        "job/away#0": FAILURES_MAX,
        "job/dead#0": 1,
        "job/silent#0": 1,
    }


class LeftBehind:
    """A fleet whose coordinator was lost: one process is still there, and one more that is spare."""

    def __init__(self) -> None:
        _, self.graph = source_to_sink()
        self.options = PoolOptions("job", "namespace", None, 0, 1, open_store)
        self.slots = JobSlots(self.graph, self.options)
        self.inherited: tuple[object, ...] = ()
        self.handle, self.node_id, self.closed = Handle(), "the coordinator's", False
        self.died: Callable[[WorkerHandle, BaseException | None], object] = lambda *_: None

    def inherit(
        self, workers: Mapping[WorkerId, FoundProcess], standbys: Sequence[FoundProcess]
    ) -> dict[TaskId, WorkerHandle]:
        self.inherited = (dict(workers), list(standbys))
        members = [WorkerHandle(one.name, self.handle, None, Future(), one.held.info) for one in workers.values()]
        held = [one.held.tasks for one in workers.values()]
        return {task: member for member, tasks in zip(members, held, strict=True) for task in tasks}

    def is_kept(self, member: WorkerHandle) -> bool:
        """All are."""
        return True

    def refill(self) -> None:
        """Nothing is missing."""

    def kill(self, member: WorkerHandle) -> None:
        """Nobody is."""


@dataclass
class Handle:
    """A task's process."""

    deliver: Method = field(default_factory=Method)


def test_a_successor_watches_the_processes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reported end is a fact for it, and so is a death. A task without a process has failed when it is asked."""
    fleet, facts, looked = LeftBehind(), [], []
    there = [found("job/sink (1/1)#0", SINK), found("job/standby#1")]
    monkeypatch.setattr(attempt_supervisor, "find_processes", lambda *_: looked.append(None) or (there, {}))
    deployment = AttemptSupervisor(cast(WorkerPool, fleet), facts.append, cast(Mailbox, Now()))
    state = CoordinatorState(attempt=FIRST)
    for _ in range(2):
        deployment.take_over(state, JobId("job-12345678"))
    assert fleet.inherited == ({SINK_WORKER: there[0]}, [there[1]])
    assert len(looked) == 1, "though the log was replayed twice"

    asked = ev.CoordinatorTookOver(0, FIRST, Generation(2))
    for task in (SOURCE, SINK):
        deployment.send(task, asked)
    deployment.flush()
    (gone,) = facts
    assert (gone.task, gone.reason) == (SOURCE, "its process was gone when a new coordinator took over")
    assert fleet.handle.deliver.received()[1] == (((SINK, FIRST, asked),),)
    deployment.ended(Ended(FIRST, SINK, Outcome("failed", "boom")))
    assert (facts[-1].task, facts[-1].reason) == (SINK, "boom")
    fleet.died(deployment._members[SINK], OSError("gone"))
    assert (facts[-1].task, facts[-1].reason) == (SINK, "OSError: gone")


# --- the process of a task --------------------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    """Makes the process of a task of source -> sink."""
    with task_processes(monkeypatch) as make:
        yield make


def took_over(process: Process, generation: int) -> co.TaskAnswered:
    """A coordinator asks the task what it is doing; the answer."""
    process.tell(ev.CoordinatorTookOver(0, FIRST, Generation(generation)))
    answer = process.await_report(co.TaskAnswered)
    assert isinstance(answer, co.TaskAnswered)
    return answer


def took_over_all(process: Process, generation: int) -> None:
    """A coordinator asks all tasks of a process what they are doing, with one message."""
    process.tell_all(ev.CoordinatorTookOver(0, FIRST, Generation(generation)))
    process.settle()


def test_a_task_that_runs_answers_a_new_coordinator(process: Callable[[TaskId], Process]) -> None:
    """In its attempt; and it says what it holds to whoever looks for it."""
    sink = process(SINK).start()
    held = sink.actor.held()
    assert (held.tasks, held.job_id) == ({SINK: FIRST}, "job-12345678")
    answer = took_over(sink, 2)
    assert replace(answer, at_ms=0) == co.TaskAnswered(0, FIRST, SINK, Generation(2))


def test_a_task_that_is_over_answers_as_well(process: Callable[[TaskId], Process]) -> None:
    """Nobody knows whether its last report was written down."""
    sink = process(SINK).start()
    sink.receive(0, ROWS)
    sink.receive(1, EndOfData(drain=True), EndOfPartition())
    sink.await_report(co.TaskReachedEndOfData)
    sink.take_checkpoint()
    sink.await_report(co.TaskFinished)
    answer = took_over(sink, 2)
    assert (answer.ended, answer.finished, answer.covered_by, answer.snapshotted) == (True, True, 1, 1)
    assert took_over(sink, 3).generation == 3


def test_how_a_subtask_has_ended_is_reported_to_each_new_coordinator(process: Callable[..., Process]) -> None:
    """Nobody knows whether the one before has written it down. Only of the attempt that is asked for."""
    both = process(SINK, SOURCE).start()
    both.actor.mailbox.post(partial(both.actor.worker.fail, both.running, ValueError("no")))
    assert both.outcome().reason == "ValueError: no"
    both.settle()
    both.coordinator.report.so_far()
    took_over_all(both, 2)
    reports = both.coordinator.report.so_far()
    assert [(r.task, r.outcome.reason) for r in reports if isinstance(r, Ended)] == [(SINK, "ValueError: no")]
    assert [r.task for r in reports if isinstance(r, co.TaskAnswered)] == [SOURCE]
    both.tell_all(ev.CoordinatorTookOver(0, SECOND, Generation(3)), attempt=SECOND)
    both.settle()
    assert not any(isinstance(r, Ended) for r in both.coordinator.report.so_far())
    took_over_all(both, 2)
    # The source may report the end of its rows at any time.
    answers = [r for r in both.coordinator.report.so_far() if isinstance(r, (Ended, co.TaskAnswered))]
    assert answers == [], "it was replaced"


def test_orders_of_a_coordinator_that_was_replaced_are_refused(process: Callable[[TaskId], Process]) -> None:
    """It can neither stop the task, nor put another one in its place, nor start a checkpoint."""
    sink = process(SINK).start()
    took_over(sink, 3)
    sink.drop(FIRST, Generation(2))
    sink.actor.deploy(replace(sink.order, attempt=SECOND, generation=Generation(2)))
    sink.tell(ev.CheckpointTriggered(0, FIRST, CheckpointId(1), 0, generation=Generation(2)))
    sink.settle()
    assert sink.actor.held().tasks == {SINK: FIRST}
    assert sink.running.attempt == FIRST
    assert not any(isinstance(event, co.CheckpointAcknowledged) for event in sink.coordinator.report.so_far()), (
        "the checkpoint was not taken"
    )
    sink.drop(FIRST, Generation(3))
    assert sink.running is None
    assert not sink.over


def test_an_order_that_comes_twice_is_carried_out_once(process: Callable[[TaskId], Process]) -> None:
    """Where a connection broke nobody knows whether it has arrived: the task would begin anew, and its peers not."""
    sink = process(SINK).start()
    begun = sink.running
    sink.actor.deploy(sink.order)
    sink.settle()
    assert sink.running is begun
    assert not any(isinstance(event, co.TaskReady) for event in sink.coordinator.report.so_far())
    sink.actor.deploy(replace(sink.order, generation=Generation(2)))
    sink.await_report(co.TaskReady)


def test_a_process_leaves_when_its_own_coordinator_cannot_go_on(
    process: Callable[[TaskId], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was replaced says so as well, without knowing it: nobody leaves for that."""
    left: list[str] = []
    monkeypatch.setattr(ray_worker, "end_process", lambda: left.append("left"))
    sink = process(SINK).start()
    took_over(sink, 3)
    sink.actor.leave(Generation(2))
    sink.settle()
    assert left == []
    sink.actor.leave(Generation(3))
    sink.settle()
    assert left == ["left"]
