"""The status that a coordinator publishes for drivers, lists of jobs and web servers, and its answers to requests.

Rules:

- `StatusEndpoint` reads what the mailbox has published. It waits only at the end of a job, for answers that are on
  their way. A web server gets a snapshot of limited size, and None while the log is replayed.
- The answer to a request for a checkpoint or savepoint is kept, because the reply may get lost and the driver then
  repeats the call. Only the newest answers are kept. A new coordinator answers the requests in its log.
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
"""Seconds for which the end of a job waits for outstanding answers, in total. They follow the end at once, or
never come.
"""


class StatusEndpoint:
    """The methods of the coordinator's actor that return the status of the job."""

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
        """Returns the overview of this job for a list of jobs."""
        newest = self._statistics().latest_completed
        return JobOverview(self._card, self._progress(), None if newest is None else newest.ended_at_ms)

    @ray.method(concurrency_group="ask")
    def statistics(self) -> CheckpointStatistics:
        """Returns the statistics of the checkpoints so far."""
        return self._statistics()

    @ray.method(concurrency_group="ask")
    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """Returns the process of each task. Processes that have not started yet are omitted."""
        return self._deployment.processes()

    @ray.method(concurrency_group="ask")
    def identify(self) -> ProcessInfo:
        """Returns the node, process id and address of this process."""
        return process_info()

    @ray.method(concurrency_group="ask", enable_task_events=False)
    def snapshot(self, known: Known, requests: tuple[str, ...] = ()) -> JobSnapshot | None:
        """Returns the parts of the job's status that the caller lacks, or None while the log is replayed.

        `known`: the versions of the parts that the caller has. `requests`: ids of requests for which to return answers
        too. At the end of the job all requests are answered, because the caller does not call again. Answers are read
        after the snapshot, because the answer to a stop comes with the end of the job.
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
        over = shown.status.terminal
        asked = set(requests[:REQUESTS_MAX]).union(self._answers.requests() if over else ())
        deadline = time.monotonic() + (END_WAIT_S if over else 0.0)
        answers = {name: self._answer_until(name, deadline) for name in sorted(asked)}
        return replace(shown, answers={name: answer for name, answer in answers.items() if answer is not None})

    def _answer_until(self, request: str, deadline: float) -> Answer | None:
        wait_s = 0.0 if self._ended.is_set() else max(0.0, deadline - time.monotonic())
        answer = self._answers.wait(request, wait_s)
        return Answer(None, "the job has ended") if answer is None and self._ended.is_set() else answer


KEPT_MAX = 100
"""Limit of kept answers. Drivers make fewer requests within the time in which they repeat a call."""

LOST = Answer(None, "the coordinator was lost before it had logged the request; request it again")


@dataclass(frozen=True, slots=True)
class JobView:
    """The status of a job, as its driver reads it from the coordinator's process.

    `started`: the log was replayed. `ended`: nothing changes any more. `broken`: the error that stopped the
    coordinator, or None.
    """

    progress: JobProgress
    started: bool
    ended: bool
    broken: str | None
    statistics: CheckpointStatistics | None = None
    """Statistics of the checkpoints. Set once the job has ended, because the coordinator ends soon after."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """Answers to requests, by request id. Set once the job has ended."""
    vertices: tuple[VertexMetrics, ...] = ()
    """The last metrics of the tasks, set once the job has ended."""


class Answers:
    """The answers of one coordinator to user requests, by request id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Answer]] = {}

    def expect(self, request: str) -> bool:
        """Registers a request. Returns whether it is new."""
        with self._lock:
            if request in self._futures:
                return False
            given = [name for name, future in self._futures.items() if future.done()]
            for name in given[: max(0, len(given) - KEPT_MAX)]:
                del self._futures[name]
            self._futures[request] = Future()
            return True

    def give(self, request: str, answer: Answer) -> None:
        """Sets the answer to a request, unless the request is unknown or already answered."""
        with self._lock:
            future = self._futures.get(request)
            if future is not None and not future.done():
                future.set_result(answer)

    def inherit(self, known: Mapping[str, Answer | None]) -> None:
        """Adds the requests in the replayed log, with their answers, or None for requests without an answer yet."""
        for request, answer in known.items():
            self.expect(request)
            if answer is not None:
                self.give(request, answer)

    def has(self, request: str) -> bool:
        """Returns whether the request is registered."""
        with self._lock:
            return request in self._futures

    def wait(self, request: str, wait_s: float) -> Answer | None:
        """Waits for the answer to a request. Returns None after `wait_s` seconds, or `LOST` if the request is
        unknown.
        """
        with self._lock:
            future = self._futures.get(request)
        if future is None:
            return LOST
        try:
            return future.result(wait_s)
        except TimeoutError:
            return None

    def requests(self) -> tuple[str, ...]:
        """Returns the ids of the stored requests, with or without an answer."""
        with self._lock:
            return tuple(self._futures)

    def given(self) -> dict[str, Answer]:
        """Returns the stored answers, by request id."""
        with self._lock:
            return {request: future.result() for request, future in self._futures.items() if future.done()}


class TaskReports:
    """The newest reports of the tasks of one job. `store` is called on one thread, the other methods on any thread."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._rows_in: dict[TaskId, tuple[AttemptNumber, int]] = {}
        self._metrics: dict[TaskId, SubtaskMetrics] = {}

    def store(self, attempt: AttemptNumber, task: TaskId, rows_in: int, metrics: SubtaskMetrics | None) -> None:
        """Stores the number of rows that a task has received, and its metrics unless they are None (unchanged)."""
        self._rows_in[task] = (attempt, rows_in)
        if metrics is not None:
            self._metrics[task] = metrics

    def rows_in(self, state: CoordinatorState) -> dict[str, int]:
        """Returns the number of received rows of each vertex, from tasks in their current attempt."""
        found: dict[str, int] = {}
        for task, (attempt, rows) in list(self._rows_in.items()):
            if attempt == state.attempt_of(task):
                found[task.vertex] = found.get(task.vertex, 0) + rows
        return found

    def vertices(self, host: CoordinatorDriver | None) -> tuple[VertexMetrics, ...]:
        """Returns the metrics of all tasks, by vertex. `host` is the coordinator's driver, or None while the log
        is replayed.
        """
        state = CoordinatorState() if host is None else host.machine.state
        metrics_of = dict(self._metrics)
        return vertices_of(self._graph, metrics_of, {task: state.attempt_of(task) for task in metrics_of})
