"""`Shown`: what a coordinator's process answers who only looks: drivers, lists of jobs, and web servers.

Rules: it reads what the mailbox has published, and waits for nothing but, at the end of a job, for answers that are on
their way. A web server gets one bounded snapshot; while the log is replayed there is none.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from tidegate.actors.ray.process.process_info import ProcessInfo, process_info
from tidegate.actors.runtimes.job_snapshot import REQUESTS_MAX, About, JobSnapshot, Known, snapshot_of
from tidegate.actors.runtimes.running_job import Answer, JobOverview, TaskProcessInfo
from tidegate.storage.clock import now_ms

if TYPE_CHECKING:
    from tidegate.actors.coordinator.job.job_spec import JobSpec
    from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointStatistics
    from tidegate.actors.drivers.coordinator_host import CoordinatorHost
    from tidegate.actors.drivers.job_context import JobContext
    from tidegate.actors.ray.coordinator.answers import Answers
    from tidegate.actors.ray.coordinator.attempt_supervisor import AttemptSupervisor
    from tidegate.actors.ray.coordinator.task_reports import TaskReports
    from tidegate.actors.runtimes.running_job import JobCard, JobProgress

END_WAIT_S = 5.0
"""How long a job that is over is waited for to answer, in all: answers follow the end at once, or never come."""


class Shown:
    """A part of `CoordinatorProcess`."""

    if TYPE_CHECKING:
        _spec: JobSpec
        _card: JobCard
        _context: JobContext
        _host: CoordinatorHost | None
        _deployment: AttemptSupervisor

        def _progress(self) -> JobProgress: ...
        def _statistics(self) -> CheckpointStatistics: ...

        _answers: Answers
        _ended: threading.Event
        _reports: TaskReports

    @ray.method(concurrency_group="ask")
    def overview(self) -> JobOverview:
        """What a list of jobs shows."""
        newest = self._statistics().latest_completed
        return JobOverview(self._card, self._progress(), None if newest is None else newest.ended_at_ms)

    @ray.method(concurrency_group="ask")
    def statistics(self) -> CheckpointStatistics:
        """Statistics of the checkpoints so far."""
        return self._statistics()

    @ray.method(concurrency_group="ask")
    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """The process of each task, as far as they have started."""
        return self._deployment.processes()

    @ray.method(concurrency_group="ask")
    def identify(self) -> ProcessInfo:
        """Where this is."""
        return process_info()

    @ray.method(concurrency_group="ask", enable_task_events=False)
    def snapshot(self, known: Known, requests: tuple[str, ...] = ()) -> JobSnapshot | None:
        """The job now, without what is known, and the answers to these requests; None while the log is replayed.

        The answers are those after it: a stop has its answer with the end that it has led to, or none would come.
        """
        host = self._host
        if host is None:
            return None
        shown = snapshot_of(
            self._card,
            About.of(self._context, self._spec),
            host.machine.state,
            host.chronicle,
            self._progress(),
            now_ms(),
            known=known,
            processes=self._deployment.processes(),
            vertices=self._reports.vertices(host),
            recovery_ends=self._deployment.recoveries.ends,
        )
        asked, wait_s = requests[:REQUESTS_MAX], END_WAIT_S if shown.status.terminal else 0.0
        deadline = time.monotonic() + wait_s
        answers = {name: self._answer_until(name, deadline) for name in asked}
        return replace(shown, answers={name: answer for name, answer in answers.items() if answer is not None})

    def _answer_until(self, request: str, deadline: float) -> Answer | None:
        wait_s = 0.0 if self._ended.is_set() else max(0.0, deadline - time.monotonic())
        answer = self._answers.wait(request, wait_s)
        return Answer(None, "the job has ended") if answer is None and self._ended.is_set() else answer
