"""`tidegate events`: a line for each decision, of a job that ran and of logs that are not whole."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_line import CommandRunner
from coordinators import SINK, SPEC, Coordinator
from failed_once import job_that_failed_once
from typer.testing import Result

from tidegate.actors.coordinator import events as ev
from tidegate.actors.drivers.event_log_writer import StoredFold
from tidegate.cli.main import app
from tidegate.recovery.state_processor.timeline import read_timeline
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.codec import encode
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import EventId, Generation


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of which a task has failed once."""
    return job_that_failed_once(tmp_path_factory.mktemp("timeline"))


def events(*arguments: object) -> Result:
    """Run `tidegate events`."""
    return CommandRunner().invoke(app, ["events", *map(str, arguments)])


def texts(result: Result) -> list[str]:
    """The lines without numbers and times."""
    assert result.exit_code == 0, result.output
    found = (re.match(r" *[\d?]+  \d{4}-\d\d-\d\d [\d:.]+  (.*)", line) for line in result.output.splitlines())
    return [match[1] for match in found if match is not None]


def times_left_out(text: str) -> str:
    """A line without what depends on the machine."""
    return re.sub(r"\d+(\.\d)? (ms|s|kB|B)", "N", text)


def test_a_job_is_told_in_a_few_lines(job_folder: Path) -> None:
    """From the submission to the end, with the one failure and the one checkpoint."""
    told = [times_left_out(text) for text in texts(events(job_folder))]
    failed = (
        "Task from_batches-0[0] of attempt 0 failed: OperatorError: operator 'map' (uid 'map') failed on subtask 1 "
        "of 1: ValueError: row 150 is odd; row 0 of the batch: <withheld>"
    )
    # Behind it the frames of the function that failed, in the same line.
    assert "failed_once.py" in told[3]
    assert [*told[:3], told[3].partition("; File")[0], *told[4:]] == [
        "Job watched (" + job_folder.name + ") was submitted, 1 task. It starts afresh",
        "Deploying attempt 0 afresh: its task",
        "Attempt 0 is running, N after its deployment",
        failed,
        "Restarting its task as attempt 1 in N",
        "Deploying attempt 1 afresh: its task",
        "Attempt 1 is running, N after its deployment, N after the failure",
        "Completed checkpoint 1 (N, N)",
        "The job is finished",
    ]


def test_all_that_is_known_of_one_checkpoint(job_folder: Path) -> None:
    """What each task took for it, and what became of its output."""
    told = texts(events(job_folder.parent, "--job", "watched", "--checkpoint", 1))
    assert [text.split()[0] for text in told] == ["Triggering", "from_batches-0[0]", "Completed", "The"]
    assert "start delay" in told[1]
    assert texts(events(job_folder, "--checkpoint", 7)) == []
    assert "its log has no such lines" in events(job_folder, "--checkpoint", 7).output


def test_restarts_alone(job_folder: Path) -> None:
    """Failures, and what was deployed because of them."""
    told = texts(events(job_folder, "--restarts"))
    assert [text.split()[0] for text in told] == ["Deploying", "Attempt", "Task", "Restarting", "Deploying", "Attempt"]


def test_since_a_moment(job_folder: Path) -> None:
    """A duration, or a date and time; anything else is an error."""
    later = datetime.now(UTC) + timedelta(days=1)
    assert len(texts(events(job_folder, "--since", "1d"))) == 9
    assert texts(events(job_folder, "--since", later.isoformat())) == []
    assert texts(events(job_folder, "--since", later.replace(tzinfo=None).isoformat())) == []
    wrong = events(job_folder, "--since", "yesterday")
    assert wrong.exit_code == 2
    assert "neither a duration, such as 10min, nor a date" in wrong.output


def test_json_is_one_object_a_line(job_folder: Path) -> None:
    """With the number of the event that a decision follows from, for `--why`."""
    objects = [json.loads(line) for line in events(job_folder, "--json").output.splitlines()]
    (failed,) = (found for found in objects if found["text"].startswith("Task"))
    assert (failed["attempt"], failed["trouble"], failed["job"]) == (0, True, job_folder.name)
    assert "failed" in events(job_folder, "--why", failed["event"]).output


# --- logs that are not whole --------------------------------------------------------------------------------------


class Logged(Coordinator):
    """A coordinator each of whose events is an entry."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self.log, self.index = log, 0

    def tell(self, event: ev.CoordinatorEvent) -> list[object]:  # type: ignore[override]
        entry = LogEntry(self.index, Generation(1), event.at_ms, "n", (event,), EventId(self.index), (None,))
        self.log.append(entry)
        self.index += 1
        return list(super().tell(event))

    def fold(self) -> int:
        """Store the state. Returns the index."""
        self.log.write_snapshot(self.index, StoredFold(encode(self.state), (0,), self.index))
        return self.index

    def checkpoint(self, number: int) -> None:
        """Take one."""
        self.request(f"r{number}")
        self.acknowledge_all(number)
        self.written(number)
        self.committed(number)


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A root."""
    return open_store(str(tmp_path))


def test_a_log_that_was_cut_begins_with_its_snapshot(store: FileSystemStore) -> None:
    """What follows from the entries behind it is known, and it says that there was more. Where the log ends, it says
    how far a checkpoint has come."""
    job = Logged(EventLog(store, SPEC.job_id))
    job.run()
    job.checkpoint(1)
    job.fold()
    job.checkpoint(2)
    job.request("r3")
    cut = job.fold()
    job.acknowledge_all(3)
    job.written(3)
    job.committed(3)
    job.request("r4")
    job.ack(4, SINK)
    job.log.truncate(cut)

    result = events(store.url)

    told = texts(result)
    assert "older events were folded into a snapshot, and cut" in result.output
    assert told == [
        "A user requested a checkpoint (request r3)",
        "Completed checkpoint 3 (20 B, 0 ms)",
        "A user requested a checkpoint (request r4)",
    ]
    assert encode(read_timeline(job.log, SPEC.job_id).state) == encode(job.state), "nothing was taken in twice"
    assert "checkpoint 4 is 0 ms old and waits for 1 tasks" in result.output
    assert "the job is running" in result.output


def test_behind_a_hole_events_speak_for_themselves(store: FileSystemStore) -> None:
    """Nobody knows what was decided there. The exit code is that of an entry that cannot be read."""
    job = Logged(EventLog(store, SPEC.job_id))
    job.run()
    store.write(f"{SPEC.job_id}/events/{job.index:012d}", [b"damaged"])
    job.index += 1
    job.checkpoint(1)

    result = events(store.url)

    assert result.exit_code == 1
    assert "decisions from there on are unknown" in result.output
    assert "Checkpoint 1 was complete" in result.output
    assert "Completed checkpoint" not in result.output


def test_an_event_that_does_not_follow_is_named(store: FileSystemStore) -> None:
    """The machine refuses it, as it would refuse to go on from this log; the list goes on."""
    log = EventLog(store, SPEC.job_id)
    for index in range(2):
        event = ev.JobSubmitted(index, SPEC)
        log.append(LogEntry(index, Generation(1), index, "n", (event,), EventId(index), (None,)))
    result = events(store.url)
    assert "event 1 does not follow from earlier events" in result.output
    assert len(texts(result)) == 3


# --- the log of a coordinator -------------------------------------------------------------------------------------


def test_a_coordinator_logs_the_same_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At INFO, with the job's name, each once its event is in the log. Checkpoints that go well have a logger."""
    with caplog.at_level(logging.INFO, logger="tidegate.actors.coordinator"):
        folder = job_that_failed_once(tmp_path)
    of_all = [r for r in caplog.records if r.name.startswith("tidegate.actors.coordinator")]
    # That the job restarts is a warning; nothing else is.
    assert [r.getMessage().split()[1] for r in of_all if r.levelno > logging.INFO] == ["Restarting"]
    logged = [r.getMessage().removesuffix("; RestartStrategy.none() fails at once") for r in of_all]
    told = [f"watched: {text}" for text in texts(events(folder))]
    assert [line for line in logged if "Triggering" not in line] == told
    assert {r.getMessage().split()[1] for r in of_all if r.name.endswith(".checkpoints")} == {"Triggering", "Completed"}
