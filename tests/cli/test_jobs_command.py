"""`tidegate jobs` and `tidegate job`, on jobs of this process: what they print, what they do, and their exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from command_line import CommandRunner
from local_jobs import NO_RESTART, WAIT_S, GatedSource, config, local, opening
from typer.testing import Result
from waiting import until

import tidegate as tg
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.runtimes.running_job import (
    JobCard,
    JobOverview,
    SilentJob,
    TaskProcessInfo,
    not_taken,
    progress_of,
)
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.cli import jobs_command as jobs_cli
from tidegate.cli.jobs_command import job_lines, jobs_as_json, status_lines, task_lines, tasks_of
from tidegate.cli.main import app
from tidegate.cli.terminal import time_text
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import JobId, SubtaskIndex, VertexId
from tidegate.storage.units import duration_text

ROWS, GATE = 40, 15
CARD = JobCard(JobId("delays-1"), "delays", "s3://bucket/ckpt", None, True, 1_000)
RUNNING = replace(progress_of(CoordinatorState(), {}), status="running", attempt=2, last_checkpoint=17)
OVERVIEW = JobOverview(CARD, RUNNING, 58_000)


@pytest.fixture(autouse=True)
def jobs_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of those of a Ray cluster."""
    monkeypatch.setattr(jobs_cli, "open_environment", lambda address: tg.StreamEnvironment.local())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[tg.Job, GatedSource]]:
    """A job that waits at a gate."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        env.from_source(source, uid="source").to_table(str(tmp_path / "table"), uid="table")
        job = env.execute(
            "shelled",
            checkpoints=config(tmp_path / "checkpoints", savepoints=str(tmp_path / "savepoints")),
            restart=NO_RESTART,
        )
        source.await_gate(GATE)
        yield job, source


def shell(*arguments: str) -> Result:
    """Run a command."""
    return CommandRunner().invoke(app, [*arguments])


def test_the_list_shows_each_job(job: tuple[tg.Job, GatedSource]) -> None:
    """A line a job for people, an object a job for programs."""
    taken = shell("job", "shelled", "checkpoint")
    (listed,) = [found for found in json.loads(shell("jobs", "--json").stdout) if found["name"] == "shelled"]
    assert (taken.exit_code, taken.stdout.strip().endswith("/chk-1")) == (0, True)
    assert (listed["id"], listed["state"], listed["attempt"], listed["last_checkpoint"], listed["detached"]) == (
        job[0].job_id,
        "running",
        0,
        1,
        False,
    )
    assert listed["uptime_ms"] >= 0
    head, *lines = shell("jobs").stdout.splitlines()
    assert head.split() == ["NAME", "STATE", "UPTIME", "ATTEMPT", "LAST", "CHECKPOINT", "ID"]
    (line,) = [line for line in lines if line.startswith("shelled ")]
    assert "running" in line
    assert "1, " in line
    assert line.endswith(job[0].job_id)


def test_status_is_what_the_handle_says(job: tuple[tg.Job, GatedSource]) -> None:
    """By name or by id; the same facts as text and as JSON."""
    text, found = shell("job", "shelled", "status"), shell("job", job[0].job_id, "status", "--json")
    told = json.loads(found.stdout)
    assert (text.exit_code, found.exit_code) == (0, 0)
    assert (told["name"], told["status"], told["checkpoint.count"]) == ("shelled", "running", 0)
    assert ["status", "running"] in [line.split() for line in text.stdout.splitlines()]


def test_a_savepoint_goes_where_it_is_told(job: tuple[tg.Job, GatedSource], tmp_path: Path) -> None:
    """To a folder that is named, else to that of the job's settings."""
    named = shell("job", "shelled", "savepoint", str(tmp_path / "mine"), "--json")
    other = shell("job", "shelled", "savepoint")
    assert Path(json.loads(named.stdout)["path"]).parent == tmp_path / "mine"
    assert Path(other.stdout.strip()).parent == tmp_path / "savepoints"
    assert job[0].status() == "running"


def test_stop_ends_the_job_with_a_savepoint(job: tuple[tg.Job, GatedSource], tmp_path: Path) -> None:
    """It returns when both are there."""
    found = shell("job", "shelled", "stop", "--savepoint", str(tmp_path / "last"), "--json")
    told = json.loads(found.stdout)
    assert (found.exit_code, told["status"]) == (0, "suspended")
    assert (Path(told["path"]) / "_metadata").exists()


def test_cancel_waits_for_the_end(job: tuple[tg.Job, GatedSource]) -> None:
    """And says it."""
    found = shell("job", "shelled", "cancel")
    assert (found.exit_code, found.stdout.strip()) == (0, "shelled is cancelled")
    assert job[0].status() == "cancelled"


def follow(job: tuple[tg.Job, GatedSource], monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """Follow its events; it is only let go once the command has begun, because one that is over is found by none."""
    monkeypatch.setattr(jobs_cli, "FOLLOW_S", 0.01)
    is_over = jobs_cli.is_over

    def look(followed: tg.Job) -> bool:
        over = is_over(followed)
        job[1].open_all()
        return over

    monkeypatch.setattr(jobs_cli, "is_over", look)
    found = shell("job", "shelled", "events", "--follow", *options)
    assert job[0].wait(f"{WAIT_S}s") == "finished"
    assert found.exit_code == 0
    return found


def test_raw_events_are_followed_to_the_end(job: tuple[tg.Job, GatedSource], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is new is printed when it comes, once; the command ends with the job."""
    till_now = shell("job", "shelled", "events", "--raw").stdout.splitlines()
    told = [json.loads(line) for line in follow(job, monkeypatch, "--raw", "--json").stdout.splitlines()]
    assert [event["event"] for event in told] == list(range(len(told)))
    assert len(told) > len(till_now) > 0
    assert {"JobSubmitted", "TaskFinished"} <= {event["kind"] for event in told}


def test_what_happened_is_told_in_words(job: tuple[tg.Job, GatedSource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions, as `tidegate events` tells them, without details of each task."""
    lines = follow(job, monkeypatch).stdout.splitlines()
    assert lines[0].split("  ")[-1].startswith("Job shelled (")
    assert lines[-1].endswith("The job is finished")
    assert sum("Attempt 0 is running" in line for line in lines) == 1
    assert not any("is ready" in line for line in lines)


def test_what_happened_is_told_to_programs(job: tuple[tg.Job, GatedSource]) -> None:
    """The same as objects."""
    told = [json.loads(line) for line in shell("job", "shelled", "events", "--json").stdout.splitlines()]
    assert told[0]["text"].startswith("Job shelled (")
    assert {"job", "event", "at_ms", "text", "checkpoint", "attempt", "trouble"} == set(told[0])


def test_tasks_of_a_job_of_this_process(job: tuple[tg.Job, GatedSource]) -> None:
    """Each is listed; none has a process of its own."""
    head, *lines = shell("job", "shelled", "tasks").stdout.splitlines()
    assert head.split() == ["VERTEX", "SUBTASK", "ATTEMPT", "PID", "NODE", "ACTOR"]
    assert lines[0].split() == ["source", "0", "-", "-", "-", "-"]
    (told,) = {task["vertex"] for task in json.loads(shell("job", "shelled", "tasks", "--json").stdout)}
    assert told == "source"


class OnRay:
    """A job whose tasks have processes, and whose status changes with each look."""

    name = "main"

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)

    def status(self) -> str:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def vertices(self) -> tuple[VertexMetrics, ...]:
        return (VertexMetrics("totals", "sum by key", 2),)

    def processes(self) -> tuple[TaskProcessInfo, ...]:
        return (
            TaskProcessInfo(TaskId(VertexId("totals"), SubtaskIndex(1)), "main/sum by key (2/2)#3", 42, "n" * 56, 3),
        )


def test_tasks_have_their_processes() -> None:
    """One that is starting has none yet."""
    tasks = tasks_of(cast(tg.Job, OnRay("running")))
    assert [line.split("  ")[0] for line in task_lines(tasks)] == ["VERTEX", "totals", "totals"]
    assert task_lines(tasks)[2].endswith("  " + "n" * 12 + "  main/sum by key (2/2)#3")
    assert tasks[1] == {
        "vertex": "totals",
        "name": "sum by key",
        "subtask": 1,
        "attempt": 3,
        "pid": 42,
        "node_id": "n" * 56,
        "actor": "main/sum by key (2/2)#3",
    }
    assert tasks[0]["pid"] is None


def test_a_checkpoint_waits_until_the_job_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once; what is left of the time is for the checkpoint."""
    monkeypatch.setattr(jobs_cli, "POLL_S", 0.0)
    restarting = OnRay("restarting", "deploying", "running")
    assert 0 < jobs_cli.await_running(cast(tg.Job, restarting), "savepoint", "1h") <= 3_600_000
    assert capsys.readouterr().err == "main is restarting; the savepoint is taken when it runs\n"
    jobs_cli.await_running(cast(tg.Job, OnRay("failed")), "savepoint", "1h")
    with pytest.raises(tg.JobTimeoutError, match="is still restarting after 0ms; no savepoint was triggered"):
        jobs_cli.await_running(cast(tg.Job, OnRay("restarting")), "savepoint", "0ms")


@pytest.mark.parametrize(("status", "says"), [("restarting", True), ("deploying", True), ("finished", False)])
def test_a_refusal_says_when_to_ask_again(status: str, says: bool) -> None:
    """Not of a job that never will run again."""
    why = f"{CheckpointFailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING.value}: the job is {status}"
    told = str(not_taken(SnapshotKind.SAVEPOINT, why))
    assert told.endswith("; request it again when its status is running") is says


def test_what_went_wrong_is_an_exit_code(job: tuple[tg.Job, GatedSource], tmp_path: Path) -> None:
    """Wrong usage and a refusal are told apart; each is one sentence."""
    (tmp_path / "file").touch()
    unknown = shell("job", "nobody", "status")
    refused = shell("job", "shelled", "savepoint", str(tmp_path / "file"))
    assert (unknown.exit_code, refused.exit_code) == (2, 1)
    assert "no job named 'nobody' runs in this process; running: " in unknown.stderr
    assert "shelled" in unknown.stderr
    assert is_one_sentence(unknown)
    assert is_one_sentence(refused)


def test_a_time_that_is_over_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """No savepoint can be taken while a function works on a batch."""
    reached, go_on = threading.Event(), threading.Event()

    def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        reached.set()
        assert go_on.wait(WAIT_S)
        return batch

    rows = pa.table({"x": [1, 2, 3]})
    with local() as env:
        env.from_batches(rows).map_batches(hold, schema=rows.schema).to_table(str(tmp_path / "table"))
        job = env.execute("held", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        until("a batch", reached.is_set)
        late = shell("job", "held", "savepoint", str(tmp_path / "savepoints"), "--timeout", "0ms")
        go_on.set()
        job.wait(f"{WAIT_S}s")
    assert late.exit_code == 3
    assert is_one_sentence(late)


def is_one_sentence(found: Result) -> bool:
    """Whether a command printed an error of one line, and nothing else."""
    return (found.stdout, found.stderr.startswith("Error: "), found.stderr.count("\n")) == ("", True, 1)


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0 s"),
        (-5_000, "0 s"),
        (999, "0 s"),
        (59_999, "59 s"),
        (60_000, "1 min 0 s"),
        (3_600_000, "1 h"),
        (5_400_000, "1 h 30 min"),
        (86_400_000 * 40 + 3_600_000, "40 d 1 h"),
    ],
)
def test_durations_have_two_units(duration_ms: int, text: str) -> None:
    """The largest ones."""
    assert duration_text(duration_ms) == text


def test_a_list_says_what_is_known() -> None:
    """One whose coordinator does not answer is in it, too, with since when."""
    silent = SilentJob(60_000, "its coordinator has not answered for 30 s")
    assert job_lines([], 0) == ["No job runs on this Ray"]
    fresh = JobOverview(replace(CARD, name="fresh"), replace(RUNNING, last_checkpoint=None), None)
    lines = job_lines([("delays", OVERVIEW), ("fresh", fresh), ("gone", silent)], 61_000)
    assert lines[-1] == f"gone: its coordinator has not answered for 30 s, since {time_text(60_000)}"
    assert [line.split() for line in lines[1:-1]] == [
        ["delays", "running", "1", "min", "0", "s", "2", "17,", "3", "s", "ago", "delays-1"],
        ["fresh", "running", "1", "min", "0", "s", "2", "-", "delays-1"],
        ["gone", "unreachable", "-", "-", "-", "-"],
    ]
    assert json.loads(jobs_as_json([("delays", OVERVIEW), ("gone", silent)], 61_000)) == [
        {
            "name": "delays",
            "id": "delays-1",
            "state": "running",
            "uptime_ms": 60_000,
            "attempt": 2,
            "last_checkpoint": 17,
            "last_checkpoint_at_ms": 58_000,
            "detached": True,
            "root": "s3://bucket/ckpt",
        },
        {"name": "gone", "state": "unreachable", "since_ms": 60_000, "why": silent.why},
    ]


def test_a_status_leaves_out_what_is_not_known() -> None:
    """Rows are told by vertex."""
    facts = {"name": "delays", "reason": None, "superseded": False, "attempt": 0, "rows_in": {"source": 12_000}}
    assert [line.split() for line in status_lines(facts)] == [
        ["name", "delays"],
        ["attempt", "0"],
        ["rows_in.source", "12,000"],
    ]
