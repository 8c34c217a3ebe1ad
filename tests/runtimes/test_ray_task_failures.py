"""The process of a task on Ray, without Ray: whatever goes wrong in it, the failure is told."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from ray_fakes import FIRST, ROWS, SINK, SOURCE, TIMEOUT_S, Process, task_processes
from rude import RAISED
from waiting import received

from tidegate.actors.coordinator import events as co
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.drivers.threads import EXIT_FORKED
from tidegate.actors.ray import mailbox as ray_mailbox
from tidegate.actors.ray import worker_actor as ray_worker
from tidegate.actors.ray.actor_calls import Outcome
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.operators.functions.batch_functions import MapBatches
from tidegate.operators.operator import Operator
from tidegate.storage.ids import AttemptNumber

SECOND = AttemptNumber(FIRST + 1)


def failed(process: Process) -> Outcome:
    """How the attempt has failed."""
    outcome = process.outcome()
    assert outcome.kind == "failed"
    assert outcome.reason is not None
    return outcome


def cannot_start(thread: threading.Thread) -> None:
    """In place of `Thread.start`, where the process has as many threads as it may have."""
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("raised", RAISED)
def test_whatever_a_function_raises_is_the_outcome(monkeypatch: pytest.MonkeyPatch, raised: str) -> None:
    """And the process takes another attempt."""

    def rude(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise RAISED[raised]()

    with task_processes(monkeypatch, rude) as make:
        process = make(SINK).start()
        process.receive(0, ROWS)
        outcome = failed(process)
        assert raised in str(outcome.reason)
        assert not outcome.unfit
        process.actor.deploy(replace(process.order, attempt=SECOND))
        process.await_report(co.TaskReady)


@pytest.mark.parametrize("raised", RAISED)
def test_whatever_a_source_raises_is_the_outcome(monkeypatch: pytest.MonkeyPatch, raised: str) -> None:
    """It is read on another thread."""

    def read(effects: TaskEffects, instruction: object, patient: bool) -> None:
        raise RAISED[raised]()

    monkeypatch.setattr(TaskEffects, "read_source", read)
    with task_processes(monkeypatch) as make:
        assert raised in str(failed(make(SOURCE).start()).reason)


def test_functions_that_open_are_in_no_call_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deployment has a limit of its own; from then on each call counts, as before."""
    inside, go_on = queue.SimpleQueue[None](), threading.Semaphore(0)

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        inside.put(None)
        assert go_on.acquire(timeout=TIMEOUT_S)
        return batch

    def slow_open(operator: Operator, *given: Any) -> None:
        slow(ROWS)
        Operator.open(operator, *given)

    def calls(process: Process) -> tuple[int | None, int | None]:
        received("a call", inside)
        return process.actor.pulse().call, process.actor.mailbox.call

    monkeypatch.setattr(MapBatches, "open", slow_open)
    with task_processes(monkeypatch, slow) as make:
        process = make(SINK)
        told, call = calls(process)
        go_on.release()
        assert (told, call is None) == (None, False)
        process.start().receive(0, ROWS)
        told, call = calls(process)
        go_on.release(2)
        assert told == call is not None


def test_a_task_that_fails_where_no_thread_can_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the report and what follows it need is there beforehand; the process is given up."""
    closed = threading.Event()

    def starts_a_thread(batch: pa.RecordBatch) -> pa.RecordBatch:
        monkeypatch.setattr(threading.Thread, "start", cannot_start)
        threading.Thread().start()
        return batch

    close = TaskDriver.close
    monkeypatch.setattr(TaskDriver, "close", lambda host: (close(host), closed.set()))
    with task_processes(monkeypatch, starts_a_thread) as make:
        process = make(SINK).start()
        process.receive(0, ROWS)
        outcome = process.outcome()
        assert outcome.kind == "failed"
        assert "can't start new thread" in str(outcome.reason)
        assert outcome.unfit
        assert closed.wait(TIMEOUT_S), "what it held was let go of"


def test_a_task_that_cannot_have_its_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins."""
    with task_processes(monkeypatch) as make:
        process = make(SINK).start()
        process.drop(FIRST)
        monkeypatch.setattr(threading.Thread, "start", cannot_start)
        process.actor.deploy(replace(process.order, attempt=SECOND))
        outcome = process.outcome(SECOND)
        assert (outcome.kind, outcome.unfit) == ("failed", True)
        assert str(outcome.reason).startswith("RuntimeError: can't start new thread")


@pytest.mark.parametrize("step", ["count", "retire"])
def test_what_follows_a_failure_cannot_keep_it_back(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The report comes first."""

    def broken(running: object, *arguments: object) -> None:
        raise MemoryError

    def rude(batch: pa.RecordBatch) -> pa.RecordBatch:
        monkeypatch.setattr(ray_worker._RaySubtask, step, broken)
        raise ValueError("no")

    with task_processes(monkeypatch, rude) as make:
        process = make(SINK).start()
        process.receive(0, ROWS)
        assert "ValueError: no" in str(failed(process).reason)


def test_a_process_that_cannot_tell_a_failure_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is noticed."""
    ended: Future[None] = Future()

    def broken(report: object) -> None:
        raise MemoryError

    def rude(batch: pa.RecordBatch) -> pa.RecordBatch:
        monkeypatch.setattr(process.actor.outbox, "send", broken)
        raise ValueError("no")

    monkeypatch.setattr(ray_worker, "leave_unreported", lambda: ended.set_result(None))
    with task_processes(monkeypatch, rude) as make:
        process = make(SINK).start()
        process.receive(0, ROWS)
        ended.result(TIMEOUT_S)


def test_a_thread_for_io_that_dies_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to do would never be done."""
    with task_processes(monkeypatch) as make:
        process = make(SINK).start()
        running = process.running

        def die(future: Future[None]) -> None:
            raise RecursionError("too deep")

        running._pool.submit(lambda: None, die)
        assert "RecursionError: too deep" in str(failed(process).reason)


def test_a_mailbox_whose_failure_cannot_be_handled_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would be done any more, and nobody would know."""
    ended: Future[None] = Future()
    monkeypatch.setattr(ray_mailbox, "leave_unreported", lambda: ended.set_result(None))

    def broken(*arguments: object) -> None:
        raise SystemExit(1)

    mailbox = Mailbox("test", lambda: False, lambda: None, 1_000, broken)
    mailbox.post(broken)
    mailbox.start()
    ended.result(TIMEOUT_S)


def test_a_function_that_forks_leaves_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the process ends when it comes out of the function, before it does anything in the task's name."""
    children: Future[int] = Future()

    def forks(batch: pa.RecordBatch) -> pa.RecordBatch:
        child = os.fork()
        if child:
            children.set_result(child)
        return batch

    with task_processes(monkeypatch, forks) as make:
        process = make(SINK).start()
        process.receive(0, ROWS)
        _, status = os.waitpid(children.result(TIMEOUT_S), 0)
        assert os.waitstatus_to_exitcode(status) == EXIT_FORKED
        process.settle()
        assert not process.over
