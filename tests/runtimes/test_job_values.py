"""The metrics of a job, as the coordinator's memory and the clock make them; without Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from coordinators import Coordinator, spec

from tidegate.actors.coordinator.coordinator_state import CoordinatorState, JobStatus
from tidegate.actors.ray import coordinator_actor as job_metrics
from tidegate.actors.ray.coordinator_actor import JobMetrics
from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes import metrics_page as page
from tidegate.actors.runtimes.job_metrics import (
    STATUSES,
    JobTimes,
    Recovery,
    job_values,
    newly_completed,
    status_values,
)
from tidegate.actors.runtimes.metric_registry import JOB_VALUES, METRICS, Metric
from tidegate.actors.runtimes.running_job import progress_of

ROOT = Path(__file__).parents[2]
FRESH = JobTimes(submitted_at_ms=1_000)


def values(state: CoordinatorState, now_ms: int, times: JobTimes = FRESH) -> dict[Metric, float]:
    """All values of a job at a time."""
    return job_values(state, progress_of(state, {}), times, now_ms)


def test_every_value_is_there_before_anything_happened() -> None:
    """Totals start with 0, and what tells of a checkpoint with -1: an alert needs a series to look at."""
    fresh = values(CoordinatorState(), 1_000)
    assert tuple(fresh) == JOB_VALUES
    assert {metric for metric, value in fresh.items() if value == -1} == {
        m.LAST_DURATION, m.LAST_SIZE, m.LAST_FULL_SIZE, m.LAST_IN_FLIGHT, m.LAST_COMPLETED_ID, m.LAST_RESTORE,
        m.LAST_RECOVERY, m.LAST_RECOVERY_DEPLOYMENT, m.LAST_RECOVERY_RESTORE,
    }  # fmt: skip
    assert {value for value in fresh.values() if value != -1} == {0}


def test_checkpoints_are_told_with_their_age() -> None:
    """The age counts from the completion, and before the first one from the submission of the job."""
    job = Coordinator().run()
    assert values(job.state, 4_500)[m.CHECKPOINT_AGE] == 3.5
    job.at_ms = 5_000
    number = job.ask()
    assert values(job.state, 5_000)[m.IN_PROGRESS] == 1
    job.collect(number)
    job.at_ms = 5_040
    job.written(number)
    told = values(job.state, 7_040)
    assert told[m.CHECKPOINT_AGE] == 2.0
    assert told[m.CHECKPOINT_INTERVAL] == 1.0
    assert (told[m.LAST_COMPLETED_ID], told[m.LAST_DURATION], told[m.LAST_FULL_SIZE]) == (number, 40, 20)
    assert (told[m.IN_PROGRESS], told[m.COMPLETED], told[m.FAILED]) == (0, 1, 0)
    assert values(job.state, 0)[m.CHECKPOINT_AGE] == 0, "a clock that was set back"


def test_a_checkpoint_that_is_declined_counts_as_failed() -> None:
    """And the newest completed one stays what it was."""
    job = Coordinator(spec(tolerable_failures=5)).run()
    job.decline(job.ask())
    told = values(job.state, 0)
    assert (told[m.IN_PROGRESS], told[m.COMPLETED], told[m.FAILED], told[m.LAST_COMPLETED_ID]) == (0, 0, 1, -1)


def test_uptime_and_downtime_follow_a_restart() -> None:
    """Uptime counts while all tasks run; downtime from the first look at an outage to the end of it."""
    job = Coordinator()
    job.at_ms = 2_000
    job.submit()
    deploying = FRESH.at(job.state, 2_500)
    assert (values(job.state, 2_500, deploying)[m.UPTIME], values(job.state, 2_500, deploying)[m.DOWNTIME]) == (0, 0)
    job.at_ms = 3_000
    job.all_ready()
    assert values(job.state, 3_700)[m.UPTIME] == 700
    job.fail()
    waiting = FRESH.at(job.state, 4_000)
    job.fire("restart:1", 4_500)
    assert job.status is JobStatus.DEPLOYING
    later = waiting.at(job.state, 4_900)
    told = values(job.state, 4_900, later)
    assert (told[m.UPTIME], told[m.DOWNTIME], told[m.NUM_RESTARTS]) == (0, 900, 1)
    job.at_ms = 5_000
    job.all_ready()
    told = values(job.state, 5_100, later.at(job.state, 5_100))
    assert (told[m.UPTIME], told[m.DOWNTIME], told[m.NUM_RESTARTS]) == (100, 0, 1)


def test_a_recovery_is_told_with_its_parts() -> None:
    """They add up; a moment that the clock of another process puts too early counts as that which led to it."""
    recovery = Recovery.between(failed_at_ms=1_000, deployed_at_ms=1_200, ready_at_ms=1_900)
    told = job_values(CoordinatorState(), progress_of(CoordinatorState(), {}), FRESH, 2_000, recovery)
    assert (told[m.LAST_RECOVERY_DEPLOYMENT], told[m.LAST_RECOVERY_RESTORE], told[m.LAST_RECOVERY]) == (200, 700, 900)
    assert (Recovery.between(1_000, 900, 1_300), Recovery.between(1_000, 1_200, 1_100)) == (
        Recovery(0, 300),
        Recovery(200, 0),
    )


def test_a_job_that_is_over_has_neither_uptime_nor_age() -> None:
    """As with Flink they are -1: no alert on age or outage goes on after the end."""
    job = Coordinator().run()
    job.state.status = JobStatus.FINISHED
    told = values(job.state, 9_000, JobTimes(0, 5_000).at(job.state, 9_000))
    assert (told[m.UPTIME], told[m.DOWNTIME], told[m.CHECKPOINT_AGE]) == (-1, -1, -1)


@pytest.mark.parametrize("status", list(JobStatus))
def test_a_job_is_in_one_status(status: JobStatus) -> None:
    """All are told, so that one can be asked for which the job never had."""
    state = CoordinatorState()
    state.status = status
    told = status_values(state)
    assert tuple(told) == STATUSES
    assert [name for name, value in told.items() if value == 1] == [progress_of(state, {}).status]


@pytest.mark.parametrize("history_max", [0, 2, 10])
def test_each_checkpoint_is_observed_once(history_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many complete in a second, and however few the history keeps; failed ones are not."""
    seen: list[float] = []

    class Recorder:
        """A histogram of Ray."""

        def observe(self, value: float, tags: dict[str, str]) -> None:
            assert tags == {"job": "job"}
            seen.append(value)

    monkeypatch.setattr(job_metrics, "_histogram", lambda metric: Recorder())
    job = Coordinator(spec(tolerable_failures=5, history_max=history_max)).run()
    job.complete()
    metrics = JobMetrics("job", 0)
    metrics.begin(job.state)
    errors: list[BaseException | None] = []
    for duration_ms in (10, 20, 30):
        number = job.ask()
        job.collect(number)
        job.at_ms += duration_ms
        job.written(number)
        job.committed(number)
        metrics.observing(job.state, errors.append)(None)
        assert seen[-1:] == [duration_ms]
        job.decline(job.ask())
        metrics.observe(job.state)
    assert seen == [10, 20, 30]
    assert errors == [None] * 3


def test_what_completes_between_two_looks_is_told_as_far_as_the_history_reaches() -> None:
    """The newest one in any case."""
    job = Coordinator(spec(history_max=2)).run()
    numbers = []
    for _ in range(3):
        numbers.append(job.complete())
        job.committed(numbers[-1])
    found = [record.checkpoint_id for record in newly_completed(job.state.statistics, 0)]
    assert found == numbers[-2:]
    assert newly_completed(job.state.statistics, 3) == ()


def test_names_say_whose_they_are_and_are_given_once() -> None:
    """One series, one meaning."""
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"tidegate_(job|task|process)_[a-z0-9_]+", metric.name)
        assert metric.tags[0] == "job"


def test_page_is_made_from_the_registry() -> None:
    """`python -m tidegate.actors.runtimes.metrics_page > docs/metrics.md` brings it up to date."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page.render()


def test_alert_rules_name_metrics_and_statuses_that_exist() -> None:
    """A rule on a name that nobody publishes never fires; each rule must also say what is wrong."""
    exported = {name for metric in METRICS for name in metric.exported}
    groups = yaml.safe_load((ROOT / "configs" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    named = set()
    for rule in rules:
        used = set(re.findall(r"\bray_\w+", rule["expr"]))
        assert used, rule["alert"]
        assert used <= exported, rule["alert"]
        statuses = re.findall(r'status=~?"([^"]*)"', rule["expr"])
        assert {status for group in statuses for status in group.split("|")} <= set(STATUSES), rule["alert"]
        assert rule["annotations"]["summary"]
        named |= used
    needed = (m.STATUS, m.FAILED, m.CHECKPOINT_AGE, m.NUM_RESTARTS)
    assert {metric.exported[0] for metric in needed} <= named
