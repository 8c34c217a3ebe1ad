"""How a program's settings become lines of its driver's log, and reach the processes of its jobs."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config

import tidegate as tg
from tidegate.actors.drivers.log_lines import LogSettings

TASKS = "tidegate.actors.drivers.task_driver"


def run(folder: Path, settings: dict[str, object], **arguments: str) -> None:
    """A small job whose function fails once, on a value that looks like a line of the log."""

    def plus(row: dict[str, int]) -> dict[str, int]:
        if row["x"] == 7 and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise ValueError("bad\n2026-01-01 INFO forged")
        return {"x": row["x"] + 1}

    with tg.StreamEnvironment.local(config=settings, **arguments) as env:  # type: ignore[arg-type]
        rows = env.from_batches(pa.table({"x": range(10)}), uid="rows")
        rows.map(plus, schema=pa.schema([("x", pa.int64())]), uid="plus").collect()
        restart = tg.RestartStrategy.fixed_delay(1, "1ms")
        assert env.execute("logged", checkpoints=config(folder / "c"), restart=restart).wait("4min") == "finished"


def test_json_tells_the_life_of_tasks_and_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object a line, with job, attempt, task, the event and its cause; a user's value is an escaped excerpt."""
    run(tmp_path, {"log.format": "json", "log.level": "info"})
    written = capsys.readouterr().err.splitlines()
    said = [json.loads(line) for line in written if line.startswith("{")]
    assert not any(line.startswith("2026-01-01") for line in written)
    tasks = [
        (one["attempt"], one["message"].partition(" of attempt ")[2][2:]) for one in said if one["logger"] == TASKS
    ]
    for attempt in (0, 1):
        assert [what for of, what in tasks if of == attempt][:1] == ["begins afresh"]
        assert (attempt, "is ready") in tasks
    assert (1, "has finished") in tasks
    failed = next(one for one in said if "failed: " in one["message"] and one["logger"].endswith("coordinator"))
    assert (failed["job"], failed["attempt"], failed["level"], failed["process"]) == ("logged", 0, "INFO", "driver")
    assert "bad\\n2026-01-01 INFO forged" in failed["message"]
    deploying = next(one for one in said if "Deploying attempt 1" in one["message"])
    assert deploying["event"] > failed["event"] == deploying["cause"]


def test_a_level_of_the_call_counts_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And a logger may have its own; text goes where the program's handlers are."""
    settings = {"log.level": "DEBUG", "log.levels": {TASKS: "ERROR"}}
    run(tmp_path, settings, log_level="INFO")
    assert logging.getLogger("tidegate").level == logging.INFO
    assert not [record for record in caplog.records if record.name == TASKS]
    assert [record for record in caplog.records if record.name == "tidegate.actors.coordinator"]


def test_a_task_logs_the_parts_of_each_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG: barriers as they come, the alignment, the synchronous and the asynchronous part, with their times."""
    with tg.StreamEnvironment.local(2, log_level="DEBUG") as env:
        rows = env.from_batches(pa.table({"k": range(8)}), splits=2)
        rows.key_by("k").aggregate(n=tg.count(), emit="final").to_table(str(tmp_path / "t"))
        assert env.execute("parts", checkpoints=config(tmp_path / "c"), restart=NO_RESTART).wait("4min") == "finished"
    logged = [record for record in caplog.records if record.name == TASKS and record.levelno == logging.DEBUG]
    said = [re.sub(r"\d[\d,]* (ms|bytes)", r"N \1", record.getMessage()) for record in logged]
    keyed = next(each.split()[1] for each in said if "aggregate" in each and "[0] " in each)
    parts = [each.removeprefix(f"Task {keyed} of attempt 0 ") for each in said if each.startswith(f"Task {keyed} ")]
    barrier = r"received the barrier of checkpoint 1 on channel e\d+:\d>0, N ms after its trigger"
    assert len([each for each in parts[:2] if re.fullmatch(barrier, each)]) == 2
    assert parts[2:] == [
        "aligned checkpoint 1 in N ms",
        "took the synchronous part of checkpoint 1 in N ms",
        "completed the asynchronous part of checkpoint 1 in N ms: N bytes written of N bytes of state",
    ]
    assert any("received the barrier of checkpoint 1 from the coordinator" in each for each in said)
    assert all(record.tidegate_fields["checkpoint"] == 1 for record in logged)  # type: ignore[attr-defined]


def test_settings_reach_the_processes_of_a_job(tmp_path: Path) -> None:
    """On Ray they are other processes."""
    settings = {"log": {"level": "debug", "format": "JSON", "levels": {"tidegate.actors": "error"}, "rows": True}}
    env = tg.StreamEnvironment.local(config=settings)
    env.from_batches(pa.table({"x": [1]})).collect()
    planned = env.plan("job", checkpoints=config(tmp_path), restart=NO_RESTART)
    assert planned.context.log == LogSettings("DEBUG", {"tidegate.actors": "ERROR"}, as_json=True, rows=True)


def test_nothing_is_set_up_where_nothing_is_said() -> None:
    """A library leaves logging to the program."""
    before = logging.getLogger("tidegate").level, logging.getLogger("tidegate").handlers[:]
    tg.StreamEnvironment.local(config={}).close()
    assert before == (logging.getLogger("tidegate").level, logging.getLogger("tidegate").handlers[:])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"log.level": "loud"}, "'loud' is none of DEBUG, INFO"),
        ({"log.levels": {"tidegate": "loud"}}, "'loud' is none of DEBUG"),
        ({"log.levels": {"tidegate": None}}, "has a logger without a level"),
        ({"log.levels": "INFO"}, "not a mapping"),
        ({"log.format": "xml"}, "none of 'text', 'json'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], complaint: str) -> None:
    """Before anything is set up."""
    with pytest.raises(tg.ConfigurationError, match=complaint):
        tg.StreamEnvironment.local(config=settings)
