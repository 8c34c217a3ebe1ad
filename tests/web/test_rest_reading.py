"""What can be read by REST: paths and field names are those of Flink, so that scripts made for it work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixed_watch import client_of
from fixture_jobs import JOB_ID, running_job

from tidegate.actors.runtimes.job_metrics import RecoveryEnds
from tidegate.storage.ids import AttemptNumber
from tidegate.web.jobs import seen
from tidegate.web.model.jobs import recoveries

JOB = f"/jobs/{JOB_ID}"
CHECKPOINT = {
    "className", "id", "status", "is_savepoint", "savepointFormat", "trigger_timestamp", "latest_ack_timestamp",
    "checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data", "persisted_data",
    "num_subtasks", "num_acknowledged_subtasks", "checkpoint_type", "tasks",
}  # fmt: skip
TASK = {
    "id", "status", "latest_ack_timestamp", "checkpointed_size", "state_size", "end_to_end_duration",
    "alignment_buffered", "processed_data", "persisted_data", "num_subtasks", "num_acknowledged_subtasks",
}  # fmt: skip
FIELDS = {
    "/overview": {"taskmanagers", "slots-total", "slots-available", "jobs-running", "jobs-finished", "jobs-cancelled",
                  "jobs-failed", "flink-version", "flink-commit"},
    "/config": {"refresh-interval", "timezone-name", "timezone-offset", "flink-version", "flink-revision", "features"},
    "/jobs": {"jobs"},
    "/jobs/overview": {"jobs"},
    JOB: {"jid", "name", "isStoppable", "state", "job-type", "start-time", "end-time", "duration", "maxParallelism",
          "now", "timestamps", "vertices", "status-counts", "plan"},
    "/taskmanagers": {"taskmanagers"},
    f"{JOB}/status": {"status"},
    f"{JOB}/accumulators": {"job-accumulators", "user-task-accumulators", "serialized-user-task-accumulators"},
    f"{JOB}/plan": {"plan"},
    f"{JOB}/config": {"jid", "name", "execution-config"},
    f"{JOB}/exceptions": {"root-exception", "timestamp", "all-exceptions", "truncated", "exceptionHistory"},
    f"{JOB}/checkpoints": {"counts", "summary", "latest", "history"},
    f"{JOB}/checkpoints/config": {"mode", "interval", "timeout", "min_pause", "max_concurrent", "externalization",
                                  "state_backend", "checkpoint_storage", "unaligned_checkpoints",
                                  "tolerable_failed_checkpoints", "aligned_checkpoint_timeout",
                                  "checkpoints_after_tasks_finish", "state_changelog_enabled",
                                  "changelog_periodic_materialization_interval", "changelog_storage"},
    f"{JOB}/checkpoints/details/17": CHECKPOINT | {"external_path", "discarded"},
    f"{JOB}/checkpoints/details/18": CHECKPOINT | {"failure_timestamp", "failure_message"},
    f"{JOB}/checkpoints/details/21": CHECKPOINT,
    f"{JOB}/checkpoints/details/latest": CHECKPOINT,
    f"{JOB}/checkpoints/details/17/subtasks/sum-by-key": TASK | {"summary", "subtasks"},
    f"{JOB}/vertices/sum-by-key": {"id", "name", "parallelism", "maxParallelism", "now", "subtasks", "aggregated"},
    f"{JOB}/vertices/sum-by-key/accumulators": {"id", "user-accumulators"},
    f"{JOB}/vertices/sum-by-key/subtasktimes": {"id", "name", "now", "subtasks"},
    f"{JOB}/vertices/sum-by-key/taskmanagers": {"id", "name", "now", "taskmanagers"},
    f"{JOB}/vertices/sum-by-key/backpressure": {"status", "backpressureLevel", "backpressure-level", "end-timestamp",
                                                "subtasks"},
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("path", FIELDS)
def test_a_path_has_the_fields_of_flink(path: str, prefix: str) -> None:
    """Every path answers, with and without the version in front, and leaves out no field."""
    reply = client_of().get(prefix + path)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json) >= FIELDS[path]


def test_rest_lists_jobs() -> None:
    """A list of jobs has their states, and how many of their tasks are in which."""
    client = client_of()
    assert {(job["id"], job["status"]) for job in client.get("/jobs").json["jobs"]} == {
        (JOB_ID, "RUNNING"),
        ("other-00ff00ff", "FAILED"),
    }
    lines = {job["name"]: job for job in client.get("/jobs/overview").json["jobs"]}
    assert lines["main"]["tasks"]["running"] == lines["main"]["tasks"]["total"] == 4
    assert (lines["main"]["end-time"], lines["main"]["duration"]) == (-1, 61_000)
    assert lines["other"]["tasks"]["failed"] == 4
    assert lines["other"]["end-time"] - lines["other"]["start-time"] == lines["other"]["duration"] == 60_900
    overview = client.get("/overview").json
    assert (overview["jobs-running"], overview["jobs-failed"], overview["taskmanagers"]) == (1, 1, 4)


def test_vertices_with_one_slot_sharing_group_share_slots() -> None:
    """A vertex with slots of its own has none."""
    assert [each["slotSharingGroupId"] for each in client_of().get(JOB).json["vertices"]] == [
        "default",
        "default",
        "out",
    ]


def test_rest_lists_processes_as_task_managers() -> None:
    """Each process with a task of a running job is one; a vertex and its subtasks name the same ones."""
    client = client_of()
    managers = client.get("/taskmanagers").json["taskmanagers"]
    assert len(managers) == client.get("/overview").json["taskmanagers"] == 4
    one = client.get(f"/taskmanagers/{managers[0]['id']}").json
    assert (one["slotsNumber"], [slot["jobId"] for slot in one["allocatedSlots"]]) == (1, [JOB_ID])
    assert client.get("/taskmanagers/1@nowhere").status == 404
    vertex = client.get(f"{JOB}/vertices/sum-by-key").json
    by_process = client.get(f"{JOB}/vertices/sum-by-key/taskmanagers").json["taskmanagers"]
    assert {each["taskmanager-id"] for each in by_process} == {each["taskmanager-id"] for each in vertex["subtasks"]}
    assert {each["taskmanager-id"] for each in by_process} <= {each["id"] for each in managers}
    assert [each["status-counts"]["RUNNING"] for each in by_process] == [1, 1]
    assert sum(each["metrics"]["read-records"] for each in by_process) == sum(
        each["metrics"]["read-records"] for each in vertex["subtasks"]
    )


def test_rest_returns_times_of_subtasks() -> None:
    """A running subtask has been deployed, and the time of its state; other states have none."""
    found = client_of().get(f"{JOB}/vertices/sum-by-key/subtasktimes").json
    vertex = client_of().get(f"{JOB}/vertices/sum-by-key").json
    assert [each["subtask"] for each in found["subtasks"]] == [0, 1]
    for each, subtask in zip(found["subtasks"], vertex["subtasks"], strict=True):
        times = {state: at_ms for state, at_ms in each["timestamps"].items() if at_ms}
        assert times == dict.fromkeys(("DEPLOYING", "RUNNING"), subtask["start-time"])
        assert each["duration"] == subtask["duration"]


def test_rest_lists_checkpoints() -> None:
    """Counts, the newest ones, and a history with what is under way, newest first."""
    told = client_of().get(f"{JOB}/checkpoints").json
    assert told["counts"] == {"restored": 1, "total": 21, "in_progress": 1, "completed": 19, "failed": 1}
    assert [each["id"] for each in told["history"]] == list(range(21, 0, -1))
    newest = {kind: told["latest"][kind]["id"] for kind in ("completed", "savepoint", "failed", "restored")}
    assert newest == {"completed": 20, "savepoint": 19, "failed": 18, "restored": 17}
    by_id = {each["id"]: each for each in told["history"]}
    kinds = {number: by_id[number]["checkpoint_type"] for number in (17, 19, 20)}
    assert kinds == {17: "UNALIGNED_CHECKPOINT", 19: "SAVEPOINT", 20: "CHECKPOINT"}
    assert (by_id[21]["className"], by_id[18]["className"]) == ("in_progress", "failed")
    assert by_id[18]["failure_message"].startswith("it expired")
    assert [number for number in (19, 20, 16) if not by_id[number]["discarded"]] == [19, 20]
    assert set(told["summary"]["state_size"]) == {"min", "max", "avg", "p50", "p90", "p95", "p99", "p999"}


def test_the_subtasks_of_a_checkpoint() -> None:
    """What each subtask measured; of one that has not acknowledged, that it has not; nothing that is not kept."""
    client = client_of()
    part = client.get(f"{JOB}/checkpoints/details/17/subtasks/sum-by-key").json
    assert [each["checkpoint"]["async"] for each in part["subtasks"]] == [42, 43]
    assert part["subtasks"][1]["alignment"] == {"buffered": 0, "processed": -1, "persisted": 640, "duration": 10}
    assert (part["subtasks"][1]["start_delay"], part["subtasks"][1]["unaligned_checkpoint"]) == (14, True)
    assert part["summary"]["start_delay"]["max"] == 14
    pending = client.get(f"{JOB}/checkpoints/details/21/subtasks/sum-by-key").json
    assert [each["className"] for each in pending["subtasks"]] == ["completed", "pending"]
    assert (pending["num_acknowledged_subtasks"], pending["num_subtasks"]) == (1, 2)
    failed = client.get(f"{JOB}/checkpoints/details/18").json["tasks"]["to-table"]
    assert (failed["status"], failed["num_acknowledged_subtasks"]) == ("FAILED", 0)
    gone = client.get(f"{JOB}/checkpoints/details/1/subtasks/sum-by-key")
    assert gone.status == 404
    assert "keeps only totals" in gone.reason


def test_the_newest_checkpoint_by_its_status() -> None:
    """`latest` is the newest that is over, of a status if one is named."""
    client = client_of()
    newest = {
        status: client.get(f"{JOB}/checkpoints/details/latest{status}").json["id"]
        for status in ("", "?status=FAILED", "?status=COMPLETED")
    }
    assert newest == {"": 20, "?status=FAILED": 18, "?status=COMPLETED": 20}
    assert client.get(f"{JOB}/checkpoints/details/latest?status=IN_PROGRESS").status == 400


def test_rest_describes_vertices() -> None:
    """Back-pressure, watermarks and metrics are those of the subtasks; a vertex that has told nothing says so."""
    client = client_of()
    flights = client.get(f"{JOB}/vertices/flights/backpressure").json
    assert (flights["backpressureLevel"], flights["subtasks"][0]["ratio"]) == ("high", 0.7)
    assert client.get(f"{JOB}/vertices/to-table/backpressure").json["status"] == "deprecated"
    marks = client.get(f"{JOB}/vertices/sum-by-key/watermarks").json
    assert [mark["id"] for mark in marks] == ["0.currentInputWatermark", "1.currentInputWatermark"]
    chosen = client.get(f"{JOB}/vertices/sum-by-key/metrics?get=1.busyTimeMsPerSecond,no.such").json
    assert chosen == [{"id": "1.busyTimeMsPerSecond", "value": "950.0"}]
    started = [each["start-time"] for each in client.get(f"{JOB}/vertices/sum-by-key").json["subtasks"]]
    assert len(set(started)) == 1


def test_rest_returns_metrics_of_a_job() -> None:
    """Without `get` their names, with it the values, as text."""
    client = client_of()
    assert {"id": "uptime"} in client.get(f"{JOB}/metrics").json
    assert client.get(f"{JOB}/metrics?get=uptime,downtime").json == [
        {"id": "downtime", "value": "0"},
        {"id": "uptime", "value": "38360"},
    ]


def test_rest_lists_exceptions_and_decisions() -> None:
    """Exceptions with task and cause, newest first; the decisions; how long recoveries took."""
    client = client_of()
    entry = client.get(f"{JOB}/exceptions").json["exceptionHistory"]["entries"][0]
    assert (entry["exceptionName"], entry["taskName"]) == ("ValueError", "sum by key (1/2)")
    other = client.get("/jobs/other-00ff00ff/exceptions?maxExceptions=2").json
    assert other["root-exception"].startswith("no restart is left")
    assert (len(other["exceptionHistory"]["entries"]), other["exceptionHistory"]["truncated"]) == (2, True)
    recovery = client.get(f"{JOB}/recoveries").json["recoveries"][0]
    assert (recovery["total"], recovery["parts"]) == (1_640, {"wait": 1_000, "restore": 640})
    assert client.get(f"{JOB}/timeline").json["entries"][0]["attempt"] == 1


def test_both_ends_of_a_recovery() -> None:
    """For how long nobody had noticed it, and when the first row came; the whole of it is the sum of its parts."""
    job = running_job()
    (recovery,) = job.past.recoveries
    assert recovery.running_at_ms is not None
    ends = {recovery.attempt: RecoveryEnds(180, recovery.running_at_ms + 40)}
    told = recoveries(replace(job, snapshot=replace(job.snapshot, recovery_ends=ends)))["recoveries"][0]
    assert told["parts"] == {"detect": 180, "wait": 1_000, "restore": 640, "first-row": 40}
    assert told["total"] == 180 + 1_000 + 640 + 40


def test_ends_of_recoveries_stay_known() -> None:
    """Another coordinator, and the log of a job that is over, know nothing of them: what was seen is kept."""
    job = running_job()
    (recovery,) = job.past.recoveries
    known = {recovery.attempt: RecoveryEnds(180, None), AttemptNumber(99): RecoveryEnds(1, 1)}
    before = replace(job, snapshot=replace(job.snapshot, recovery_ends=known))
    after = seen(before, replace(job.snapshot, past=None))
    assert after is not None
    assert after.snapshot.recovery_ends == {recovery.attempt: RecoveryEnds(180, None)}


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/jobs/none", 404, "Job none not found"),
        (f"{JOB}/nothing", 404, "Not Found"),
        (f"{JOB}/vertices/none", 404, "no vertex 'none'"),
        (f"{JOB}/vertices/none/backpressure", 404, "it has flights, sum-by-key"),
        (f"{JOB}/checkpoints/details/99", 404, "no checkpoint 99"),
        (f"{JOB}/checkpoints/details/x", 400, "whole number"),
        (f"{JOB}/checkpoints/details/{'9' * 40}", 400, "whole number"),
        (f"{JOB}/exceptions?maxExceptions=-1", 400, "maxExceptions"),
    ],
)
def test_rest_answers_unknown_paths_with_404(path: str, status: int, reason: str) -> None:
    """An error says what was wrong."""
    reply = client_of().get(path)
    assert reply.status == status
    assert reason in reply.reason
