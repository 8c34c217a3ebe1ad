"""The oracle of causes notices wrong causes in a log, and the trace shows causes."""

from __future__ import annotations

import re

import pytest
from pipelines import keyed

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers.event_log_writer import CHECKPOINTS_MAX
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.event_log import LogEntry
from tidegate.storage.ids import AttemptNumber, CheckpointId, EventId, Generation, SubtaskIndex, VertexId
from tidegate.testing import Faults, simulate
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.causes import CausesOracle, Truths

TASK = TaskId(VertexId("v"), SubtaskIndex(0))
STARTED = co.CoordinatorStarted(0, Generation(1))
FAILED = co.TaskFailed(0, AttemptNumber(0), TASK, "boom")


def trigger(number: int) -> do.TriggerCheckpoint:
    """Returns the instruction that starts a checkpoint."""
    return do.TriggerCheckpoint(AttemptNumber(0), CheckpointId(number), 0, (TASK,))


def declined(number: int) -> co.CheckpointDeclined:
    """Returns an answer of a task."""
    reason = CheckpointFailureReason.TASK_CLOSING
    return co.CheckpointDeclined(0, AttemptNumber(0), TASK, CheckpointId(number), reason, "closing")


def entry(index: int, first: int, *events: tuple[co.CoordinatorEvent, int | None]) -> LogEntry:
    """An entry of a log: its events, each with its cause."""
    causes = tuple(None if cause is None else EventId(cause) for _, cause in events)
    return LogEntry(index, Generation(1), 0, "n", tuple(event for event, _ in events), EventId(first), causes)


class Log:
    """A log with three events, the last of which has triggered checkpoint 1."""

    def __init__(self) -> None:
        self.oracle = CausesOracle()
        self.truths = Truths()
        self.log(entry(0, 0, (STARTED, None), (FAILED, None)), entry(1, 2, (FAILED, None)))
        self.oracle.carried_out(2, trigger(1))

    def log(self, *entries: LogEntry) -> None:
        """The coordinator logs these events, whose contents come from tasks."""
        for one in entries:
            for event in one.events:
                self.truths.heard(event, self.oracle.of_tasks(event))
            self.oracle.logged(one, self.truths)


def test_the_right_cause_is_the_event_that_made_the_order() -> None:
    """Two coordinators may send the same order. Either is then a right cause."""
    log = Log()
    log.log(entry(2, 3, (declined(1), 2)))
    log.oracle.carried_out(3, trigger(1))
    log.log(entry(3, 4, (declined(1), 3), (declined(1), 2)))


def test_a_repeated_notice_follows_from_the_first_one_even_if_that_was_never_sent() -> None:
    """The coordinator died when it had logged that the checkpoint is complete. Its successor notifies the tasks."""
    done = do.NotifyCompleted(AttemptNumber(0), CheckpointId(1), (TASK,))
    left = co.TaskFinished(0, AttemptNumber(0), TASK, CheckpointId(1))
    log = Log()
    log.oracle.decided(3, done)
    log.log(entry(2, 3, (FAILED, None)))
    with pytest.raises(InvariantViolated, match="has the cause 3 in the log, but was caused by None"):
        log.log(entry(3, 4, (left, 3)))  # no notice was sent
    log = Log()
    log.oracle.decided(3, done)
    log.log(entry(2, 3, (FAILED, None)), entry(3, 4, (STARTED, None)))
    log.oracle.carried_out(4, done)
    log.log(entry(4, 5, (left, 3), (left, 4)))
    with pytest.raises(InvariantViolated, match=r"has the cause 2 in the log, but was caused by \[4\]"):
        log.log(entry(5, 7, (left, 2)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (entry(2, 3, (declined(1), 1)), r"has the cause 1 in the log, but was caused by \[2\]"),
        (entry(2, 3, (declined(1), None)), r"has the cause None in the log, but was caused by \[2\]"),
        (entry(2, 3, (declined(2), 2)), "has the cause 2 in the log, but was caused by None"),
        (entry(2, 3, (FAILED, 2)), "has the cause 2 in the log, but was caused by None"),
        (
            entry(2, 3, (FAILED, None), (declined(1), 3)),
            "has the cause 3 in the log, but no earlier entry has that event",
        ),
        (entry(2, 3, (declined(1), 9)), "has the cause 9 in the log, but no earlier entry has that event"),
        (entry(2, 4, (FAILED, None)), "begins with event 4 instead of 3"),
        (entry(2, 2, (FAILED, None)), "begins with event 2 instead of 3"),
        (entry(2, 3, (co.StorageCameBack(0), 2)), "has the cause 2 in the log, but was caused by None"),
    ],
)
def test_a_wrong_cause_is_seen(wrong: LogEntry, says: str) -> None:
    """One of another order, none, one too many, one that is yet to come; and numbers with a hole."""
    with pytest.raises(InvariantViolated, match=says):
        Log().log(wrong)


def test_storage_comes_back_from_where_it_went() -> None:
    """Both may be in one entry: nothing was carried out in between."""
    log = Log()
    log.log(entry(2, 3, (co.StorageWentAway(0, "away"), None), (co.StorageCameBack(0), 3)))


def test_a_coordinator_that_takes_over_does_not_count_back() -> None:
    """The check also holds for entries that were written, although their writer received no answer."""
    log = Log()
    log.oracle.replayed(3, 5)
    log.log(entry(3, 5, (STARTED, None)))
    with pytest.raises(InvariantViolated, match="begins with event 4, but"):
        log.oracle.replayed(4, 4)


def test_what_comes_after_many_others_may_be_without_a_cause() -> None:
    """Hosts remember a bounded number of orders."""
    log = Log()
    for number in range(2, CHECKPOINTS_MAX + 1):
        log.oracle.carried_out(2, trigger(number))
    with pytest.raises(InvariantViolated, match="has the cause None"):
        log.log(entry(2, 3, (declined(1), None)))
    log.oracle.carried_out(2, trigger(CHECKPOINTS_MAX + 1))
    log.log(entry(2, 3, (declined(1), None)))


def test_the_trace_says_what_has_led_to_what() -> None:
    """Messages to tasks, their answers, and what storage answers carry the number of an event that stands there."""
    trace = simulate(keyed, seed=3, faults=Faults()).trace
    logged = {int(m[1]): m[2] for m in (re.search(r"logs event (\d+) (\w+)", line) for line in trace) if m}
    assert sorted(logged) == list(range(len(logged)))

    def cause(of: str) -> str:
        line = next(line for line in trace if re.search(of, line))
        found = re.search(r"\(from event (\d+)\)$", line)
        assert found is not None, line
        return logged[int(found[1])]

    assert cause(r"deploy attempt 0") == "JobSubmitted"
    assert cause(r"coordinator -> .* CheckpointTriggered\(1\)") == "TimerFired"
    assert cause(r"-> .* Barrier\(1\)") == "TimerFired"
    assert cause(r"-> storage PersistSnapshot\(1\)") == "TimerFired"
    assert cause(r"-> coordinator CheckpointAcknowledged\(1\)") == "TimerFired"
    assert cause(r"storage -> coordinator MetadataWritten\(1\)") == "CheckpointAcknowledged"
    assert cause(r"coordinator -> .* CheckpointCompleted\(1\)") == "MetadataWritten"
    assert cause(r"logs event \d+ SinksCommitted\(1\)") == "MetadataWritten"
