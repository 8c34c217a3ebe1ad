"""Each event of the log has a number and names its cause: the event from which followed what it answers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from any_permit import ANY_PERMIT
from coordinator_runs import Run, running
from coordinators import SINK, SOURCE, TASKS, part

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers import event_log_writer
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import StorageError
from tidegate.storage.ids import AttemptNumber, CheckpointId, EventId

ANSWERED_BY_NOBODY = (
    do.StartTasks, do.CancelAttempt, do.NotifyAborted, do.DiscardFiles, do.CompleteRequest, do.KillProcess, do.EndJob,
    do.AssignSplits, do.StopCopy,
)  # fmt: skip
FIRST = CheckpointId(1)


def chain(run: Run, number: int | None) -> list[str]:
    """Kinds of the events that led to one, and its own, the first one first."""
    logged = {}
    for index in run.log.indices():
        entry = run.log.read(index)
        assert entry.first_event is not None
        assert len(entry.causes) == len(entry.events)
        logged |= dict(enumerate(zip(entry.events, entry.causes, strict=True), entry.first_event))
    found: list[str] = []
    while number is not None:
        event, cause = logged[number]
        assert cause is None or cause < number
        found.insert(0, type(event).__name__)
        number = cause
    return found


def last(run: Run) -> int:
    """The number of the newest event in the log."""
    entry = run.log.read(run.log.indices()[-1])
    assert entry.first_event is not None
    return entry.first_event + len(entry.events) - 1


def cause_of(run: Run, kind: type[Any]) -> int | None:
    """The cause of the newest event of a kind."""
    entries = [run.log.read(index) for index in run.log.indices()]
    logged = [pair for entry in entries for pair in zip(entry.events, entry.causes, strict=True)]
    return next(cause for event, cause in reversed(logged) if isinstance(event, kind))


def triggered(run: Run) -> Run:
    """With a checkpoint that all tasks are told of."""
    run.host.handle(ev.TimerFired(0, "periodic:0"))
    run.port.settle()
    return run


def acknowledge(run: Run, number: int = 1) -> None:
    """Every task has its part of a checkpoint durable."""
    for task in TASKS:
        run.host.handle(
            ev.CheckpointAcknowledged(0, run.host.machine.state.attempt, task, CheckpointId(number), part(number, task))
        )
    run.port.settle()


def test_events_are_numbered_without_holes() -> None:
    """The number of an event is one more than that of the event before it, over entries and coordinators."""
    run = triggered(running())
    run.host.handle(ev.TimerFired(0, "deploy:0"))  # its time has passed: it is not logged, and gets no number
    run.take_over()
    run.port.settle()

    firsts = [(entry.first_event, len(entry.events)) for entry in run.log.entries(0)]
    assert len(firsts) > 3
    assert [first for first, _ in firsts] == [sum(n for _, n in firsts[:index]) for index in range(len(firsts))]


def test_what_users_ask_for_begins_a_chain() -> None:
    """So do failures of tasks. Nobody in the job has caused them."""
    run = running()
    run.host.handle(ev.CheckpointRequested(0, "mine"))
    run.port.settle()
    assert chain(run, last(run)) == ["CheckpointRequested"]
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    run.port.settle()
    assert chain(run, last(run)) == ["TaskFailed"]


def test_a_restart_leads_to_the_failure() -> None:
    """From the tasks that are ready again, over the timer, to the task that has failed."""
    run = running()
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    run.port.settle()
    run.host.handle(ev.TimerFired(500, "restart:1"))
    run.port.settle()
    for task in TASKS:
        run.host.handle(ev.TaskReady(600, AttemptNumber(1), task))
    run.port.settle()
    assert chain(run, last(run)) == ["TaskFailed", "TimerFired", "TaskReady"]


def test_a_checkpoint_leads_to_its_tick() -> None:
    """Tasks answer what triggered it, storage the last acknowledgement, and the end of a task what let it go."""
    run = triggered(running())
    acknowledge(run)
    written = run.port.io.pop(0)()
    assert isinstance(written, ev.MetadataWritten)
    run.host.handle(written)
    run.port.settle()
    before = ["JobSubmitted", "TaskReady", "TimerFired", "CheckpointAcknowledged", "MetadataWritten"]
    assert chain(run, last(run)) == before

    run.host.handle(ev.TaskReachedEndOfData(0, AttemptNumber(0), SOURCE))
    run.host.handle(ev.TaskFinished(0, AttemptNumber(0), SOURCE, FIRST))
    run.port.wait()
    run.port.settle()
    assert chain(run, last(run)) == [*before, "TaskFinished"]


def test_data_that_a_stop_has_ended_leads_to_the_user() -> None:
    """A source that ran dry begins something; one that was stopped answers the savepoint's trigger."""
    run = running()
    run.host.handle(ev.CheckpointRequested(0, "stop", SnapshotKind.SUSPEND, "mem://savepoints"))
    run.port.settle()
    run.host.handle(ev.TaskReachedEndOfData(0, AttemptNumber(0), SOURCE))
    run.host.handle(ev.TaskReachedEndOfData(0, AttemptNumber(0), SINK, FIRST))
    run.port.wait()
    run.port.settle()
    assert chain(run, last(run)) == ["CheckpointRequested", "TaskReachedEndOfData"]
    assert chain(run, last(run) - 1) == ["TaskReachedEndOfData"]


def test_a_late_answer_to_a_predecessor_has_its_cause() -> None:
    """Who took over knows from the log what its predecessors had asked for."""
    run = triggered(running())
    trigger = last(run)
    run.take_over()
    run.port.settle()
    run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SINK, FIRST, part(1, SINK)))
    run.port.settle()
    assert cause_of(run, ev.CheckpointAcknowledged) == trigger


def test_a_late_answer_has_its_cause_also_when_the_log_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What orders followed from is kept with the fold, and so is the number of the next event."""
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 4)
    run = triggered(running())
    trigger, number = last(run), last(run)
    for n in range(10):
        run.host.handle(ev.CheckpointRequested(n, f"request {n}"))
        run.port.wait()
        run.port.settle()
        number += 1
    assert run.log.oldest() > 4
    run.take_over()
    run.port.settle()
    assert last(run) == number + 1
    run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SINK, FIRST, part(1, SINK)))
    run.port.settle()
    assert cause_of(run, ev.CheckpointAcknowledged) == trigger


def test_a_task_that_leaves_names_the_completion_and_no_repeated_notice() -> None:
    """A successor repeats the notice to one task after the other. Each answer follows from the complete checkpoint."""
    known = event_log_writer.CauseTracker()
    notice = do.NotifyCompleted(AttemptNumber(0), FIRST, TASKS)
    known.carried_out(EventId(18), notice)
    for number, task in enumerate(TASKS, 22):
        known.replayed(EventId(number), ev.StorageWentAway(0, "away"), [dataclasses.replace(notice, tasks=(task,))])
    assert known.of(ev.TaskFinished(0, AttemptNumber(0), SOURCE, FIRST)) == EventId(18)


def test_timers_of_a_lost_process_are_forgotten() -> None:
    """A timer that fires was set by this process. Those that the lost one had set are not to be taken for it."""
    run = running()
    run.take_over()
    run.port.settle()
    assert not [order for order in run.host.causes.stored() if order[0] == "timer" and order[1] == "periodic:0"]


def test_what_has_come_names_the_order_that_it_answered() -> None:
    """An answer that waits for the log names what it answered, though the same was asked for again meanwhile."""
    run = running()
    ready = last(run)
    run.host.handle(ev.CheckpointRequested(0, "mine"))
    run.host.handle(ev.TimerFired(0, "periodic:0"))  # waits until the entry before is written
    run.host.causes.carried_out(run.host.next_event, do.SetTimer("periodic:0", 9))
    run.port.settle()
    run.port.wait()
    run.port.settle()
    assert cause_of(run, ev.TimerFired) == ready


def test_storage_that_comes_back_had_gone() -> None:
    """The one is the cause of the other."""
    run = running()
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    run.port.append_next(StorageError("away"), happens=False)
    for _ in range(2):  # until the entry is tried again; until what follows from nothing is logged
        run.port.wait()
        run.port.settle()
    back = cause_of(run, ev.StorageCameBack)
    assert chain(run, back) == ["StorageWentAway"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders about old checkpoints are forgotten, and what has one answer is forgotten with that."""
    monkeypatch.setattr(event_log_writer, "CHECKPOINTS_MAX", 5)
    run = running()
    for number in range(1, 31):
        triggered(run)
        acknowledge(run, number)
        run.host.handle(ev.MetadataWritten(0, CheckpointId(number)))
        run.port.settle()
        run.host.handle(ev.TimerFired(0, f"timeout:{number}"))
        if number > 1:
            run.host.handle(ev.CheckpointDiscarded(0, CheckpointId(number - 1)))
    assert len(run.host.causes.stored()) < 16


def test_as_many_of_each_kind_are_remembered_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of one kind do not push out those of another one: an answer that comes late still finds its cause."""
    monkeypatch.setattr(event_log_writer, "CHECKPOINTS_MAX", 5)
    kinds = (("trigger", 100), ("complete", 200))
    known = event_log_writer.CauseTracker(tuple((kind, n, first + n) for n in range(1, 9) for kind, first in kinds))
    assert sorted(known.stored()) == sorted(
        [("trigger", n, 100 + n) for n in range(4, 9)] + [("complete", n, 200 + n) for n in range(4, 9)]
    )


# --- the names of orders ------------------------------------------------------------------------------------------


def _made(kind: type[Any]) -> Any:
    named = SimpleNamespace(checkpoint_id=1)
    special = {"metadata": named, "tombstone": named, "permit": ANY_PERMIT}
    return kind(**{f.name: special.get(f.name, 1) for f in _fields(kind)})


def _fields(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


@pytest.mark.parametrize("kind", get_args(ev.CoordinatorEvent))
def test_every_event_begins_something_or_answers(kind: type[Any]) -> None:
    """A new event has to be one of the two. The end of the data is either, and says which."""
    if kind is ev.TaskReachedEndOfData:
        assert kind.begins
        assert kind(0, AttemptNumber(0), SOURCE).answers == ()
        assert kind(0, AttemptNumber(0), SOURCE, FIRST).answers == (("trigger", 1),)
    else:
        assert bool(_made(kind).answers) != kind.begins


@pytest.mark.parametrize("kind", get_args(do.CoordinatorInstruction))
def test_every_order_has_an_answer(kind: type[Any]) -> None:
    """And a name, by which the answer is told; what nobody answers has none."""
    answers = {name for event in get_args(ev.CoordinatorEvent) for name, _ in _made(event).answers}
    named = _made(kind).order
    assert (named is None) == issubclass(kind, ANSWERED_BY_NOBODY)
    assert named is None or named[0] in answers
