"""`keep_events`: a job's whole history can be read, however often its log was folded and cut."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import CommandRunner
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.drivers import event_log_writer
from tidegate.cli.main import app
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.files.file_system_store import open_store

CHECKPOINTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_a_long_history_is_whole_if_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """From the submission to the end, for programs and in the shell; else it begins behind what was cut."""
    monkeypatch.setattr(event_log_writer, "ENTRIES_A_SNAPSHOT", 4)
    with opening(GatedSource(40, gates=[20])) as source, local(1) as env:
        env.from_source(source).collect()
        job = env.execute("clicks", checkpoints=config(tmp_path, keep_events=keeps), restart=NO_RESTART)
        source.await_gate(20)
        for _ in range(CHECKPOINTS):
            job.trigger_checkpoint("4min")
        log = EventLog(open_store(str(tmp_path)), job.job_id)
        until("the log is cut", lambda: 1 not in log.indices(), log.indices)
        source.open_all()
        assert job.wait("4min") == "finished"

    kinds = [type(event).__name__ for event in job.events()]
    numbers = recovery.history(str(tmp_path), job="clicks")["event"].to_pylist()
    told = CommandRunner().invoke(app, ["events", str(tmp_path)]).output
    assert bool(log.segments.spans()) == keeps
    assert ("JobSubmitted" in kinds) == keeps
    assert (numbers == list(range(len(numbers)))) == keeps
    assert ("was submitted" in told) == keeps
    assert ("folded into a snapshot" in told) != keeps
    _check_states(str(tmp_path), numbers, keeps)
    assert recovery.verify(f"{tmp_path}/{job.job_id}/chk-{job.progress().last_checkpoint}").ok


def _check_states(root: str, numbers: list[int], keeps: bool) -> None:
    """The state behind each event that is left, by its number and by its moment; before these there is an error."""
    states: dict[int, recovery.JobState] = {}
    refused: list[str] = []
    for number in numbers:
        try:
            states[number] = recovery.job_state(root, at=number)
        except tg.ConfigurationError as error:
            refused.append(str(error))
    first, last = states[min(states)], states[max(states)]
    assert (first.event == 0) == keeps
    assert [*states] == numbers[len(refused) :]
    assert all(f"reaches back to event {first.event}" in error for error in refused)
    assert (last.status, last.completed_checkpoints) == ("finished", recovery.job_state(root).completed_checkpoints)
    assert last.completed_checkpoints > CHECKPOINTS
    completed = [state.completed_checkpoints for state in states.values()]
    assert completed == sorted(completed)
    moment = datetime.fromtimestamp(last.at_ms / 1000, UTC)
    assert recovery.job_state(root, at=moment).status == "finished"
    with pytest.raises(tg.ConfigurationError, match=f"has no event {max(numbers) + 1}: its log ends with event"):
        recovery.job_state(root, at=max(numbers) + 1)
    told = CommandRunner().invoke(app, ["events", root, "--state-at", str(max(numbers)), "--json"])
    assert json.loads(told.output)["status"] == "finished"
    if not keeps:
        with pytest.raises(tg.ConfigurationError, match="folded into a snapshot and cut; keep_events=True"):
            recovery.job_state(root, at=datetime(2000, 1, 1))
