"""Master hooks: called before a checkpoint is triggered, restored before a task is deployed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import (
    Coordinator,
    kinds,
    only,
    spec,
)

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.job_spec import RestorePoint, pause_ms
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId

HOOKED = replace(spec(tolerable_failures=1), hooks=("outside",))
ELSEWHERE = RestorePoint("memory://old", JobId("job-00000000"), CheckpointId(7), final=False)


def hooks_answer(coordinator: Coordinator, checkpoint_id: int) -> list[do.CoordinatorInstruction]:
    """Every hook has answered."""
    return coordinator.tell(ev.HooksTriggered(0, CheckpointId(checkpoint_id), (("outside", b"kept"),)))


def test_hooks_are_called_before_tasks_are_triggered_and_what_they_give_is_kept() -> None:
    """Hooks first, then tasks, each once; the checkpoint's metadata has what the hooks gave."""
    coordinator = Coordinator(HOOKED).run()
    found = coordinator.request()
    assert (kinds(found)[0], only(found, do.TriggerCheckpoint)) == ("TriggerHooks", [])

    assert kinds(hooks_answer(coordinator, 1)) == ["TriggerCheckpoint"]
    assert hooks_answer(coordinator, 1) == [], "an answer that comes twice"
    assert coordinator.collect(1).hooks == (("outside", b"kept"),)


@pytest.mark.parametrize("how", ["raised", "hung"])
def test_hooks_that_fail_fail_the_checkpoint_and_no_task_hears_of_it(how: str) -> None:
    """Counted as other failures are; an answer after the time is over changes nothing."""
    coordinator = Coordinator(HOOKED).run()
    coordinator.request()

    found = (
        coordinator.tell(ev.HookFailed(0, CheckpointId(1), "no")) if how == "raised" else coordinator.fire("timeout:1")
    )

    assert kinds(found) == ["CompleteRequest"]
    assert hooks_answer(coordinator, 1) == []


def test_hooks_are_restored_before_a_task_is_deployed() -> None:
    """From the checkpoint that the tasks start from; tried again, then the attempt has failed."""
    coordinator = Coordinator(replace(HOOKED, restore=ELSEWHERE))
    found = coordinator.submit()
    assert only(found, do.RestoreHooks) == [do.RestoreHooks(AttemptNumber(0), ELSEWHERE)]
    assert only(found, do.DeployAttempt) == []
    failed = ev.HookRestoreFailed(0, AttemptNumber(0), "not yet")
    assert coordinator.tell(failed) == [do.SetTimer("hooks:0", 100)]
    assert kinds(coordinator.fire("hooks:0")) == ["RestoreHooks"]

    found = coordinator.tell(ev.HooksRestored(0, AttemptNumber(0)))

    assert only(found, do.DeployAttempt) == [do.DeployAttempt(AttemptNumber(0), ELSEWHERE)]
    assert coordinator.tell(ev.HooksRestored(0, AttemptNumber(0))) == []


def test_hooks_that_cannot_be_restored_fail_the_attempt() -> None:
    """After a bounded number of attempts, with the error of the hook."""
    coordinator = Coordinator(replace(HOOKED, restore=ELSEWHERE, restart=RestartStrategy.none()))
    coordinator.submit()
    for _ in range(2):
        coordinator.tell(ev.HookRestoreFailed(0, AttemptNumber(0), "gone"))

    (end,) = only(coordinator.tell(ev.HookRestoreFailed(0, AttemptNumber(0), "gone")), do.EndJob)

    assert end.reason == "the master hooks could not be restored in 3 attempts: gone"


def test_hooks_that_are_not_restored_in_time_fail_the_attempt() -> None:
    """With the setting that says how long they may take."""
    coordinator = Coordinator(replace(HOOKED, restore=ELSEWHERE, restart=RestartStrategy.none()))
    coordinator.submit()
    (end,) = only(coordinator.fire("deploy:0"), do.EndJob)
    assert end.reason == "the master hooks were not restored within 600000 ms (jobmanager.deploy-timeout)"


def test_hooks_whose_checkpoint_cannot_be_read_wait_as_long_as_an_outage_may_last() -> None:
    """The limit of the deployment begins anew meanwhile; and such attempts are not counted against a hook."""
    coordinator = Coordinator(replace(HOOKED, restore=ELSEWHERE, restart=RestartStrategy.none()))
    coordinator.submit()
    for number in range(20):
        found = coordinator.tell(ev.HookRestoreFailed(0, AttemptNumber(0), "no answer", HOOKED.storage_outage_ms - 1))
        assert found == [
            do.SetTimer("deploy:0", HOOKED.deploy_timeout_ms),
            do.SetTimer("hooks:0", pause_ms(100, number + 1)),
        ]
        assert kinds(coordinator.fire("hooks:0")) == ["RestoreHooks"]

    found = coordinator.tell(ev.HookRestoreFailed(0, AttemptNumber(0), "no answer", HOOKED.storage_outage_ms))
    assert [end.reason for end in only(found, do.EndJob)] == [
        "the master hooks could not be restored in 21 attempts: no answer"
    ]
