"""The process of a worker that runs several subtasks, without Ray: what they share, and what each has for itself."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from ray_fakes import FIRST, ROWS, SINK, SOURCE, TIMEOUT_S, Process, task_processes
from waiting import received, until

from tidegate.actors.coordinator import events as co
from tidegate.actors.ray import worker_actor
from tidegate.actors.ray.actor_calls import Ended, Report
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId

SECOND = AttemptNumber(FIRST + 1)


@pytest.fixture
def seen() -> list[pa.RecordBatch]:
    """What the function of the sink has seen."""
    return []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, seen: list[pa.RecordBatch]) -> Iterator[Callable[..., Process]]:
    """Makes processes of source -> sink."""
    with task_processes(monkeypatch, lambda batch: seen.append(batch) or batch) as made:
        yield made


def failures(reports: list[Report]) -> list[tuple[TaskId, str | None]]:
    """Which subtasks have failed, and why."""
    return [(r.task, r.outcome.reason) for r in reports if isinstance(r, Ended) and r.outcome.kind == "failed"]


def fail(process: Process, task: TaskId) -> None:
    """A subtask fails."""
    running = process.actor.worker.subtasks[task]
    process.actor.mailbox.post(partial(process.actor.worker.fail, running, ValueError("no")))


def test_an_order_begins_all_its_subtasks(make: Callable[..., Process]) -> None:
    """Each is ready by itself. The process holds both, in this attempt."""
    both = make(SOURCE, SINK)
    ready = [both.await_report(co.TaskReady) for _ in both.tasks]
    assert {event.task for event in ready if isinstance(event, co.TaskReady)} == {SOURCE, SINK}
    assert both.runs == (SOURCE, SINK)
    assert both.actor.held().tasks == {SOURCE: FIRST, SINK: FIRST}


def test_rows_between_subtasks_of_a_worker_do_not_leave_it(
    make: Callable[..., Process], seen: list[pa.RecordBatch]
) -> None:
    """Nor does the credit for them. Both finish."""
    both = make(SOURCE, SINK).start()
    both.await_report(co.TaskReachedEndOfData)
    both.await_report(co.TaskReachedEndOfData)
    both.tell(ev.CheckpointTriggered(0, FIRST, CheckpointId(1), 0))
    for _ in both.tasks:
        both.await_report(co.CheckpointAcknowledged)
    both.tell_all(ev.CheckpointCompleted(0, FIRST, CheckpointId(1)))
    ends = [both.await_report(Ended) for _ in both.tasks]
    assert [each.outcome.kind for each in ends] == ["finished"] * 2
    assert sum(batch.num_rows for batch in seen) == ROWS.num_rows
    peer = both.peer
    assert [method.calls.qsize() for method in (peer.frame, peer.credit)] == [0, 0]
    assert both.runs == ()


def test_a_subtask_that_fails_does_not_stop_the_others(make: Callable[..., Process]) -> None:
    """What it raised is reported for it alone, and the next attempt of it alone begins beside the others."""
    both = make(SOURCE, SINK).start()
    source = both.actor.worker.subtasks[SOURCE]
    fail(both, SINK)
    assert both.outcome().reason == "ValueError: no"
    assert both.runs == (SOURCE,)
    assert failures(both.coordinator.report.so_far()) == []
    both.actor.deploy(replace(both.order, tasks=(SINK,), attempt=SECOND, peers={SOURCE: both.as_peer}))
    both.await_report(co.TaskReady)
    assert both.runs == (SOURCE, SINK)
    assert both.actor.worker.subtasks[SOURCE] is source
    assert both.actor.held().tasks == {SOURCE: FIRST, SINK: SECOND}


def test_what_a_function_raises_fails_its_subtask_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source, which has sent the rows to it in this worker, goes on."""

    def rude(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no")

    with task_processes(monkeypatch, rude) as make:
        both = make(SOURCE, SINK)
        assert both.await_report(co.TaskReady)
        both.tell_all(ev.TasksStarted(0))
        ended = both.outcome()
        assert (ended.kind, "no" in str(ended.reason)) == ("failed", True)
        assert both.runs == (SOURCE,)
        assert list(both.actor.ended) == [SINK]


def test_what_was_sent_to_a_subtask_that_has_failed_is_dropped(make: Callable[..., Process]) -> None:
    """Also by the next attempt of it: the queue of a worker outlives attempts."""
    both = make(SOURCE, SINK).start()
    both.settle()
    taken: list[object] = []
    worker = both.actor.worker
    arrived = partial(worker.deliver, SINK, FIRST, ev.CreditGranted(0, FIRST, next(iter(channels(both))), 1, 1))

    def send_and_replace() -> None:
        worker.queue.append(lambda: taken.append(arrived()))
        both.actor._deploy(replace(both.order, attempt=SECOND))

    both.actor.mailbox.post(send_and_replace)
    until("it is taken out of the queue", lambda: taken)
    assert taken == [False]


def channels(process: Process) -> tuple[Any, ...]:
    """The channels into the sink."""
    return tuple(process.actor.context.describe(SINK, FIRST).inputs)


def test_a_thread_that_dies_fails_all_subtasks(make: Callable[..., Process]) -> None:
    """Nobody knows for whom it was to work."""
    both = make(SOURCE, SINK).start()
    both.actor.thread_died(ValueError("no"))
    assert {both.outcome_of(task).reason for task in both.tasks} == {"ValueError: no"}
    assert both.runs == ()


def test_a_process_whose_sockets_nobody_reads_ends(
    make: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links stay open: it would wait for ever, in later attempts as well."""
    left: list[str] = []
    monkeypatch.setattr(worker_actor, "end_process", lambda: left.append("left"))
    cannot_read: list[Callable[[BaseException], object]] = []
    made = worker_actor.Connections

    def connections(secret: bytes, process_id: str, came: Any, died: Callable[[BaseException], object]) -> Any:
        cannot_read.append(died)
        return made(secret, process_id, came, died)

    monkeypatch.setattr(worker_actor, "Connections", connections)
    make(SOURCE, SINK)
    cannot_read[0](MemoryError())
    assert left == ["left"]


def test_a_subtask_that_cannot_be_made_does_not_keep_the_others_from_beginning(
    make: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be of another region."""
    make_effects = worker_actor.TaskEffects

    def effects(context: Any, descriptor: Any, *arguments: Any, **named: Any) -> Any:
        if descriptor.task == SINK:
            raise ValueError("no")
        return make_effects(context, descriptor, *arguments, **named)

    monkeypatch.setattr(worker_actor, "TaskEffects", effects)
    both = make(SOURCE, SINK)
    assert "ValueError: no" in str(both.outcome_of(SINK).reason)
    ready = both.await_report(co.TaskReady)
    assert isinstance(ready, co.TaskReady)
    assert (ready.task, both.runs) == (SOURCE, (SOURCE,))


@pytest.mark.parametrize("step", ["io_pool", "bytearray"])
def test_an_order_for_which_the_process_lacks_something_fails_all_its_subtasks(
    make: Callable[..., Process], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Threads, or memory. Who waits for one of them would wait for ever."""

    def none(*arguments: object) -> None:
        raise MemoryError("nothing left")

    both = make(SOURCE, SINK).start()
    both.drop(FIRST)
    monkeypatch.setattr(worker_actor, step, none, raising=False)
    both.actor.deploy(replace(both.order, attempt=SECOND))
    assert all("nothing left" in str(both.outcome_of(task, SECOND).reason) for task in both.tasks)
    assert both.runs == ()
    assert not both.actor.starting


def test_what_could_not_end_is_reported_as_well(make: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that comes to a process whose last attempt cannot be stopped is not lost. One that was dropped is."""

    def broken(running: object) -> None:
        raise ValueError("no")

    both = make(SOURCE, SINK).start()
    both.actor.drop((SOURCE,), FIRST)
    monkeypatch.setattr(both.actor, "close_subtask", broken)
    both.actor.deploy(replace(both.order, tasks=(SINK,), attempt=SECOND))
    assert "ValueError: no" in str(both.outcome_of(SINK, SECOND).reason)
    both.settle()
    assert list(both.actor.ended) == [SINK]


def test_reports_of_all_subtasks_go_in_one_message_in_their_order(make: Callable[..., Process]) -> None:
    """Of what they report in one round: here the answers to a message to both."""
    messages: list[tuple[Report, ...]] = []
    both = make(SOURCE, SINK).start()
    both.settle()
    remote = both.coordinator.report.remote
    both.coordinator.report.remote = lambda reports: (messages.append(reports), remote(reports))[1]  # type: ignore
    both.tell_all(ev.CoordinatorTookOver(0, FIRST, ev.UNFENCED), SINK, SOURCE, SINK)
    for _ in range(3):
        both.await_report(co.TaskAnswered)
    (answers,) = [[r for r in reports if isinstance(r, co.TaskAnswered)] for reports in messages if reports][:1]
    assert [answer.task for answer in answers] == [SINK, SOURCE, SINK]


def test_a_process_says_which_subtask_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is in a function of the user. Until every subtask is ready no call counts."""
    inside, go_on = queue.SimpleQueue[None](), threading.Semaphore(0)

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        inside.put(None)
        assert go_on.acquire(timeout=TIMEOUT_S)
        return batch

    with task_processes(monkeypatch, slow) as make:
        both = make(SOURCE, SINK).start()
        received("a call", inside)
        pulse = both.actor.pulse()
        assert (pulse.task, pulse.call is not None) == (SINK, True)
        assert both.actor.doing().startswith(f"{SINK}: ")
        assert both.actor.stack().startswith(f"{SINK}: it is in ")
        both.actor.starting.add(SOURCE)
        assert both.actor.pulse().call is None
        both.actor.starting.discard(SOURCE)
        go_on.release(100)
        both.settle()


def test_a_subtask_may_be_dropped_alone(make: Callable[..., Process]) -> None:
    """An order to let go names subtasks; the others run on, in whatever attempt."""
    both = make(SOURCE, SINK).start()
    both.actor.drop((SINK,), FIRST)
    assert both.runs == (SOURCE,)
    both.actor.drop((SOURCE,), AttemptNumber(FIRST - 1))
    assert both.runs == (SOURCE,)
    assert both.actor.ended == {}
