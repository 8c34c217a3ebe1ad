"""The coordinator's rules for the life of a job: deployment, failover, takeover, the end."""

from __future__ import annotations

import pytest
from any_permit import ANY_PERMIT
from coordinators import SINK, SOURCE, SPEC, TASKS, Coordinator, discarding, files, kinds, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.job_spec import ENDING_TIMEOUT_MS, RestorePoint
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId

ELSEWHERE = RestorePoint("memory://old", JobId("job-00000000"), CheckpointId(7), final=False)


def point(checkpoint_id: int) -> RestorePoint:
    """A checkpoint of the job itself."""
    return RestorePoint(SPEC.root, SPEC.job_id, CheckpointId(checkpoint_id), final=False)


# --- deployment ---------------------------------------------------------------------------------------------------


def test_a_job_is_deployed_and_its_sources_start_when_all_tasks_are_ready() -> None:
    """No source reads before every task can take what it reads."""
    coordinator = Coordinator()
    found = coordinator.submit()
    assert only(found, do.DeployAttempt) == [do.DeployAttempt(AttemptNumber(0), None)]
    assert only(found, do.SetTimer) == [do.SetTimer("deploy:0", SPEC.deploy_timeout_ms)]

    assert coordinator.tell(ev.TaskReady(0, AttemptNumber(0), SOURCE)) == []
    assert coordinator.tell(ev.TaskReady(0, AttemptNumber(0), SOURCE)) == [], "ready twice is ready once"
    last = coordinator.tell(ev.TaskReady(0, AttemptNumber(0), SINK))

    assert last[0] == do.StartTasks(AttemptNumber(0), SPEC.tasks)
    assert coordinator.status is JobStatus.RUNNING


def test_a_restored_job_starts_from_its_restore_point_until_it_has_a_checkpoint_of_its_own() -> None:
    """The first attempts restore what the user named, later ones the job's newest checkpoint."""
    coordinator = Coordinator(spec(restore=ELSEWHERE))
    assert only(coordinator.submit(), do.DeployAttempt)[0].restore == ELSEWHERE
    coordinator.all_ready()
    coordinator.fail()
    assert only(coordinator.fire("restart:1"), do.DeployAttempt)[0].restore == ELSEWHERE
    coordinator.all_ready()
    coordinator.complete()
    coordinator.fail()

    assert only(coordinator.fire("restart:2"), do.DeployAttempt)[0].restore == point(1)


def test_metadata_names_what_the_job_was_restored_from() -> None:
    """The line of jobs can be followed back through their checkpoints."""
    coordinator = Coordinator(spec(restore=ELSEWHERE)).run()

    assert coordinator.collect(coordinator.ask()).restored_from == "memory://old/job-00000000/chk-7"


def test_a_job_restored_from_a_final_checkpoint_is_finished_at_once() -> None:
    """There is nothing left to do, so nothing is deployed."""
    final = RestorePoint("memory://old", JobId("job-00000000"), CheckpointId(7), final=True)
    found = Coordinator(spec(restore=final)).submit()

    assert only(found, do.DeployAttempt) == []
    assert only(found, do.EndJob) == [do.EndJob("finished", None)]


def test_a_task_that_does_not_get_ready_fails_the_attempt() -> None:
    """The deploy timeout names the task; of an attempt that runs, or is over, it means nothing."""
    coordinator = Coordinator()
    coordinator.submit()
    coordinator.tell(ev.TaskReady(0, AttemptNumber(0), SOURCE))

    found = coordinator.fire("deploy:0", at_ms=SPEC.deploy_timeout_ms)

    assert kinds(found) == ["CancelAttempt", "SetTimer"]
    expected = "sink[0] was not ready within 600000 ms (jobmanager.deploy-timeout)"
    assert coordinator.state.last_failure == expected
    coordinator.fire("restart:1")
    assert coordinator.fire("deploy:0") == []
    coordinator.all_ready()
    assert coordinator.fire("deploy:1") == []


def test_all_tasks_that_are_not_ready_are_named_if_they_are_few() -> None:
    """Each of them may be the one that somebody looks for."""
    coordinator = Coordinator()
    coordinator.submit()
    coordinator.fire("deploy:0", at_ms=SPEC.deploy_timeout_ms)
    expected = "source[0], sink[0] were not ready within 600000 ms (jobmanager.deploy-timeout)"
    assert coordinator.state.last_failure == expected


# --- failover -----------------------------------------------------------------------------------------------------


def test_without_restarts_the_first_failure_ends_the_job_with_its_reason() -> None:
    """RestartStrategy.none: tasks stop, and whoever waits is told which task failed and why."""
    coordinator = Coordinator(spec(restart=RestartStrategy.none())).run()

    found = coordinator.fail("division by zero")

    assert kinds(found) == ["CancelAttempt", "EndJob"]
    assert only(found, do.EndJob) == [do.EndJob("failed", "sink[0]: division by zero")]


def test_a_failed_attempt_is_restarted_after_the_delay_as_often_as_allowed() -> None:
    """fixed_delay(2, 500 ms): two restarts, each after its delay, and the third failure is the last."""
    coordinator = Coordinator().run()
    for attempt in (1, 2):
        coordinator.at_ms = 1_000 * attempt
        found = coordinator.fail()
        assert found == [
            do.CancelAttempt(AttemptNumber(attempt - 1)),
            do.SetTimer(f"restart:{attempt}", 1_000 * attempt + 500),
        ]
        deployed = coordinator.fire(f"restart:{attempt}")
        assert only(deployed, do.DeployAttempt)[0].attempt == attempt
        coordinator.all_ready()

    assert only(coordinator.fail("again"), do.EndJob) == [do.EndJob("failed", "sink[0]: again")]


def test_a_permanent_failure_ends_the_job_however_many_restarts_are_left() -> None:
    """A program that is wrong in itself is as wrong in the next attempt."""
    coordinator = Coordinator().run()
    found = coordinator.tell(ev.TaskFailed(0, AttemptNumber(0), SINK, "ConfigurationError: no", permanent=True))
    assert kinds(found) == ["CancelAttempt", "EndJob"]
    assert only(found, do.EndJob) == [do.EndJob("failed", "sink[0]: ConfigurationError: no")]


def test_further_failures_of_a_failed_attempt_are_not_counted() -> None:
    """When one task fails, others follow: that is one failure. Those of former attempts are none."""
    coordinator = Coordinator().run()
    coordinator.fail()
    assert coordinator.fail() == []
    coordinator.fire("restart:1")

    assert coordinator.fail(attempt=0) == []
    assert coordinator.state.failures.in_a_row == 1


def test_a_timer_of_a_former_restart_does_not_deploy() -> None:
    """Only the timer of the attempt that is waited for counts."""
    coordinator = Coordinator().run()
    coordinator.fail()

    assert coordinator.fire("restart:7") == []
    assert len(only(coordinator.fire("restart:1"), do.DeployAttempt)) == 1
    assert coordinator.fire("restart:1") == []


def test_a_checkpoint_that_is_collecting_ends_with_its_attempt() -> None:
    """It is given up without being a failure of its own, and its request is answered."""
    coordinator = Coordinator().run()
    coordinator.request("wanted")
    coordinator.request("waits for the next")
    coordinator.ack(1, SOURCE)

    found = coordinator.fail()

    assert only(found, do.DiscardCheckpoint) == [do.DiscardCheckpoint(CheckpointId(1), voided=False, permit=ANY_PERMIT)]
    assert {r.request: r.checkpoint_id for r in only(found, do.CompleteRequest)} == {
        "wanted": None,
        "waits for the next": None,
    }
    assert coordinator.state.pending == {}


@pytest.mark.parametrize("written", [True, False])
def test_a_restart_waits_for_the_fate_of_a_checkpoint_that_is_being_written(written: bool) -> None:
    """Invariant 7: whether the checkpoint is complete decides what the next attempt starts from."""
    coordinator = Coordinator().run()
    coordinator.complete()
    coordinator.collect(coordinator.ask())
    coordinator.fail()
    assert only(coordinator.fire("restart:1"), do.DeployAttempt) == []

    found = coordinator.written(2) if written else coordinator.voided(2)

    assert only(found, do.DeployAttempt)[0].restore == point(2 if written else 1)


def test_acknowledgements_of_a_former_attempt_are_discarded() -> None:
    """What an old task still says has no say."""
    coordinator = Coordinator().run()
    coordinator.ask()
    coordinator.fail()
    coordinator.fire("restart:1")
    coordinator.all_ready()

    assert only(coordinator.ack(1, SINK, attempt=0), do.DiscardFiles) == [discarding(1, SINK)]


# --- takeover -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["deploying", "running", "restarting"])
def test_a_new_generation_deploys_a_new_attempt(status: str) -> None:
    """What ran before is lost to it: it cancels that and starts anew at once; no restart is used up."""
    coordinator = Coordinator()
    coordinator.submit()
    if status != "deploying":
        coordinator.all_ready()
        coordinator.ask()
    if status == "restarting":
        coordinator.fail()
    failures = coordinator.state.failures

    found = coordinator.start(generation=2)

    assert only(found, do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0))]
    assert only(found, do.DeployAttempt) == [do.DeployAttempt(AttemptNumber(1), None)]
    assert coordinator.state.failures == failures
    assert coordinator.state.generation == 2


def test_a_new_generation_asks_for_the_fate_of_a_written_checkpoint_first() -> None:
    """It cannot know whether the old generation's write went through: a tombstone decides, then it deploys."""
    coordinator = Coordinator().run()
    coordinator.collect(coordinator.ask())

    found = coordinator.start(generation=2)
    assert [v.tombstone.checkpoint_id for v in only(found, do.VoidCheckpoint)] == [1]
    assert only(found, do.DeployAttempt) == []

    assert only(coordinator.written(1), do.DeployAttempt)[0].restore == point(1)


def test_a_new_generation_repeats_what_may_not_have_been_done() -> None:
    """Sink commits and deletions under way are asked for again; both may be done twice."""
    coordinator = Coordinator().run()
    coordinator.complete(files(0, "f0"))
    coordinator.committed(1)
    coordinator.complete(files(0, "f0", "f1"))
    coordinator.committed(2)
    coordinator.complete(files(0, "f0", "f1", "f2"))

    found = coordinator.start(generation=2)

    assert only(found, do.CommitSinks) == [do.CommitSinks(CheckpointId(3), (files(2, "f2"),), permit=ANY_PERMIT)]
    assert only(found, do.DiscardCheckpoint) == [
        do.DiscardCheckpoint(CheckpointId(1), voided=False, shared=(), permit=ANY_PERMIT)
    ]


def test_a_new_generation_of_a_job_that_is_ending_ends_it() -> None:
    """After the final checkpoint nothing is deployed any more; what is left are commits."""
    coordinator = Coordinator().run()
    coordinator.end_of_data()
    coordinator.collect(1, files(0, "f0"), finished=True)
    coordinator.written(1)
    assert coordinator.status is JobStatus.ENDING

    found = coordinator.start(generation=2)
    assert only(found, do.DeployAttempt) == []
    assert only(found, do.CommitSinks) == [do.CommitSinks(CheckpointId(1), (files(0, "f0"),), permit=ANY_PERMIT)]

    assert only(coordinator.committed(1), do.EndJob) == [do.EndJob("finished", None)]


def test_a_new_generation_of_a_job_that_is_over_says_so() -> None:
    """Whoever waits may not have been told."""
    coordinator = Coordinator(spec(restart=RestartStrategy.none())).run()
    coordinator.fail("boom")

    assert coordinator.start(generation=2) == [do.EndJob("failed", "sink[0]: boom")]


def test_generations_only_grow() -> None:
    """A log in which an older generation follows a newer one is broken."""
    coordinator = Coordinator().run()
    with pytest.raises(ProtocolError, match="generation 1 follows 1"):
        coordinator.start(generation=1)


def test_a_job_is_submitted_once() -> None:
    """A second submission into one log is refused."""
    coordinator = Coordinator().run()
    with pytest.raises(ProtocolError, match="submitted twice"):
        coordinator.tell(ev.JobSubmitted(0, SPEC))


# --- the end ------------------------------------------------------------------------------------------------------


def test_the_final_checkpoint_ends_the_job() -> None:
    """All operators finished -> a checkpoint at once -> tasks are told -> tasks end and files are committed -> over."""
    coordinator = Coordinator().run()
    assert only(coordinator.tell(ev.TaskReachedEndOfData(0, AttemptNumber(0), SOURCE)), do.TriggerCheckpoint) == []
    (trigger,) = only(coordinator.tell(ev.TaskReachedEndOfData(0, AttemptNumber(0), SINK)), do.TriggerCheckpoint)
    metadata = coordinator.collect(trigger.checkpoint_id, files(0, "f0"), finished=True)
    assert metadata.final

    found = coordinator.written(1)
    assert only(found, do.NotifyCompleted)[0].tasks == TASKS
    assert coordinator.all_finished() == [], "the files are not visible yet"
    assert only(coordinator.committed(1), do.EndJob) == [do.EndJob("finished", None)]


def test_the_end_waits_for_the_tasks_but_not_for_ever() -> None:
    """Committed first, the job ends with its last task, or when the time for that is over."""
    for late in (False, True):
        coordinator = Coordinator().run()
        coordinator.end_of_data()
        coordinator.collect(1, finished=True)
        found = coordinator.written(1)
        assert do.SetTimer("ending", ENDING_TIMEOUT_MS) in found
        assert only(found, do.EndJob) == []

        last = coordinator.fire("ending") if late else coordinator.all_finished()

        assert only(last, do.EndJob) == [do.EndJob("finished", None)]


def test_a_checkpoint_that_was_cut_before_the_end_is_followed_by_the_final_one() -> None:
    """Tasks that finished after their snapshot are covered by one more checkpoint."""
    coordinator = Coordinator().run()
    coordinator.ask()
    coordinator.end_of_data()
    coordinator.ack(1, SOURCE, finished=True)
    coordinator.ack(1, SINK, finished=False)

    found = coordinator.written(1)

    assert coordinator.status is JobStatus.RUNNING
    assert [t.checkpoint_id for t in only(found, do.TriggerCheckpoint)] == [2]


def test_a_failure_after_the_final_checkpoint_does_not_restart_anything() -> None:
    """All results are covered: a task that dies on its way out changes nothing."""
    coordinator = Coordinator().run()
    coordinator.end_of_data()
    coordinator.collect(1, finished=True)
    coordinator.written(1)

    assert only(coordinator.fail(), do.EndJob) == [do.EndJob("finished", None)]


def test_cancelling_stops_the_tasks_and_keeps_what_is_complete() -> None:
    """A checkpoint under way is given up, one that is being written is waited for, and commits are made."""
    coordinator = Coordinator().run()
    coordinator.complete(files(0, "f0"))
    coordinator.collect(coordinator.ask())

    found = coordinator.cancel()
    assert kinds(found) == ["CancelAttempt"]
    assert only(coordinator.written(2), do.EndJob) == []
    assert only(coordinator.committed(1), do.EndJob) == [do.EndJob("cancelled", "cancelled by the user")]
    assert [c.checkpoint_id for c in coordinator.state.completed] == [2]


@pytest.mark.parametrize("status", ["deploying", "restarting"])
def test_a_job_can_be_cancelled_while_it_starts(status: str) -> None:
    """Whatever it is waiting for."""
    coordinator = Coordinator()
    coordinator.submit()
    if status == "restarting":
        coordinator.fail()

    assert kinds(coordinator.cancel()) == ["CancelAttempt", "EndJob"]
    assert coordinator.fire("restart:1") == []


def test_nothing_happens_after_the_end() -> None:
    """Late facts change nothing; a request is refused with the status."""
    coordinator = Coordinator().run()
    coordinator.cancel()

    assert coordinator.fail() == coordinator.all_ready() == coordinator.cancel() == coordinator.ack(1, SINK) == []
    assert [r.error for r in only(coordinator.request(), do.CompleteRequest)] == [
        "not all required tasks are running: the job is cancelled"
    ]
    assert coordinator.status is JobStatus.CANCELLED


def test_an_event_that_is_none_is_refused() -> None:
    """The door takes facts only."""
    with pytest.raises(ProtocolError, match="a coordinator does not take events of type int"):
        Coordinator().tell(Generation(1))  # type: ignore[arg-type]


def test_every_task_is_told_of_an_abort() -> None:
    """An abort goes to all tasks of the plan, as any of them may be aligning."""
    coordinator = Coordinator(spec(tolerable_failures=3)).run()
    coordinator.ask()

    assert only(coordinator.decline(1), do.NotifyAborted)[0].tasks == TASKS
