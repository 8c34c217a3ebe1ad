"""The oracle of failover accepts when one failure counts for all tasks that union list state may connect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import SPEC
from restored_graphs import FIVE, JOB, graph_of

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.job_spec import FailoverStrategy, RestorePoint
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.restart_oracles import FailoverOracle

GRAPH = graph_of({"a": 3})
A0, A1, A2 = GRAPH.tasks()
"""Three subtasks that no channel joins."""
LOST = co.TaskFailed(0, AttemptNumber(0), A1, "gone")
COMPLETE = co.MetadataWritten(0, CheckpointId(1))
WHOLE = (A0, A1, A2)


def deployed(*heard: co.CoordinatorEvent, restored: bool, again: tuple[TaskId, ...] = WHOLE) -> None:
    """Checks a deployment of `again`, by a coordinator that has received these events, after its first checkpoint."""
    restore = RestorePoint("memory://", JOB, FIVE, final=False) if restored else None
    spec = replace(SPEC, tasks=WHOLE, restore=restore, failover=FailoverStrategy.REGION, adoption_timeout_ms=1_000)
    oracle = FailoverOracle(spec, GRAPH, Coverage())
    oracle.deployed(0, WHOLE, completed=0, by=0)
    for event in heard:
        oracle.heard(event)
    oracle.deployed(1, again, completed=1, by=0)


def test_all_may_go_back_that_failed_before_the_first_checkpoint_of_a_restored_job() -> None:
    """The wider failure holds even if the checkpoint completes before the tasks restart."""
    deployed(LOST, COMPLETE, restored=True)


@pytest.mark.parametrize(
    ("heard", "restored"),
    [
        ((COMPLETE, LOST), True),
        ((LOST, COMPLETE), False),
        ((COMPLETE,), True),
    ],
    ids=["known", "not restored", "nothing failed"],
)
def test_else_only_what_has_failed_goes_back(heard: tuple[co.CoordinatorEvent, ...], restored: bool) -> None:
    """A coordinator that stops more than the region of a failed task is seen."""
    with pytest.raises(InvariantViolated, match=r"although no task connected to it has failed"):
        deployed(*heard, restored=restored)
