"""`RayRuntime`: the Ray runtime as the driver sees it: one coordinator actor a job, and one actor a task.

Rules:

- Every question to the coordinator has a time limit. While Ray restarts its process, the job shows as "restarting".
- A job takes as many slots as its widest vertex has subtasks, and keeps them until it is over.
- A job that is over needs no process: its coordinator goes as soon as the driver has heard the end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, GetTimeoutError, RayActorError

from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.ray.coordinator_actor import CoordinatorProcess, JobView
from tidegate.actors.runtimes.ray.fleet import FleetOptions, SlotPlacement
from tidegate.actors.runtimes.ray.memory_store import open_store_on_ray, start_memory
from tidegate.actors.runtimes.ray.process.calls import NAMESPACE
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.actors.runtimes.ray.shared_value import SharedValue
from tidegate.actors.runtimes.ray.task_actor import Handle
from tidegate.actors.runtimes.ray.token_check import is_on_spark, warn_if_open
from tidegate.actors.runtimes.running_job import (
    Answer,
    JobProgress,
    Submission,
    TaskProcessInfo,
    not_taken,
    progress_of,
)
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.process_id import this_process

__all__ = ["RayJob", "RayRuntime", "SlotPlacement"]

log = logging.getLogger(__name__)

COORDINATOR_RESTARTS_MAX = 16
GLANCE_S = 0.5
"""How long a call that only looks waits for an answer."""
CALL_TIMEOUT_S = 15.0
WAIT_STEP_S = 2.0
RETRY_STEP_S = 0.2
LOST_TIMEOUT_S = 120.0
SILENT_TIMEOUT_S = 600.0
"""How long a coordinator may be silent, also while Ray looks for a place to restart it, until whoever waits is told."""
STOP_TIMEOUT_S = 30.0
ERROR_CHARACTERS_MAX = 500

# Ray's types do not know of concurrency groups.
_remote: Any = ray.remote
_CoordinatorActor: Any = _remote(
    num_cpus=0,
    max_restarts=COORDINATOR_RESTARTS_MAX,
    max_task_retries=0,
    concurrency_groups={"control": 1, "ask": 8},
)(CoordinatorProcess)


class RayRuntime:
    """Runs jobs on the Ray cluster that this process is connected to.

    `placement` gives the slots of a reservation; without one, actors go where Ray puts them and reserve nothing.
    `standbys` is the number of spare processes of each job: more of them survive more failures at once without the
    start of a process, at some 200 MB of memory each.
    """

    def __init__(
        self,
        placement: SlotPlacement | None = None,
        namespace: str = NAMESPACE,
        open_store: OpenStore = open_store_on_ray,
        standbys: int = 1,
    ) -> None:
        self._placement = placement
        self._namespace = namespace
        self.open_store = open_store
        self._standbys = standbys
        self._jobs: list[RayJob] = []
        self._memory: Any = None
        """The actor that holds checkpoints in memory, once there is one."""

    def check(self, graph: JobGraph, urls: Sequence[str]) -> None:
        """Refuse what cannot run here. Raises ConfigurationError."""
        if not ray.is_initialized():
            raise ConfigurationError(
                "this process is not connected to Ray; make the environment with StreamEnvironment.raydp(...), or call "
                "ray.init first"
            )
        for url in urls:
            _check_shared(url)
        self._first_slot(graph)
        warn_if_open(ray.get_runtime_context().gcs_address, os.environ, on_spark=is_on_spark())

    @property
    def memory_url(self) -> str:
        """The memory of an actor, which is started when it is first asked for."""
        url, self._memory = start_memory("tidegate")
        return url

    def submit(self, submission: Submission) -> RayJob:
        """Start a job. Raises ConfigurationError as `check` does."""
        graph = submission.context.graph
        self.check(graph, (submission.context.root, *submission.context.table_urls))
        slots = range(0)
        if self._placement is not None:
            first = self._first_slot(graph)
            slots = range(first, first + _width(graph))
        options = FleetOptions(
            prefix=submission.spec.job_name,
            namespace=self._namespace,
            placement=self._placement,
            first_slot=slots.start,
            standbys=self._standbys,
            open_store=self.open_store,
            driver=this_process(),
        )
        # One copy in the object store, for the coordinator, its successors, and all tasks.
        context = SharedValue(submission.context)
        try:
            coordinator = self._start(submission, context, options)
        except ActorAlreadyExistsError:
            options = replace(options, prefix=submission.spec.job_id)
            coordinator = self._start(submission, context, options)
        job = RayJob(submission, coordinator, context, slots)
        self._jobs.append(job)
        return job

    def stop(self) -> None:
        """Cancel what runs, wait for it, and end all processes."""
        for job in self._jobs:
            job.stop(STOP_TIMEOUT_S)
        self._jobs.clear()

    def _start(self, submission: Submission, context: SharedValue, options: FleetOptions) -> Handle:
        name = f"{options.prefix}/coordinator"
        actor = _CoordinatorActor.options(name=name, namespace=self._namespace)
        return actor.remote(submission.spec, context.pickled, options)

    def _first_slot(self, graph: JobGraph) -> int:
        """The first of a row of free slots for a job."""
        placement = self._placement
        if placement is None:
            return 0
        width = _width(graph)
        if width > placement.slots:
            vertex = max(graph.vertices, key=lambda v: v.parallelism)
            raise ConfigurationError(
                f"vertex {vertex.name!r} has parallelism {width}, and there are {placement.slots} task slots: lower "
                "the parallelism, or start the session with more executors or slots_per_executor"
            )
        busy = {slot: job for job in self._jobs if job.slots and not job.over for slot in job.slots}
        for first in range(placement.slots - width + 1):
            if all(slot not in busy for slot in range(first, first + width)):
                return first
        names = sorted({job.name for job in busy.values()})
        raise ConfigurationError(
            f"the job needs {width} neighbouring task slots, and {len(busy)} of "
            f"{placement.slots} are taken by {', '.join(names)}: wait for it or cancel it, or start the session with "
            "more slots"
        )


class RayJob:
    """A job on Ray (a `RunningJob`). Thread-safe."""

    def __init__(self, submission: Submission, coordinator: Handle, context: SharedValue, slots: range) -> None:
        self.name = submission.spec.job_name
        self.slots = slots
        """Task slots that the job holds."""
        self._coordinator = coordinator
        self._context = context
        self._lock = threading.Lock()
        self._last = progress_of(CoordinatorState(), {})
        self._seen = False
        """Whether the coordinator has ever told of the job: before, nothing restarts."""
        self._asking = threading.Lock()
        self._asked: Any = None
        """A call for the state of the job that has not been answered yet."""
        self._statistics = CheckpointStatistics()
        self._answers: Mapping[str, Answer] = {}
        """To all requests, once the job has ended."""
        self._silence: tuple[float, str] | None = None
        """Since when the coordinator has not answered, and why."""
        self._end: JobProgress | None = None

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self._look(0.0) is not None

    def progress(self) -> JobProgress:
        """The job now; it has failed where its coordinator is lost for good, or could not go on.

        A coordinator that does not answer at once, because it is starting or gone, is not waited for: then this is what
        was known last, and the next call looks whether the answer has come.
        """
        with self._asking:
            if self._end is None:
                if self._asked is None:
                    self._asked = self._coordinator.view.remote(0.0)
                if ray.wait([self._asked], timeout=GLANCE_S)[0]:
                    answer, self._asked = self._asked, None
                    self._take_in(answer, 0.0)
            return self._end or self._last

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Wait for a terminal status; None when the time is over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_STEP_S if deadline is None else max(0.0, deadline - time.monotonic())
            end = self._look(min(left_s, WAIT_STEP_S))
            if end is not None:
                return end
            if deadline is not None and time.monotonic() >= deadline:
                return None
            if self._silence is not None and time.monotonic() - self._silence[0] > SILENT_TIMEOUT_S:
                (_, why), self._silence = self._silence, None
                raise JobFailedError(
                    f"the coordinator of job {self.name!r} has not answered for {SILENT_TIMEOUT_S:g} s, and the job "
                    f"may still run: look for dead nodes; wait again to go on waiting ({why})"
                )

    def cancel(self) -> None:
        """Ask for cancellation; nothing happens where the job is over."""
        if self._look(0.0) is None:
            self._ask(self._coordinator.cancel, "be cancelled")

    def request(self, kind: SnapshotKind, target: str | None, timeout_s: float) -> Answer:
        """Take a checkpoint or savepoint and wait for it; raises as `RunningJob.request` does."""
        if target is not None:
            _check_shared(target)
        self._look(0.0)
        request = uuid.uuid4().hex
        what = f"take a {kind.value}"
        deadline = time.monotonic() + timeout_s
        answer: Answer | None = None
        try:
            if self._end is None:
                self._ask(self._coordinator.request, what, request, kind, target)
            while self._end is None and answer is None and (left_s := deadline - time.monotonic()) > 0:
                answer = self._ask(self._coordinator.answer, what, request, min(left_s, WAIT_STEP_S))
        except JobFailedError:
            # Another thread may have heard the end, and let the coordinator go, while this one asked.
            if self._end is None:
                raise
        if answer is None and self._end is not None:
            answer = self._answers.get(request) or Answer(None, f"the job is {self._end.status}")
        if answer is None:
            raise JobTimeoutError(f"job {self.name!r} has not completed the {kind.value} within {timeout_s:g} s")
        if answer.checkpoint_id is None:
            raise not_taken(kind, answer.error)
        return answer

    def trigger_checkpoint(self, timeout_s: float) -> CheckpointId:
        """Take a checkpoint and wait for it; raises as `request` does."""
        checkpoint_id = self.request(SnapshotKind.CHECKPOINT, None, timeout_s).checkpoint_id
        assert checkpoint_id is not None, "a request that fails raises"
        return checkpoint_id

    def statistics(self) -> CheckpointStatistics:
        """Statistics of the checkpoints so far."""
        if self._look(0.0) is None:
            found: CheckpointStatistics = self._ask(self._coordinator.statistics, "give its statistics")
            self._statistics = found
        return self._statistics

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """The process of each task: of those that are alive and have started. Empty when the job is over."""
        if self._look(0.0) is not None:
            return ()
        found: tuple[TaskProcessInfo, ...] = self._ask(self._coordinator.processes, "name its tasks")
        return found

    def standbys(self) -> int:
        """How many spare processes have started and wait. 0 when the job is over."""
        return 0 if self._look(0.0) is not None else int(self._ask(self._coordinator.standbys, "count its standbys"))

    def coordinator(self) -> ProcessInfo:
        """The process of the coordinator. JobFailedError when it is lost for good."""
        found: ProcessInfo = self._ask(self._coordinator.identify, "name its coordinator")
        return found

    def stop(self, timeout_s: float) -> None:
        """Cancel the job if it runs, wait for that, and end its processes in any case."""
        try:
            self.cancel()
            if self.wait(timeout_s) is None:
                log.warning("job %r did not end within %g s: its processes are killed", self.name, timeout_s)
        except (JobFailedError, RayActorError, GetTimeoutError) as error:
            log.warning("job %r could not be cancelled: %s", self.name, error)
        self._release()

    # --- the coordinator's process --------------------------------------------------------------------------------

    def _look(self, wait_s: float) -> JobProgress | None:
        """Ask for the state of the job, and remember it. Returns its end, if it has come to one."""
        if self._end is not None:
            return self._end
        return self._take_in(self._coordinator.view.remote(wait_s), wait_s)

    def _take_in(self, answer: Any, wait_s: float) -> JobProgress | None:
        """Wait for a view of the job, and remember it. Returns the end of the job, if it has come to one."""
        try:
            view: JobView = ray.get(answer, timeout=wait_s + CALL_TIMEOUT_S)
        except ActorDiedError as error:
            return self._failed(f"its coordinator is lost for good: {_one_line(error)}")
        except (RayActorError, GetTimeoutError) as error:
            log.info("the coordinator of %r does not answer: %s", self.name, error)
            if self._seen:
                self._last = replace(self._last, status="restarting")
            self._silence = self._silence or (time.monotonic(), _one_line(error))
            threading.Event().wait(min(wait_s, RETRY_STEP_S))
            return None
        self._silence = None
        if not view.started and not view.ended and self._seen:
            self._last = replace(self._last, status="restarting")
            return None
        self._seen = self._seen or view.started
        self._last = view.progress
        if view.statistics is not None:
            self._statistics, self._answers = view.statistics, view.answers
        if view.ended:
            if view.broken is None:
                return self._ended(view.progress)
            return self._failed(f"its coordinator had to stop: {view.broken}")
        return None

    def _failed(self, reason: str) -> JobProgress:
        return self._ended(replace(self._last, status="failed", reason=reason))

    def _ended(self, end: JobProgress) -> JobProgress:
        with self._lock:
            if self._end is None:
                self._end = end
                self._release()
            return self._end

    def _release(self) -> None:
        ray.kill(self._coordinator, no_restart=True)
        self._context.release()

    def _ask(self, method: Any, what: str, *arguments: object) -> Any:
        """Call the coordinator; while it is being restarted, try again for a bounded time."""
        deadline = time.monotonic() + LOST_TIMEOUT_S
        while True:
            try:
                return ray.get(method.remote(*arguments), timeout=CALL_TIMEOUT_S)
            except ActorDiedError as error:
                raise JobFailedError(
                    f"job {self.name!r} cannot {what}: its coordinator is lost: {_one_line(error)}"
                ) from error
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline:
                    raise JobFailedError(
                        f"job {self.name!r} cannot {what}: its coordinator has not answered for {LOST_TIMEOUT_S:g} s "
                        f"({error}); look for dead nodes, and execute the job again with restore='latest'"
                    ) from error
            threading.Event().wait(RETRY_STEP_S)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:ERROR_CHARACTERS_MAX]


def _width(graph: JobGraph) -> int:
    return max(vertex.parallelism for vertex in graph.vertices)


def _check_shared(url: str) -> None:
    if url.startswith("memory:"):
        raise ConfigurationError(
            f"{url!r} is the memory of one process, and a job on Ray runs in many: use a folder that all nodes "
            "share, or s3://"
        )
