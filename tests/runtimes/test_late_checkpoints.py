"""What is said of a checkpoint or attempt that does not come: which tasks it waits for, and what they are doing."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue

import pytest
from coordinators import SPEC
from ray_fakes import SINK, SOURCE, LaterMailbox

from tidegate.actors.coordinator.coordinator_state import CoordinatorState, JobStatus, PendingCheckpoint
from tidegate.actors.ray.health_endpoint import own_threads
from tidegate.actors.ray.slow_tasks import (
    ASKED_MAX,
    LATE_MS,
    SILENT,
    SlowCheckpoints,
    SlowDeployments,
    SlowTaskLog,
)
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex, VertexId


class Asked:
    """Processes that answer when a test says so, and those of tasks in `gone` never."""

    def __init__(self, gone: tuple[TaskId, ...] = ()) -> None:
        self.gone = gone
        self.answers: dict[TaskId, Future[str]] = {}

    def __call__(self, task: TaskId) -> Future[str] | None:
        if task in self.gone:
            return None
        return self.answers.setdefault(task, Future())


def pending(*waiting: TaskId) -> PendingCheckpoint:
    """Checkpoint 7, triggered at 0."""
    return PendingCheckpoint(CheckpointId(7), AttemptNumber(2), 0, dict.fromkeys(waiting))


def watcher(asked: Asked) -> tuple[SlowCheckpoints, LaterMailbox]:
    """With a mailbox that does what is due later when a test says so."""
    mailbox = LaterMailbox()
    return SlowCheckpoints(SlowTaskLog(asked, mailbox.post, mailbox.call_later)), mailbox


def test_a_late_checkpoint_is_told_of_with_what_its_tasks_do(caplog: pytest.LogCaptureFixture) -> None:
    """Once, when all have answered; again when it is twice as old."""
    asked = Asked()
    late, mailbox = watcher(asked)
    late.look([pending(SINK)], LATE_MS - 1)
    assert not asked.answers
    late.look([pending(SINK)], LATE_MS)
    late.look([pending(SINK)], LATE_MS + 1)
    assert caplog.messages == []
    asked.answers.pop(SINK).set_result("its mailbox is in compile (kernels/jit.py:60)")
    mailbox.pass_time()
    line = "checkpoint 7 has been under way for 30 s, and waits for 1 tasks: sink[0]: its mailbox is in compile"
    assert [message.startswith(line) for message in caplog.messages] == [True]
    late.look([pending(SINK)], 2 * LATE_MS)
    asked.answers[SINK].set_exception(RuntimeError("gone"))
    assert SILENT in caplog.messages[1]


def test_nobody_waits_for_a_process_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """What the others do is said all the same."""
    asked = Asked(gone=(SOURCE,))
    late, mailbox = watcher(asked)
    late.look([pending(SINK, SOURCE)], LATE_MS)
    assert caplog.messages == []
    mailbox.pass_time()
    assert f"sink[0]: {SILENT}; source[0]: it has no process" in caplog.messages[0]
    asked.answers[SINK].set_result("too late")
    assert len(caplog.messages) == 1


def test_only_a_few_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    """However many tasks there are."""
    tasks = [TaskId(VertexId("window"), SubtaskIndex(number)) for number in range(100)]
    asked = Asked()
    late, mailbox = watcher(asked)
    late.look([pending(*tasks)], LATE_MS)
    mailbox.pass_time()
    assert len(asked.answers) == ASKED_MAX
    assert caplog.messages[0].endswith(f"and {100 - ASKED_MAX} more tasks")


def test_one_that_only_waits_for_storage_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """All tasks have acknowledged it; one that is over is forgotten."""
    late, _ = watcher(Asked())
    late.look([pending()], 10 * LATE_MS)
    late.look([], 10 * LATE_MS)
    assert caplog.messages == []


def test_tasks_that_are_not_ready_are_told_of_with_what_they_do(caplog: pytest.LogCaptureFixture) -> None:
    """From when they have room; those that are ready are not named, and another attempt has its time anew."""
    asked, mailbox = Asked(), LaterMailbox()
    late = SlowDeployments(SlowTaskLog(asked, mailbox.post, mailbox.call_later))
    state = CoordinatorState(spec=SPEC, status=JobStatus.DEPLOYING, attempt=AttemptNumber(0), ready={SOURCE: None})
    late.look(state, False, 0)
    late.look(state, True, LATE_MS)
    late.look(state, True, 2 * LATE_MS - 1)
    assert not asked.answers
    late.look(state, True, 2 * LATE_MS)
    asked.answers.pop(SINK).set_result("its mailbox is in open (model.py:7)")
    mailbox.pass_time()
    late.look(state, True, 2 * LATE_MS + 1)
    line = "attempt 0 has been under way for 30 s, and waits for 1 tasks: sink[0]: its mailbox is in open (model.py:7)"
    assert caplog.messages == [line]
    state.attempt = AttemptNumber(1)
    late.look(state, True, 3 * LATE_MS)
    late.look(state, True, 4 * LATE_MS - 1)
    state.status = JobStatus.RUNNING
    late.look(state, True, 9 * LATE_MS)
    assert (asked.answers, len(caplog.messages)) == ({}, 1)


def test_what_the_threads_of_a_process_do() -> None:
    """That of its mailbox, and those with the names that were asked for."""
    waits: SimpleQueue[None] = SimpleQueue()
    reader = threading.Thread(target=lambda: waits.get(), name="a-reader_0")
    reader.start()
    try:
        told = own_threads(threading.get_ident(), False, "a-reader")
        assert "its mailbox is in own_stack" in told
        assert "a-reader_0 is in" in told
        assert own_threads(threading.get_ident(), True, "none").endswith("waits for messages")
    finally:
        waits.put(None)
        reader.join()
