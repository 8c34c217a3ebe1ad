"""`SubtaskCommits`: what is committed when, what a checkpoint stores, and in which order."""

from __future__ import annotations

import pytest

from tidegate.actors.task.task_commits import SubtaskCommits
from tidegate.storage.checkpoints.metadata import PreparedPart, PreparedRows
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid

SINK = OperatorUid("sink")
JOB = JobId("job")


def rows(checkpoint: int, bucket: int = 0, job: str = "job") -> PreparedRows:
    """Prepared rows of one bucket."""
    return PreparedRows(SINK, JobId(job), CheckpointId(checkpoint), (PreparedPart(bucket, b"%d" % checkpoint),))


def prepare(commits: SubtaskCommits, checkpoint: int) -> int:
    """Prepares rows for a checkpoint. Returns the number of writes so far."""
    commits.written(commits.start(CheckpointId(checkpoint)), rows(checkpoint).parts)
    return commits.next_index


def ordered(commits: SubtaskCommits) -> tuple[PreparedRows, ...]:
    """The rows of the commit that is ordered now, if any."""
    commit = commits.next_commit()
    return () if commit is None else commit.rows


def test_rows_are_committed_when_their_checkpoint_is_complete() -> None:
    """Not before, once at a time, and not again."""
    commits = SubtaskCommits(SINK, JOB)
    end = prepare(commits, 1)
    assert ordered(commits) == ()
    commits.complete(end)
    assert ordered(commits) == (rows(1),)
    assert ordered(commits) == (), "the first commit is under way"
    commits.committed((rows(1),))
    assert commits.confirmed
    assert ordered(commits) == ()


def test_a_checkpoint_waits_for_writes_before_its_barrier_and_for_no_others() -> None:
    """Rows are covered when all writes before the barrier are over."""
    commits = SubtaskCommits(SINK, JOB)
    first = commits.start(None)
    second = commits.start(CheckpointId(1))
    end = commits.next_index
    later = commits.start(None)
    commits.written(second, rows(1).parts)
    assert commits.covered(end) is None
    commits.written(first, ())
    assert commits.covered(end) == (rows(1),)
    assert commits.in_flight == 1
    commits.written(later, ())
    assert commits.in_flight == 0


def test_the_rows_of_an_aborted_checkpoint_go_with_the_next_one() -> None:
    """Under their own token, before the rows of that checkpoint."""
    commits = SubtaskCommits(SINK, JOB)
    prepare(commits, 1)
    end = prepare(commits, 2)
    assert commits.covered(end) == (rows(1), rows(2))
    commits.complete(end)
    assert ordered(commits) == (rows(1), rows(2))
    commits.committed((rows(1), rows(2)))
    assert commits.confirmed


def test_checkpoints_that_become_due_during_a_commit_are_committed_together() -> None:
    """After the running commit, in one call. The metric counts each of them."""
    commits = SubtaskCommits(SINK, JOB)
    commits.complete(prepare(commits, 1))
    assert ordered(commits) == (rows(1),)
    for checkpoint in (2, 3):
        commits.complete(prepare(commits, checkpoint))
    assert ordered(commits) == ()
    assert commits.behind == 3
    commits.committed((rows(1),))
    assert commits.behind == 2
    assert ordered(commits) == (rows(2), rows(3))
    commits.complete(prepare(commits, 4))
    commits.committed((rows(2), rows(3)))
    assert not commits.confirmed
    assert ordered(commits) == (rows(4),)


def test_a_checkpoint_stores_what_is_not_confirmed() -> None:
    """A commit that is under way may be lost with the task, so the next checkpoint stores its rows too."""
    commits = SubtaskCommits(SINK, JOB)
    commits.complete(prepare(commits, 1))
    assert ordered(commits) == (rows(1),)
    end = prepare(commits, 2)
    assert commits.covered(end) == (rows(1), rows(2))
    commits.committed((rows(1),))
    assert commits.covered(end) == (rows(2),)
    assert commits.behind == 0
    assert not commits.confirmed


def test_rows_of_a_later_checkpoint_are_not_committed_with_an_earlier_one() -> None:
    """The second checkpoint may have taken its snapshot before the first is complete."""
    commits = SubtaskCommits(SINK, JOB)
    first = prepare(commits, 1)
    prepare(commits, 2)
    commits.complete(first)
    assert ordered(commits) == (rows(1),)
    commits.committed((rows(1),))
    assert ordered(commits) == ()


def test_a_restored_task_commits_in_the_order_of_its_checkpoints() -> None:
    """Rows of a checkpoint of another job keep the token of that job."""
    commits = SubtaskCommits(SINK, JOB)
    before = rows(3, job="before"), rows(4, job="before")
    commits.restored(before)
    assert not commits.confirmed
    assert ordered(commits) == before
    commits.committed(before)
    assert commits.confirmed


def test_answers_that_cannot_be_are_refused() -> None:
    """A commit that does not run, other rows than it has, and a write that was not ordered."""
    commits = SubtaskCommits(SINK, JOB)
    commits.complete(prepare(commits, 1))
    with pytest.raises(ProtocolError, match=r"checkpoints 1 were reported .* running commit has \[\]"):
        commits.committed((rows(1),))
    assert ordered(commits) == (rows(1),)
    with pytest.raises(ProtocolError, match=r"checkpoints 1, 2 were reported .* running commit has \[1\]"):
        commits.committed((rows(1), rows(2)))
    with pytest.raises(ProtocolError, match="never ordered"):
        commits.written(7, ())
