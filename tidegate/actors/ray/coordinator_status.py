"""What a coordinator publishes for drivers, lists of jobs and web servers: status, answers to requests, task metrics.

Rules:

- `StatusEndpoint` reads what the mailbox has published. It waits only at the end of a job, for answers that are on
  their way. A web server gets one bounded snapshot, and None while the log is replayed.
- An answer to a request for a checkpoint or savepoint is kept after it was given, because the reply may get lost and
  the driver then asks again. The newest answers are kept. Requests in the log of a predecessor are answered from it.
- Reports of tasks may be late: only reports of the current attempt of a task count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import ray

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.ray.health_endpoint import ProcessInfo, process_info
from tidegate.actors.runtimes.job_snapshot import REQUESTS_MAX, About, JobSnapshot, Known, snapshot_of
from tidegate.actors.runtimes.running_job import Answer, JobOverview, JobProgress, TaskProcessInfo
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, VertexMetrics, vertices_of
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import now_ms
from tidegate.storage.ids import AttemptNumber

if TYPE_CHECKING:
    from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
    from tidegate.actors.coordinator.job_spec import JobSpec
    from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
    from tidegate.actors.drivers.job_context import JobContext
    from tidegate.actors.ray.attempt_supervisor import AttemptSupervisor
    from tidegate.actors.runtimes.running_job import JobCard, JobProgress

END_WAIT_S = 5.0
"""How long a job that is over is waited for to answer, in all: answers follow the end at once, or never come."""


class StatusEndpoint:
    """A part of `CoordinatorProcess`."""

    if TYPE_CHECKING:
        _spec: JobSpec
        _card: JobCard
        _context: JobContext
        _host: CoordinatorDriver | None
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
            host.job_history,
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


KEPT_MAX = 100
"""More than drivers ask for within the time in which they repeat a question."""

LOST = Answer(None, "the coordinator that was asked for it was lost before it had written that down")


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as its coordinator's process sees it.

    `started`: the log was replayed; `ended`: nothing changes any more; `broken`: why the coordinator cannot go on.
    """

    progress: JobProgress
    started: bool
    ended: bool
    broken: str | None
    statistics: CheckpointStatistics | None = None
    """Of the checkpoints, once the job has ended: then nobody can be asked for them any more."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """To requests, likewise."""
    vertices: tuple[VertexMetrics, ...] = ()
    """What the tasks told of themselves last, likewise."""


class Answers:
    """Those of one coordinator. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Answer]] = {}

    def expect(self, request: str) -> bool:
        """There will be an answer to this request; whether the request is new."""
        with self._lock:
            if request in self._futures:
                return False
            given = [name for name, future in self._futures.items() if future.done()]
            for name in given[: max(0, len(given) - KEPT_MAX)]:
                del self._futures[name]
            self._futures[request] = Future()
            return True

    def give(self, request: str, answer: Answer) -> None:
        """The answer, unless nobody asked here, or it was given before."""
        with self._lock:
            future = self._futures.get(request)
            if future is not None and not future.done():
                future.set_result(answer)

    def inherit(self, known: Mapping[str, Answer | None]) -> None:
        """What a predecessor has left: its answers, and what is still to be answered (None)."""
        for request, answer in known.items():
            self.expect(request)
            if answer is not None:
                self.give(request, answer)

    def knows(self, request: str) -> bool:
        """Whether there is, or will be, an answer."""
        with self._lock:
            return request in self._futures

    def wait(self, request: str, wait_s: float) -> Answer | None:
        """The answer, None if it takes longer; `LOST` for a request that is not known."""
        with self._lock:
            future = self._futures.get(request)
        if future is None:
            return LOST
        try:
            return future.result(wait_s)
        except TimeoutError:
            return None

    def given(self) -> dict[str, Answer]:
        """All answers that are kept."""
        with self._lock:
            return {request: future.result() for request, future in self._futures.items() if future.done()}


class TaskReports:
    """Those of one job. `told` is called on one thread, the rest on any."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._rows_in: dict[TaskId, tuple[AttemptNumber, int]] = {}
        self._metrics: dict[TaskId, SubtaskMetrics] = {}

    def told(self, attempt: AttemptNumber, task: TaskId, rows_in: int, metrics: SubtaskMetrics | None) -> None:
        """So many rows have come into a task. `metrics`: None where they have not changed."""
        self._rows_in[task] = (attempt, rows_in)
        if metrics is not None:
            self._metrics[task] = metrics

    def rows_in(self, state: CoordinatorState) -> dict[str, int]:
        """Rows that have come in, by vertex."""
        found: dict[str, int] = {}
        for task, (attempt, rows) in list(self._rows_in.items()):
            if attempt == state.attempt_of(task):
                found[task.vertex] = found.get(task.vertex, 0) + rows
        return found

    def vertices(self, host: CoordinatorDriver | None) -> tuple[VertexMetrics, ...]:
        """All metrics, by vertex. `host`: None while the log is replayed."""
        state = CoordinatorState() if host is None else host.machine.state
        told = dict(self._metrics)
        return vertices_of(self._graph, told, {task: state.attempt_of(task) for task in told})
