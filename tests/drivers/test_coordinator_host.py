"""The coordinator's host: what is logged comes before what is done, and the log is all that is needed to go on."""

from __future__ import annotations

import pytest
from coordinator_runs import Run, running
from coordinators import SINK, SOURCE, SPEC, TASKS, part

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import GIVEN_UP_MAX
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers import coordinator_driver, event_log_writer
from tidegate.actors.drivers.coordinator_driver import replay
from tidegate.actors.task import events as task_ev
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.metadata import read_metadata
from tidegate.storage.errors import LogDeletedError, StorageError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation


def test_nothing_is_done_before_it_is_logged() -> None:
    """An instruction is carried out when the entry that it follows from is durable, not before."""
    run = Run()
    run.port.append_next()
    run.host.handle(ev.JobSubmitted(0, SPEC))
    assert run.port.deployed == []
    assert run.port.timers == {}

    run.port.append_next()

    assert run.events() == [["CoordinatorStarted"], ["JobSubmitted"]]
    assert run.port.deployed == [do.DeployAttempt(AttemptNumber(0), None)]
    assert run.port.timers == {"deploy:0": SPEC.deploy_timeout_ms}


def test_events_that_come_together_share_an_entry() -> None:
    """Group commit: while one entry is being written, what comes in waits, and becomes the next entry."""
    run = Run()
    run.host.handle(ev.JobSubmitted(0, SPEC))
    for task in TASKS:
        run.host.handle(ev.TaskReady(0, AttemptNumber(0), task))
    assert len(run.port.appends) == 1

    run.port.settle()

    assert run.events() == [["CoordinatorStarted"], ["JobSubmitted", "TaskReady", "TaskReady"]]
    assert [task for task, event in run.port.told if isinstance(event, task_ev.TasksStarted)] == list(SPEC.tasks)


def test_what_is_reported_while_instructions_are_carried_out_waits_for_its_own_entry() -> None:
    """A port that answers at once cannot make the host write two entries at one time."""
    run = Run()

    def fail_at_once() -> None:
        run.port.on_deploy = None
        run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SOURCE, "no room"))
        run.host.handle(ev.CancelRequested(0))

    run.port.on_deploy = fail_at_once
    run.host.handle(ev.JobSubmitted(0, SPEC))
    run.port.append_next()
    run.port.append_next()

    assert len(run.port.appends) == 1
    run.port.settle()
    assert run.events()[-1] == ["TaskFailed", "CancelRequested"]
    assert run.port.halted == []


def test_a_process_is_ended_when_the_log_says_that_it_was_given_up() -> None:
    """Not before: a coordinator that is cut off takes all processes for hung, and cannot write that down."""
    run = running()
    run.host.handle(ev.ProcessGivenUp(0, "process-1", "it hangs"))
    assert run.port.killed == []
    run.port.append_next()
    assert (run.port.killed, run.events()[-1]) == (["process-1"], ["ProcessGivenUp"])


def test_a_coordinator_that_was_replaced_ends_no_process() -> None:
    """Its successor has adopted them, or will."""
    run = running()
    old, old_port = run.host, run.port
    run.take_over()
    run.port.settle()
    old.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "it hangs"))
    old.handle(ev.ProcessGivenUp(0, "process-1", "it hangs"))
    old_port.settle()
    assert (old_port.killed, old_port.cancelled, old_port.fenced) == ([], [], True)


def test_a_successor_knows_who_was_given_up() -> None:
    """The newest of them: what was asked of the process may still be on its way."""
    run = running()
    for number in range(GIVEN_UP_MAX + 5):
        run.host.handle(ev.ProcessGivenUp(0, f"process-{number}", "it hangs"))
        run.port.settle()
    run.take_over()
    assert list(run.host.machine.state.given_up) == [f"process-{number}" for number in range(5, GIVEN_UP_MAX + 5)]


def test_a_coordinator_whose_log_is_gone_does_not_say_that_it_was_replaced() -> None:
    """It cannot know who is in charge: what ends its tasks must be refused by those that obey another one."""
    run = running()
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    run.port.append_next(LogDeletedError("gone"), happens=False)
    assert (len(run.port.halted), run.port.fenced) == (1, False)


# --- what is logged, and when -------------------------------------------------------------------------------------


def test_what_changes_nothing_is_not_logged() -> None:
    """A timer whose time has passed it by, and reports of an attempt that is over."""
    run = running()
    before = run.log.indices()
    for event in (
        ev.TimerFired(0, "timeout:1"),
        ev.TimerFired(0, "deploy:0"),
        ev.TaskFailed(0, AttemptNumber(-1), SINK, "boom"),
        ev.TaskFinished(0, AttemptNumber(-1), SINK),
    ):
        run.host.handle(event)
    assert (run.port.appends, run.port.later, run.log.indices()) == ([], [], before)


def test_an_event_without_instructions_waits_for_one_with() -> None:
    """Acknowledgements travel with the one that makes the checkpoint complete."""
    run = running()
    run.host.handle(ev.TimerFired(0, "periodic:0"))
    run.port.settle()
    entries = len(run.log.indices())
    run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SOURCE, CheckpointId(1), part(1, SOURCE)))
    assert (run.port.appends, run.port.later) == ([], [])

    run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SINK, CheckpointId(1), part(1, SINK)))
    run.port.settle()

    assert run.events()[entries:] == [["CheckpointAcknowledged", "CheckpointAcknowledged"]]
    assert len(run.port.io) == 1


def test_what_people_read_is_logged_soon() -> None:
    """An event that nothing follows from, and that means something alone, does not wait for ever."""
    run = running()
    run.host.handle(ev.TaskReachedEndOfData(0, AttemptNumber(0), SOURCE))
    run.host.handle(ev.TaskReachedEndOfData(0, AttemptNumber(0), SINK))
    assert [delay_ms for delay_ms, _ in run.port.later] == [coordinator_driver.HOLD_MS]
    run.port.wait()
    run.port.settle()
    assert run.events()[-1] == ["TaskReachedEndOfData", "TaskReachedEndOfData"]


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many events make an entry, whatever they are; and so many names of files."""
    monkeypatch.setattr(coordinator_driver, "EVENTS_AN_ENTRY_MAX", 3)
    run = running()
    run.host.handle(ev.TimerFired(0, "periodic:0"))
    run.port.settle()
    entries = len(run.log.indices())
    for _ in range(7):
        run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SOURCE, CheckpointId(1), part(1, SOURCE)))
        run.port.settle()
    assert [len(events) for events in run.events()[entries:]] == [3, 3]
    monkeypatch.setattr(coordinator_driver, "NAMES_AN_ENTRY_MAX", 1)
    run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SOURCE, CheckpointId(1), part(1, SOURCE)))
    assert len(run.port.appends) == 1


# --- other coordinators -------------------------------------------------------------------------------------------


def test_a_coordinator_that_was_replaced_halts_and_does_nothing_more() -> None:
    """Invariant 8: the old one loses the next entry to the new one; what should have followed from it is not done."""
    run = Run()
    run.submit()
    old, old_port = run.host, run.port
    new, new_port = run.take_over()
    new_port.settle()
    deployed = len(old_port.deployed)

    old.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    old_port.append_next()

    assert len(old_port.halted) == 1
    assert "a newer coordinator is in charge" in old_port.halted[0]
    assert old_port.fenced, "it touches nothing that its successor may have adopted"
    assert (len(old_port.deployed), old_port.cancelled) == (deployed, [])
    assert new.generation == old.generation + 1
    assert new_port.deployed == [do.DeployAttempt(AttemptNumber(1), None)]


def test_of_two_coordinators_that_start_together_one_wins() -> None:
    """Both believe to be the next generation; the first entry decides, and the other one has to replay again."""
    run = Run()
    run.submit()
    _, first_port = run.take_over()
    _, second_port = run.take_over()
    second_port.append_next()
    first_port.append_next()

    assert len(first_port.replayed_again) == 1
    assert first_port.halted == second_port.halted == second_port.replayed_again == []
    assert second_port.deployed
    assert not first_port.deployed


def test_instructions_reach_the_tasks() -> None:
    """Triggers go to sources, completions and aborts to all, as events with number and attempt."""
    run = Run()
    run.submit()
    for task in TASKS:
        run.host.handle(ev.TaskReady(0, AttemptNumber(0), task))
    run.port.settle()
    run.port.told.clear()
    run.host.handle(ev.CheckpointRequested(0, "mine"))
    run.port.settle()
    assert run.port.told == [
        (SOURCE, task_ev.CheckpointTriggered(7, AttemptNumber(0), CheckpointId(1), 0, generation=Generation(1)))
    ]
    run.port.told.clear()

    for task in TASKS:
        state = part(1, task)
        run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), task, CheckpointId(1), state))
    run.port.settle()
    (write,) = run.port.io
    written = write()
    assert isinstance(written, ev.MetadataWritten)
    assert not read_metadata(open_store(run.root), SPEC.job_id, CheckpointId(1)).void
    assert isinstance(write(), ev.MetadataWritten), "the same metadata again is no conflict"
    run.host.handle(written)
    run.port.settle()

    completed = task_ev.CheckpointCompleted(7, AttemptNumber(0), CheckpointId(1), Generation(1))
    assert run.port.told == [(task, completed) for task in TASKS]
    assert run.port.answers == [do.CompleteRequest("mine", CheckpointId(1), None)]


def test_the_fold_is_stored_and_the_log_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many entries the state is stored; replay starts there and gives the same machine."""
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 5)
    run = Run()
    run.submit()
    for n in range(20):
        run.host.handle(ev.CheckpointRequested(n, f"request {n}"))
        run.port.settle()

    snapshot = run.log.latest_snapshot()
    assert snapshot is not None
    assert snapshot[0] == 20
    assert run.log.oldest() > 0, "what was folded twice over is deleted"
    assert run.log.indices()[0] == 0, "but for the entry with which a coordinator took over"
    machine, position = replay(run.log)
    assert position.next_index == 22
    assert machine.state == run.host.machine.state


def test_the_fold_is_stored_however_often_coordinators_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are counted from the newest fold, whoever has stored it; the one before that stays, and what follows."""
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 5)
    run = Run()
    run.submit()
    for n in range(20):
        run.host.handle(ev.CheckpointRequested(n, f"request {n}"))
        run.port.settle()
        if n % 3 == 2:
            run.take_over()
            run.port.settle()

    snapshot = run.log.latest_snapshot()
    assert snapshot is not None
    assert run.log.indices()[-1] - snapshot[0] < 5
    assert 5 <= snapshot[0] - run.log.oldest() < 15
    state = run.host.machine.state
    open_store(run.root).delete(f"{SPEC.job_id}/events/snapshot-{snapshot[0]:012d}")
    assert replay(run.log)[0].state == state


def test_a_log_of_large_entries_is_cut_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inlined state makes entries large, and the log may lie in memory: what stays is bounded in bytes too."""
    monkeypatch.setattr(event_log_writer, "BYTES_A_SNAPSHOT", 20_000)
    run = Run()
    run.submit()
    store = open_store(run.root)
    for n in range(50):
        run.host.handle(ev.CheckpointRequested(n, f"request {n}" * 500))
        run.port.settle()
        assert sum(file.size_bytes for file in store.walk(f"{SPEC.job_id}/events")) < 60_000

    machine, position = replay(run.log)
    assert position.next_index == 52
    assert machine.state == run.host.machine.state


def test_an_unstored_fold_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing it is an economy: when it fails, replay is longer, and the coordinator goes on."""
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 2)
    run = Run()
    run.port.append_next()
    run.host.handle(ev.JobSubmitted(0, SPEC))
    run.port.append_next()
    run.port.append_next(StorageError("no answer"), happens=False)
    run.host.handle(ev.CancelRequested(0))
    run.port.settle()

    machine, position = replay(run.log)
    assert (position.next_index, machine.state.status) == (3, JobStatus.CANCELLED)


def test_nothing_is_cut_behind_a_fold_that_was_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it stays, and every entry since: the newest may be found damaged."""
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 5)
    run = Run()
    run.submit()
    failed = False
    for n in range(16):
        run.host.handle(ev.CheckpointRequested(n, f"request {n}"))
        while run.port.appends:
            fold_is_due = run.port.appends[0][0].__name__ == "store_fold"
            if fold_is_due and len(run.log.indices()) > 9 and not failed:
                failed = True
                run.port.append_next(StorageError("no answer"), happens=False)
            else:
                run.port.append_next()
    snapshot = run.log.latest_snapshot()
    assert snapshot is not None
    assert failed
    state = run.host.machine.state
    open_store(run.root).delete(f"{SPEC.job_id}/events/snapshot-{snapshot[0]:012d}")
    assert replay(run.log)[0].state == state


def test_an_empty_log_replays_to_a_new_machine() -> None:
    """The first generation starts from nothing."""
    log = EventLog(open_store("memory://nothing-here"), SPEC.job_id)
    machine, position = replay(log)

    assert (position.next_index, machine.state) == (0, CoordinatorMachine().state)


def test_a_request_that_cannot_be_written_down_is_answered_with_the_cause() -> None:
    """And the job goes on."""
    run = Run()
    run.submit()
    run.host.handle(ev.CheckpointRequested(0, "request", target="memory://\udcff"))
    (answer,) = run.port.answers
    assert "surrogates not allowed" in str(answer.error)
    assert not run.port.halted


def test_a_failure_with_a_rude_text_is_logged() -> None:
    """A lone surrogate and megabytes of message stop nobody."""
    run = Run()
    run.submit()
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SOURCE, "\udcff" * 1_000_000))
    run.port.settle()
    assert not run.port.halted
    assert r"\udcff" in str(run.host.machine.state.last_failure)
    assert run.events()[-1] == ["TaskFailed"]
