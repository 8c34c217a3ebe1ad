"""What a coordinator's process on Ray answers a web server at the end of a job; without Ray."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_jobs import running_job

from tidegate.actors.coordinator.coordinator_state import JobStatus
from tidegate.actors.ray import coordinator_status as shown
from tidegate.actors.ray.coordinator_status import END_WAIT_S, Answers, StatusEndpoint
from tidegate.actors.runtimes.job_snapshot import JobSnapshot, Known
from tidegate.actors.runtimes.running_job import Answer
from tidegate.storage.ids import CheckpointId

DONE = Answer(CheckpointId(7), None, "/savepoints/7")


class Coordinator(StatusEndpoint):
    """One whose job runs, with requests that nobody has answered."""

    def __init__(self, *requests: str) -> None:
        host: Any = SimpleNamespace(machine=SimpleNamespace(state=None), job_history=None)
        nothing: Any = SimpleNamespace(
            processes=tuple, vertices=lambda host: (), recoveries=SimpleNamespace(ends={}), graph=None
        )
        self._host, self._deployment, self._reports = host, nothing, nothing
        self._card = self._context = self._spec = nothing
        self.answers = Answers()
        self._answers, self._ended = self.answers, threading.Event()
        for request in requests:
            self.answers.expect(request)

    def end(self) -> None:
        """The job has ended."""
        self._ended.set()

    def _progress(self) -> Any:
        return None

    def show(self, monkeypatch: pytest.MonkeyPatch, status: JobStatus, *requests: str, meanwhile: Any = None) -> Any:
        """A snapshot of the job in this state; something happens while it is made."""

        def made(*_: object, **__: object) -> JobSnapshot:
            found = replace(running_job().snapshot, status=status)
            if meanwhile is not None:
                meanwhile()
            return found

        monkeypatch.setattr(shown, "snapshot_of", made)
        monkeypatch.setattr(shown, "About", SimpleNamespace(of=lambda context, spec: None))
        found = self.snapshot(Known(), requests)
        assert found is not None
        return dict(found.answers)


def test_the_snapshot_that_shows_the_end_has_the_answer_to_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends while it is made, and the answer comes after that: nobody may take the stop for refused."""
    one = Coordinator("stop")
    later: list[threading.Thread] = []

    def end() -> None:
        later.append(threading.Thread(target=one.answers.give, args=("stop", DONE)))
        later[0].start()

    assert one.show(monkeypatch, JobStatus.SUSPENDED, "stop", meanwhile=end) == {"stop": DONE}
    later[0].join()


def test_the_end_has_the_answer_to_a_request_that_came_after_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sent its question before its client asked for the stop, and does not look at the ended job again."""
    one = Coordinator("stop")
    one.answers.give("stop", DONE)
    assert one.show(monkeypatch, JobStatus.SUSPENDED) == {"stop": DONE}


def test_while_a_job_runs_nobody_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there yet is left out, and asked for again."""
    one = Coordinator("open", "given")
    one.answers.give("given", DONE)
    monkeypatch.setattr(shown, "END_WAIT_S", 1e9)
    assert one.show(monkeypatch, JobStatus.RUNNING, "open", "given") == {"given": DONE}


def test_all_requests_have_one_limit_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that nobody answers any more would hold up the page of every job otherwise."""
    one, now_s, waited = Coordinator("a", "b", "c"), [100.0], []

    def wait(request: str, wait_s: float) -> Answer | None:
        waited.append(wait_s)
        now_s[0] += min(wait_s, 3.0)
        return DONE if request == "c" else None

    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(one.answers, "wait", wait)
    assert one.show(monkeypatch, JobStatus.FINISHED, "a", "b", "c") == {"c": DONE}
    assert waited == [END_WAIT_S, END_WAIT_S - 3.0, 0.0]


def test_what_was_not_answered_when_the_end_was_told_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then that is the answer, at once."""
    one = Coordinator("stop")
    one.end()
    monkeypatch.setattr(shown, "END_WAIT_S", 1e9)
    assert one.show(monkeypatch, JobStatus.FINISHED, "stop") == {"stop": Answer(None, "the job has ended")}
