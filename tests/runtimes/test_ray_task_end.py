"""The process of a task on Ray, without Ray: when its task is over, and whose loss matters to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from ray_fakes import FIRST, ROWS, SINK, SOURCE, Process, Reference, task_processes

from tidegate.actors.coordinator import events as co
from tidegate.actors.ray.actor_calls import Outcome, Report
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import EndOfData, EndOfPartition


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    """Makes the process of a task of source -> sink whose calls are given up at once when they are lost."""
    with task_processes(monkeypatch) as make:
        yield make


def finishing(process: Process) -> Future[None]:
    """The call that carries the last elements of a source that has finished, from its own point of view."""
    process.actor.credit((FIRST, 0, 0, 0, 1_000_000), 1_000)
    process.await_report(co.TaskReachedEndOfData)
    process.take_checkpoint()
    last = process.await_last_frame()
    process.await_report(co.TaskFinished)
    process.settle()
    return last


def test_a_task_is_over_when_its_last_elements_have_arrived(process: Callable[[TaskId], Process]) -> None:
    """Until then the death of its process must fail the attempt, so what is watched has to stay pending."""
    source = process(SOURCE).start()
    last = finishing(source)
    assert not source.over
    last.set_result(None)
    assert Outcome("finished") == source.outcome()


def test_all_rows_are_counted_before_the_end_is_told(process: Callable[[TaskId], Process]) -> None:
    """With the end of its last task the coordinator tells of the job's: it looks at no count that comes later."""
    sink = process(SINK).start()
    report, counted, counts = sink.coordinator.report.remote, sink.coordinator.counted.calls, []

    def reported(reports: tuple[Report, ...]) -> Reference:
        while any(isinstance(each, co.TaskFinished) for each in reports) and not counted.empty():
            counts.append(counted.get()[1][:3])
        return report(reports)

    sink.coordinator.report.remote = reported  # type: ignore[method-assign, assignment]
    sink.receive(0, ROWS)
    sink.receive(1, ROWS)
    sink.receive(2, EndOfData(drain=True), EndOfPartition())
    sink.await_report(co.TaskReachedEndOfData)
    sink.take_checkpoint()
    sink.await_report(co.TaskFinished)
    assert counts[-1] == (FIRST, SINK, 2 * ROWS.num_rows)


def test_a_task_whose_last_elements_are_lost_has_failed(process: Callable[[TaskId], Process]) -> None:
    """Its receivers would wait for them for ever."""
    source = process(SOURCE).start()
    finishing(source).set_exception(ConnectionError("gone"))
    outcome = source.outcome()
    assert outcome.kind == "failed"
    assert "gone" in str(outcome.reason)


def test_credit_for_a_sender_that_has_ended_may_get_lost(process: Callable[[TaskId], Process]) -> None:
    """Who has sent everything may be gone: the receiver goes on."""
    sink = process(SINK).start()
    sink.receive(0, ROWS)
    credit, _ = sink.peer.credit.received()
    sink.receive(1, EndOfData(drain=True), EndOfPartition())
    sink.await_report(co.TaskReachedEndOfData)
    credit.set_exception(ConnectionError("gone"))
    sink.settle()
    sink.take_checkpoint()
    assert Outcome("finished") == sink.outcome()


def test_credit_for_a_sender_that_goes_on_must_arrive(process: Callable[[TaskId], Process]) -> None:
    """It would wait for it for ever."""
    sink = process(SINK).start()
    sink.receive(0, ROWS)
    sink.peer.credit.received()[0].set_exception(ConnectionError("gone"))
    outcome = sink.outcome()
    assert outcome.kind == "failed"
    assert "gone" in str(outcome.reason)


def test_a_frame_without_elements_is_answered_with_credit(process: Callable[[TaskId], Process]) -> None:
    """So a sender whose grant was lost asks for it; the task must not break down at that."""
    sink = process(SINK).start()
    sink.receive(0)
    _, (head, window_bytes) = sink.peer.credit.received()
    assert (head, window_bytes) == ((FIRST, 0, 0, 0, 1_000), 1_000)
