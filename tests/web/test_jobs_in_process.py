"""`LocalJobs`: what a web server hears of the jobs of its process."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_jobs import JOB_ID, running_job

from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.running_job import Answer, SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId
from tidegate.web import jobs_in_process
from tidegate.web.jobs import Question
from tidegate.web.jobs_in_process import LocalJobs


def test_the_look_that_shows_the_end_has_the_answer_to_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends, and its answer comes, while the look is under way: nobody may take the stop for refused."""
    released = threading.Event()
    answer = Answer(CheckpointId(7), None, "/savepoints/7")

    def request(wanted: SnapshotRequest, timeout_s: float) -> Answer:
        assert released.wait(timeout_s)
        return answer

    def ends_meanwhile(job: Any, known: object) -> Any:
        snapshot = replace(running_job().snapshot, status=JobStatus.SUSPENDED)
        released.set()
        return snapshot

    job = SimpleNamespace(card=SimpleNamespace(job_id=JOB_ID), over=False, request=request)
    monkeypatch.setattr(jobs_in_process, "jobs_here", lambda: [job])
    monkeypatch.setattr(jobs_in_process, "_snapshot", ends_meanwhile)
    jobs = LocalJobs()
    jobs._known[JOB_ID] = job  # type: ignore[assignment]
    jobs.request(JOB_ID, "stop", SnapshotRequest(SnapshotKind.SUSPEND, "/savepoints"))
    (snapshot,) = jobs.look({JOB_ID: Question(requests=())}).snapshots
    jobs.close()
    assert dict(snapshot.answers) == {"stop": answer}
