"""Who gets which splits of a source: one subtask each, in order, and again what no checkpoint has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from coordinators import SPEC, Coordinator, only

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants, source_coordinator
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.job_spec import AssignedSource, FailoverStrategy, JobSpec
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.coordinator.source_coordinator import UntakenSplits
from tidegate.connectors.source import SOURCE_STATE
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import (
    OperatorInfo,
    SectionRef,
    StateHandle,
    StateKind,
    StoredSplit,
    SubtaskState,
)
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid, SubtaskIndex, VertexId

UID = OperatorUid("in")
A, B = (TaskId(VertexId("in"), SubtaskIndex(index)) for index in range(2))


def job(splits: int, unread: tuple[int, ...] | None = None) -> JobSpec:
    """A source of two subtasks, each a region, with so many splits: "0", "1" and so on."""
    found = tuple(StoredSplit(f"{number}", b"") for number in range(splits))
    given = tuple(range(splits)) if unread is None else unread
    return replace(
        SPEC,
        tasks=(A, B),
        sources=(A, B),
        operators=(OperatorInfo(UID, "in", VertexId("in"), parallelism=2, max_parallelism=128),),
        edges=(),
        restart=RestartStrategy.fixed_delay(100, 500),
        failover=FailoverStrategy.REGION,
        assigned_sources=(AssignedSource(UID, VertexId("in"), found, given),),
    )


class Source(Coordinator):
    """A job whose subtasks run, and hold nothing yet."""

    def __init__(self, spec: JobSpec, *, finished: bool = False, **held: str) -> None:
        super().__init__(spec)
        self.held: dict[TaskId, list[str]] = {}
        """What each subtask has: what it was restored with, and what has come to it."""
        self.first: dict[TaskId, int] = {}
        self.submit()
        for task in (A, B):
            self.ready(task, *held.get("a" if task == A else "b", ""), finished=finished)

    def ready(self, task: TaskId, *splits: str, finished: bool = False) -> None:
        """A task has restored its state, these splits with it."""
        self.held[task], self.first[task] = list(splits), 0
        attempt = self.state.attempt_of(task)
        self.tell(ev.TaskReady(self.at_ms, attempt, task, splits=None if finished else splits))

    def question(self, task: TaskId, first: int | None = None) -> tuple[str, ...]:
        """The splits in the answer to a question of a task. The answer gets lost."""
        number = self.first[task] if first is None else first
        attempt = self.state.attempt_of(task)
        (answer,) = only(self.tell(ev.SplitsRequested(self.at_ms, attempt, task, number)), do.AssignSplits)
        assert (answer.attempt, answer.task, answer.first) == (attempt, task, number)
        return tuple(split.split_id for split in answer.splits)

    def asks(self, task: TaskId) -> tuple[str, ...]:
        """The same, and the answer comes."""
        splits = self.question(task)
        self.held[task] += splits
        self.first[task] += len(splits)
        return splits

    def part(self, number: int, task: TaskId, finished: bool = False) -> list[do.CoordinatorInstruction]:
        """A task's part of a checkpoint, with what it has."""
        rows = len(self.held[task])
        section = SectionRef(UID, SOURCE_STATE, StateKind.LIST, 0, 1, rows)
        handle = StateHandle("file", None, 1, "", (section,))
        read = tuple(StoredSplit(split, b"") for split in self.held[task]) if finished else ()
        state = SubtaskState(task.vertex, task.subtask, handle, finished=finished, read_splits=read)
        attempt = self.state.attempt_of(task)
        return self.tell(ev.CheckpointAcknowledged(self.at_ms, attempt, task, CheckpointId(number), state))

    def pool(self, number: int) -> tuple[str, ...]:
        """Both acknowledge: what is in the pool of the checkpoint. It completes."""
        return self.completes(number, [*self.part(number, A), *self.part(number, B)])

    def completes(self, number: int, instructions: list[do.CoordinatorInstruction]) -> tuple[str, ...]:
        """The last part has come."""
        (write,) = only(instructions, do.WriteMetadata)
        self.written(number)
        return tuple(split.split_id for split in write.metadata.pool_of(UID))

    def loses(self, task: TaskId, *restored: str) -> None:
        """A task fails and is ready again, with these splits."""
        self.tell(ev.TaskFailed(self.at_ms, self.state.attempt_of(task), task, "boom"))
        self.fire(f"restart:{self.state.attempt + 1}", self.at_ms + 500)
        self.ready(task, *restored)
        assert self.status is JobStatus.RUNNING


def test_who_asks_more_often_gets_more() -> None:
    """One split after the other, in the order of the source, and in the end nothing."""
    source = Source(job(4))
    assert [source.asks(task) for task in (A, B, A, A, A, B)] == [("0",), ("1",), ("2",), ("3",), (), ()]


def test_many_splits_come_several_at_a_time() -> None:
    """First a share of all, then less and less; each once."""
    source = Source(job(100))
    answers = [source.asks(A if turn % 3 else B) for turn in range(200)]
    sizes = [len(answer) for answer in answers if answer]
    assert sizes[0] == 7
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert [split for answer in answers for split in answer] == [f"{number}" for number in range(100)]


def test_an_answer_does_not_look_at_all_splits() -> None:
    """What is left of them is worked out when a subtask takes part, and after it has failed; not for each answer."""
    made = []

    class Counted(UntakenSplits):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    with patch.object(source_coordinator, "UntakenSplits", Counted):
        source = Source(job(1_000))
        for task in (A, B) * 20:
            assert source.asks(task)
        assert len(made) <= 2
        source.loses(B)
        assert source.asks(B)
        assert len(made) <= 3


def test_an_answer_has_a_limit() -> None:
    """However many splits there are."""
    with patch.object(source_coordinator, "SPLITS_AN_ANSWER_MAX", 3):
        assert len(Source(job(100)).asks(A)) == 3


def test_a_question_that_comes_twice_gets_the_same_answer() -> None:
    """Also when the other one has asked meanwhile, when more was given since, and about the end."""
    source = Source(job(3))
    assert source.question(A) == ("0",)
    assert source.asks(B) == ("1",)
    assert source.asks(A) == ("0",)
    assert source.asks(A) == ("2",)
    assert source.question(A, first=0) == ("0", "2")
    assert [source.asks(A), source.asks(A)] == [(), ()]


def test_a_question_from_nowhere_is_a_bug() -> None:
    """Nobody can have taken what was not given."""
    with pytest.raises(InvariantError, match="no more splits than it was given"):
        Source(job(3)).question(A, first=1)


def test_what_is_on_its_way_at_the_cut_is_in_the_pool() -> None:
    """The snapshot decides, not the answer; what comes after the cut changes nothing."""
    source = Source(job(4))
    source.asks(A)
    source.question(B)
    number = source.ask()
    instructions = source.part(number, A)
    source.asks(A)
    instructions += source.part(number, B)
    assert source.completes(number, instructions) == ("1", "2", "3")


def test_a_finished_subtask_has_read_all_that_it_was_given() -> None:
    """It takes no part in later checkpoints, and they have its splits, which are not read again."""
    source = Source(job(3))
    for task in (A, B, A, A, A):
        source.asks(task)
    first = source.ask()
    source.completes(first, [*source.part(first, A, finished=True), *source.part(first, B)])
    source.tell(ev.TaskReachedEndOfData(source.at_ms, source.state.attempt, A))
    source.tell(ev.TaskFinished(source.at_ms, source.state.attempt, A, CheckpointId(first)))
    for _ in range(2):
        number = source.ask()
        (write,) = only(source.part(number, B), do.WriteMetadata)
        source.written(number)
        read = [tuple(split.split_id for split in subtask.read_splits) for subtask in write.metadata.subtasks]
        assert (read, write.metadata.pools) == ([("0", "2"), ()], ())


def test_what_a_checkpoint_lacks_goes_back_when_its_subtask_is_ready_again() -> None:
    """Not before: until then nobody knows what the checkpoint has. What it has stays with the subtask."""
    source = Source(job(4))
    source.asks(A), source.asks(B)
    assert source.pool(source.ask()) == ("2", "3")
    source.asks(B)
    source.tell(ev.TaskFailed(source.at_ms, source.state.attempt, B, "boom"))
    assert [source.asks(A), source.asks(A)] == [("3",), ()]
    source.fire(f"restart:{source.state.attempt + 1}", 500)
    source.ready(B, "1")
    assert [source.asks(B), source.asks(B)] == [("2",), ()]


def test_a_split_that_comes_back_goes_to_nobody_who_has_read_beyond_it() -> None:
    """Its rows would be late there. Who has lost it asks again, and gets it first."""
    source = Source(job(5))
    source.asks(A), source.asks(B), source.asks(A)
    assert source.pool(source.ask()) == ("3", "4")
    assert source.asks(B) == ("3",)
    assert source.asks(A) == ("4",)
    source.loses(B, "1")
    assert source.asks(A) == ()
    assert source.asks(B) == ("3",)
    assert source.asks(B) == ()


def test_what_everybody_has_read_beyond_goes_to_who_asks_last() -> None:
    """As after a change of the parallelism, which mixes splits: nothing is left over."""
    source = Source(job(6, unread=(1, 3)), a="05", b="24")
    assert source.asks(A) == ("1",)
    assert source.asks(A) == ("3",)
    assert [source.asks(A), source.asks(B)] == [(), ()]


def test_what_comes_back_when_nobody_else_asks_goes_to_the_one_that_does() -> None:
    """Although it has read beyond it: the others have been told of the end."""
    source = Source(job(4, unread=(1, 2)), a="0", b="3")
    assert [source.asks(A), source.asks(A), source.asks(A), source.asks(B)] == [("1",), ("2",), (), ()]
    source.loses(A, "0", "3")
    assert source.asks(A) == ("1",)


def test_a_restored_job_gives_away_what_nobody_had() -> None:
    """Not what tasks were restored with, nor what the source has had since, as new files; "x" is gone there."""
    source = Source(job(5, unread=(2, 3)), a="0x", b="1")
    assert source.asks(A) == ("2",)
    assert source.pool(source.ask()) == ("3",)
    assert [source.asks(A), source.asks(A)] == [("3",), ()]


def test_a_source_that_was_restored_as_finished_has_nothing_left() -> None:
    """Its tasks know no split, and ask for none."""
    source = Source(job(3), finished=True)
    assert source.pool(source.ask()) == ()
    assert source.question(A) == ()


def test_a_successor_repeats_what_was_logged() -> None:
    """The fold has the assignment, so an answer that was lost with the coordinator is given again."""
    source = Source(job(3))
    assert source.question(A) == ("0",)
    fold = decode(encode(source.state))
    assert isinstance(fold, CoordinatorState)
    source.machine = CoordinatorMachine(fold)
    assert source.asks(B) == ("1",)
    assert source.asks(A) == ("0",)


def test_questions_of_tasks_that_were_stopped_count_for_nothing() -> None:
    """They come from an attempt that is over."""
    source = Source(job(3))
    source.tell(ev.TaskFailed(source.at_ms, source.state.attempt, A, "boom"))
    assert source.machine.ignores(ev.SplitsRequested(0, AttemptNumber(0), A, 0))
    assert not source.machine.ignores(ev.SplitsRequested(0, AttemptNumber(0), B, 0))


def two_parts(first: int, second: int, unread: tuple[int, ...] | None = None) -> JobSpec:
    """A source with two parts: the splits of the first one are "0", "1" and so on, then come those of the second."""
    spec = job(first + second, unread)
    return replace(spec, assigned_sources=(replace(spec.assigned_sources[0], second=first),))


def waits(source: Source, task: TaskId) -> bool:
    """Whether a request gets no answer."""
    return not source.tell(ev.SplitsRequested(source.at_ms, source.state.attempt_of(task), task, source.first[task]))


def test_the_second_part_begins_when_all_subtasks_have_read_the_first() -> None:
    """Each then gets its share at once, and after that nothing."""
    source = Source(two_parts(3, 4))
    assert [source.asks(task) for task in (A, B, A)] == [("0",), ("1",), ("2",)]
    assert waits(source, B)
    assert waits(source, B)
    assert source.asks(A) == ("3", "5")
    assert source.asks(B) == ("4", "6")
    assert [source.asks(task) for task in (A, B)] == [(), ()]


def test_a_request_that_still_waits_is_not_logged() -> None:
    """The first one is, and the one that comes when the others have read the first part."""
    source = Source(two_parts(1, 2))
    request = ev.SplitsRequested(source.at_ms, source.state.attempt, B, 0)
    assert source.asks(A) == ("0",)
    assert not source.machine.ignores(request)
    assert waits(source, B)
    assert source.machine.ignores(request)
    assert source.asks(A) == ("1",)
    assert not source.machine.ignores(request)


def test_the_last_subtask_gets_what_is_left_of_the_second_part() -> None:
    """A subtask without a share ends; the one that comes last has no others to leave splits to."""
    source = Source(two_parts(0, 1))
    assert waits(source, A)
    assert source.asks(B) == ("0",)
    assert source.asks(A) == ()


def test_a_checkpoint_at_the_switch_has_each_split_once() -> None:
    """The share that no snapshot has is in the pool, and the switch happens again after a restore."""
    source = Source(two_parts(2, 4))
    assert [source.asks(task) for task in (A, B)] == [("0",), ("1",)]
    assert waits(source, A)
    assert source.question(B) == ("2", "4")
    assert source.pool(source.ask()) == ("2", "3", "4", "5")
    assert source.asks(B) == ("2", "4")
    assert source.pool(source.ask()) == ("3", "5")
    again = Source(two_parts(2, 4, unread=(3, 5)), a="0", b="124")
    assert waits(again, B)
    assert again.asks(A) == ("3",)
    assert again.asks(B) == ("5",)


def test_subtasks_that_have_all_of_the_second_part_wait_for_the_first() -> None:
    """They had it in the checkpoint, and another subtask has still to read rows of the first part."""
    source = Source(two_parts(2, 2, unread=()), a="023", b="1")
    assert waits(source, A)
    assert source.asks(B) == ()
    assert source.asks(A) == ()


def test_splits_that_were_found_count_for_no_share() -> None:
    """A snapshot has more splits than the coordinator gave."""
    source = Source(two_parts(1, 2))
    assert source.asks(A) == ("0",)
    assert waits(source, B)
    assert source.asks(A) == ("1",)
    source.held[A] += ["found", "found too"]
    assert source.pool(source.ask()) == ("2",)
    assert source.asks(B) == ("2",)
    source.held[B] += ["found by b"]
    assert source.pool(source.ask()) == ()


def test_what_returns_to_the_first_part_is_read_by_a_subtask_that_waits() -> None:
    """It has not read beyond that split, and the subtask that failed has."""
    source = Source(two_parts(3, 2))
    assert [source.asks(task) for task in (A, B, B)] == [("0",), ("1",), ("2",)]
    assert waits(source, A)
    source.loses(B, "2")
    assert waits(source, B)
    assert source.asks(A) == ("1",)
    assert source.asks(A) == ("3",)
    assert source.asks(B) == ("4",)


@pytest.mark.parametrize(("splits", "taken", "holds"), [((1, 2), (3,), True), ((1, 2), (2,), False), ((), (1,), True)])
def test_is_untaken(splits: tuple[int, ...], taken: tuple[int, ...], holds: bool) -> None:
    """At the boundary: a single split that somebody has."""
    assert invariants.is_untaken(splits, taken) is holds


@pytest.mark.parametrize(
    ("left", "others", "holds"), [((), False, True), ((), True, True), ((1,), True, True), ((1,), False, False)]
)
def test_may_tell_end(left: tuple[int, ...], others: bool, holds: bool) -> None:
    """Only the last one that asks needs an empty pool."""
    assert invariants.may_tell_end(left, others) is holds


@pytest.mark.parametrize(("first", "given", "holds"), [(0, 0, True), (1, 2, True), (2, 2, True), (3, 2, False)])
def test_is_answerable(first: int, given: int, holds: bool) -> None:
    """Up to what was given."""
    assert invariants.is_answerable(first, given) is holds


@pytest.mark.parametrize(
    ("rows", "restored", "given", "holds"),
    [(2, 2, 0, True), (1, 2, 0, False), (4, 2, 2, True), (5, 2, 2, False)],
)
def test_is_prefix(rows: int, restored: int, given: int, holds: bool) -> None:
    """From what was restored to all that was given."""
    assert invariants.is_prefix(rows, restored, given) is holds
