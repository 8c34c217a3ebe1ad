"""Decisions of a real job are explained by its event log, which is also there as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from command_line import CommandRunner
from failed_once import job_that_failed_once

import tidegate as tg
from tidegate import recovery
from tidegate.cli.main import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of which a task has failed once."""
    return job_that_failed_once(tmp_path_factory.mktemp("explained"))


def test_a_checkpoint_is_explained_from_its_first_cause(folder: Path) -> None:
    """The last step is the decision, the first one began by itself, and numbers rise."""
    (chk,) = folder.glob("chk-*")

    found = recovery.explain(str(chk))

    assert found.decision == f"checkpoint {chk.name[4:]} of job {folder.name} was completed"
    assert found.steps[-1].kind == "MetadataWritten"
    assert [step.event for step in found.steps] == sorted({step.event for step in found.steps})
    assert len(found.steps) > 1
    assert found.missing == ""
    lines = str(found).splitlines()
    assert lines[0] == f"{found.decision}, because:"
    assert len(lines) == 1 + len(found.steps)
    same = recovery.explain(str(folder.parent), checkpoint=int(chk.name[4:]), job="watched")
    assert found == same


def test_an_attempt_is_explained_by_the_failure_before_it(folder: Path) -> None:
    """The error of the user's function is in the chain."""
    found = recovery.explain(str(folder), attempt=1)
    assert any(step.kind == "TaskFailed" and "row 150 is odd" in step.text for step in found.steps)
    assert recovery.explain(str(folder), event=found.steps[-1].event).steps == found.steps


def test_what_the_log_does_not_know_is_said(folder: Path) -> None:
    """Not an empty chain."""
    with pytest.raises(tg.ConfigurationError, match=r"has no event of checkpoint 99: it has events of 1 to \d+"):
        recovery.explain(str(folder), checkpoint=99)
    with pytest.raises(tg.ConfigurationError, match="exactly one of checkpoint=, attempt= and event="):
        recovery.explain(str(folder))
    with pytest.raises(tg.ConfigurationError, match="there is no event log under"):
        recovery.history(str(folder / "chk-1"))


def test_the_history_is_a_table(folder: Path, tmp_path: Path) -> None:
    """A row an event; causes are numbers of earlier events; the command writes the same."""
    table = recovery.history(str(folder))

    numbers = table.column("event").to_pylist()
    assert numbers == list(range(len(numbers)))
    assert all(
        cause is None or cause < number for number, cause in zip(numbers, table["cause"].to_pylist(), strict=True)
    )
    assert {"JobSubmitted", "TaskFailed", "MetadataWritten"} <= set(table["kind"].to_pylist())
    failed = table.filter(pa.compute.equal(table["kind"], "TaskFailed")).to_pylist()
    assert [(row["attempt"], row["job"]) for row in failed] == [(0, folder.name)]

    file = tmp_path / "history.arrow"
    result = CommandRunner().invoke(app, ["events", str(folder), "--arrow", str(file)])
    assert result.output == f"{table.num_rows} events are in {file}\n"
    with pa.ipc.open_file(str(file)) as written:
        assert written.read_all() == table


def test_the_command_explains(folder: Path) -> None:
    """As text and as JSON."""
    (chk,) = folder.glob("chk-*")
    found = recovery.explain(str(chk))
    assert CommandRunner().invoke(app, ["checkpoints", "explain", str(chk)]).output == f"{found}\n"
    as_json = json.loads(CommandRunner().invoke(app, ["checkpoints", "explain", str(chk), "--json"]).output)
    assert as_json["decision"] == found.decision
    assert len(as_json["steps"]) == len(found.steps)
