"""`keep_events`: a job's whole history can be read, however often its log was folded and cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandRunner
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from waiting import until

from tidegate import recovery
from tidegate.actors.hosts.coordinator import log_writer
from tidegate.cli import app
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.files.file_system_store import open_store

CHECKPOINTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_a_long_history_is_whole_if_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """From the submission to the end, for programs and in the shell; else it begins behind what was cut."""
    monkeypatch.setattr(log_writer, "ENTRIES_A_SNAPSHOT", 4)
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
    assert recovery.verify(f"{tmp_path}/{job.job_id}/chk-{job.progress().last_checkpoint}").ok
