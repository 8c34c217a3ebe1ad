"""`RayJob`: a job on Ray as its driver sees it, whether the driver has submitted the job or has attached to it.

Rules:

- Every call to the coordinator has a time limit. While Ray restarts the coordinator, `progress` returns the last known
  state with `coordinator_answers=False`. The tasks keep running, and it is unknown whether anything restarts.
- After the end of the job its coordinator ends: a detached one by itself, any other one as soon as its driver has
  received the end. The event log stores the end as well, for drivers that come too late.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle as own_cloudpickle
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.drivers.coordinator_driver import replay
from tidegate.actors.ray.coordinator_status import JobView
from tidegate.actors.ray.detached import clean_up_lost_job
from tidegate.actors.ray.exit_probe import death_of
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.reservation import release
from tidegate.actors.ray.task_deployment import Handle
from tidegate.actors.runtimes.running_job import (
    Answer,
    JobCard,
    JobProgress,
    SnapshotRequest,
    TaskProcessInfo,
    answers_of,
    not_taken,
    progress_of,
)
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError, TidegateError
from tidegate.storage.files.store import OpenStore

log = logging.getLogger(__name__)

GLANCE_S = 0.5
"""Seconds for which `progress` waits for an answer of the coordinator."""
CALL_TIMEOUT_S = 15.0
WAIT_STEP_S = 2.0
RETRY_STEP_S = 0.2
LOST_TIMEOUT_S = 120.0
RESTART_TIMEOUT_S = 600.0
"""Seconds for which `wait` tolerates that Ray finds no place to restart the coordinator.

For a process that exists and does not answer, because it hangs or is stopped, the limit is `LOST_TIMEOUT_S`.
"""


class RayJob:
    """A job on Ray (a `RunningJob`). Thread-safe.

    `context` is the job's context in Ray's object store, if this driver owns it. It is None for a job that does not
    need its driver, or has another one. Then this object never kills the coordinator.
    """

    def __init__(
        self,
        card: JobCard,
        coordinator: Handle,
        context: SharedValue | None,
        slots: range,
        open_store: OpenStore,
        own_slots: PlacementGroup | None = None,
    ) -> None:
        self.name = card.name
        self._card = card
        self._open_store = open_store
        self.slots = slots
        """The common slots of the session that the job uses."""
        self._own_slots = own_slots
        """The placement group of its steps with resources, which is released when the job has ended."""
        self._coordinator = coordinator
        self._context = context
        self._lock = threading.Lock()
        self._last = progress_of(CoordinatorState(), {})
        self._seen = False
        """True once the coordinator has reported a state. Before that, a silent coordinator is starting, and not
        restarting.
        """
        self._asking = threading.Lock()
        self._asked: Any = None
        """Ray's reference to a pending request for the state of the job, or None."""
        self._statistics = CheckpointStatistics()
        self._vertices: tuple[VertexMetrics, ...] = ()
        self._answers: Mapping[str, Answer] = {}
        """The answers to all requests, once the job has ended."""
        self._silence: tuple[float, Exception] | None = None
        """Time since which the coordinator does not answer (monotonic, in s), and the newest error. None while it
        answers.
        """
        self._end: JobProgress | None = None

    @property
    def over(self) -> bool:
        """Returns whether the job has ended."""
        return self._look(0.0) is not None

    def progress(self) -> JobProgress:
        """Returns the progress of the job. The job has failed if its coordinator is lost for good, or had to stop.

        If the coordinator does not answer at once, because it is starting or gone, this returns the last known state.
        """
        with self._asking:
            if self._end is None:
                if self._asked is None:
                    self._asked = self._coordinator.view.remote(0.0)
                if ray.wait([self._asked], timeout=GLANCE_S)[0]:
                    answer, self._asked = self._asked, None
                    self._store_view(answer, 0.0)
                else:
                    self._unanswered()
            return self._end or self._last

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Waits for the end of the job, and returns its progress. Returns None if the timeout passes first. No
        timeout if None.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_STEP_S if deadline is None else max(0.0, deadline - time.monotonic())
            end = self._look(min(left_s, WAIT_STEP_S))
            if end is not None:
                return end
            if deadline is not None and time.monotonic() >= deadline:
                return None
            self._check_silence()

    def cancel(self) -> None:
        """Requests the cancellation of the job, and does not wait. Does nothing if the job has ended."""
        if self._look(0.0) is None:
            self._ask(self._coordinator.cancel, "be cancelled")

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Takes a checkpoint or savepoint and waits for the answer. Raises as `RunningJob.request` does."""
        if wanted.target is not None:
            check_shared(wanted.target, "the target of the savepoint")
        self._look(0.0)
        request = uuid.uuid4().hex
        what = f"take a {wanted.kind.words}"
        deadline = time.monotonic() + timeout_s
        answer: Answer | None = None
        try:
            if self._end is None:
                asked = (request, wanted.kind, wanted.target, wanted.savepoint_format)
                self._ask(self._coordinator.request, what, *asked)
            while self._end is None and answer is None and (left_s := deadline - time.monotonic()) > 0:
                answer = self._ask(self._coordinator.answer, what, request, min(left_s, WAIT_STEP_S))
        except JobFailedError:
            # Another thread or driver may have received the end, and killed the coordinator, during this call.
            if self._end is None and self._end_from_log() is None:
                raise
        if answer is None and self._end is not None:
            answer = self._answers.get(request) or Answer(None, f"the job is {self._end.status}")
        if answer is None:
            raise JobTimeoutError(
                f"job {self.name!r} has not completed the {wanted.kind.words} within {timeout_s:g} s"
                "; wait longer (timeout=), and look at the job page for tasks that are slow"
            )
        if answer.checkpoint_id is None:
            raise not_taken(wanted.kind, answer.error)
        return answer

    def statistics(self) -> CheckpointStatistics:
        """Returns statistics of the checkpoints so far."""
        if self._look(0.0) is None:
            found: CheckpointStatistics = self._ask(self._coordinator.statistics, "give its statistics")
            self._statistics = found
        return self._statistics

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns the metrics of the tasks, by vertex. After the end of the job, returns the last metrics."""
        if self._look(0.0) is None:
            found: tuple[VertexMetrics, ...] = self._ask(self._coordinator.vertices, "report the metrics of its tasks")
            self._vertices = found
        return self._vertices

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Returns the process of each task, if it lives and has started. Empty after the end of the job."""
        if self._look(0.0) is not None:
            return ()
        found: tuple[TaskProcessInfo, ...] = self._ask(self._coordinator.processes, "name its tasks")
        return found

    def standbys(self) -> int:
        """Returns the last known number of ready standbys. 0 after the end of the job."""
        return self.progress().standbys_ready

    def coordinator(self) -> ProcessInfo:
        """Returns the process id, node and address of the coordinator. Raises JobFailedError if the coordinator
        is lost for good.
        """
        found: ProcessInfo = self._ask(self._coordinator.identify, "name its coordinator")
        return found

    def stop(self, timeout_s: float) -> None:
        """Cancels the job if it runs, waits for its end, and ends its processes in any case."""
        try:
            self.cancel()
            if self.wait(timeout_s) is None:
                log.warning("job %r did not end within %g s: its processes are killed", self.name, timeout_s)
        except (JobFailedError, RayActorError, GetTimeoutError) as error:
            log.warning("job %r could not be cancelled: %s", self.name, error)
        self.release_processes()

    # --- the coordinator's process --------------------------------------------------------------------------------

    def _look(self, wait_s: float) -> JobProgress | None:
        """Requests and stores the state of the job. Returns the progress at its end, or None while the job runs."""
        if self._end is not None:
            return self._end
        return self._store_view(self._coordinator.view.remote(wait_s), wait_s)

    def _store_view(self, answer: Any, wait_s: float) -> JobProgress | None:
        """Waits for the coordinator's answer and stores it. Returns the progress at the job's end, or None while
        the job runs.
        """
        try:
            view: JobView = ray.get(answer, timeout=wait_s + CALL_TIMEOUT_S)
        except ActorDiedError as error:
            return self._end_from_log() or self._lost(death_of(error))
        except (RayActorError, GetTimeoutError) as error:
            log.info("the coordinator of %r does not answer: %s", self.name, error)
            self._unanswered()
            since_s = time.monotonic() if self._silence is None else self._silence[0]
            self._silence = since_s, error
            threading.Event().wait(min(wait_s, RETRY_STEP_S))
            return None
        self._silence = None
        if not view.started and not view.ended and self._seen:
            self._unanswered()
            return None
        self._seen = self._seen or view.started
        self._last = view.progress
        if view.statistics is not None:
            self._statistics, self._answers, self._vertices = view.statistics, view.answers, view.vertices
        if view.ended:
            if view.broken is None:
                return self._ended(view.progress)
            return self._failed(f"its coordinator had to stop: {view.broken}")
        return None

    def _check_silence(self) -> None:
        """Raises JobFailedError if the coordinator has not answered for too long."""
        if self._silence is None:
            return
        since_s, error = self._silence
        hangs = isinstance(error, GetTimeoutError)
        limit_s = LOST_TIMEOUT_S if hangs else RESTART_TIMEOUT_S
        if time.monotonic() - since_s <= limit_s:
            return
        self._silence = None
        advice = "end its process with SIGKILL, and Ray starts it again" if hangs else "look for dead nodes"
        raise JobFailedError(
            f"the coordinator of job {self.name!r} has not answered for {limit_s:g} s ({death_of(error)}), and the job "
            f"may still run: {advice}. Call wait again to wait longer"
        )

    def _unanswered(self) -> None:
        self._last = replace(self._last, coordinator_answers=False)

    def _lost(self, why: str) -> JobProgress:
        if self._card.detached:
            clean_up_lost_job(self.name, self._card.job_id)
        return self._failed(
            f"its coordinator is lost for good: {why}; execute the job again with restore='latest' to continue from "
            "its newest checkpoint"
        )

    def _failed(self, reason: str) -> JobProgress:
        return self._ended(replace(self._last, status="failed", reason=reason))

    def _ended(self, end: JobProgress) -> JobProgress:
        with self._lock:
            if self._end is None:
                self._end = end
                self.release_processes()
            return self._end

    def _end_from_log(self) -> JobProgress | None:
        """Reads from the event log how a job has ended that lost its coordinator. Returns None if it had not
        ended.
        """
        try:
            machine, _ = replay(EventLog(self._open_store(self._card.root), self._card.job_id))
        except TidegateError as error:
            log.warning("the log of %s cannot be read: %s", self._card.job_id, error)
            return None
        state = machine.state
        if not state.status.terminal:
            return None
        self._statistics = state.statistics.copy()
        self._answers = {request: answer for request, answer in answers_of(state).items() if answer is not None}
        return self._ended(progress_of(state, {}))

    def release_processes(self) -> None:
        """Ends the coordinator and gives back the job's own slots, if this handle has submitted the job."""
        if self._context is not None:
            ray.kill(self._coordinator, no_restart=True)
            self._context.release()
            release(self._own_slots)
            self._own_slots = None

    def _ask(self, method: Any, what: str, *arguments: object) -> Any:
        """Calls a method of the coordinator, and returns the result. Retries for up to `LOST_TIMEOUT_S` while it
        restarts.

        `what` completes the text "job … cannot …" of the error. Raises JobFailedError.
        """
        deadline = time.monotonic() + LOST_TIMEOUT_S
        while True:
            try:
                return ray.get(method.remote(*arguments), timeout=CALL_TIMEOUT_S)
            except ActorDiedError as error:
                raise JobFailedError(
                    f"job {self.name!r} cannot {what}: its coordinator is lost: {death_of(error)}"
                    "; execute the job again with restore='latest'"
                ) from error
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline:
                    raise JobFailedError(
                        f"job {self.name!r} cannot {what}: its coordinator has not answered for {LOST_TIMEOUT_S:g} s "
                        f"({death_of(error)}); look for dead nodes, and execute the job again with restore='latest'"
                    ) from error
            threading.Event().wait(RETRY_STEP_S)


def check_shared(url: str, setting: str) -> None:
    """Raises ConfigurationError for a URL that other processes cannot read. `setting` names the setting in the
    error.
    """
    if url.startswith("memory:"):
        raise ConfigurationError(
            f"{setting}: {url!r} is the memory of one process, and a job on Ray runs in many processes. Use "
            "a folder that all nodes share, or s3://"
        )


class SharedValue:
    """A value in Ray's object store that exists until `release` or the end of this process."""

    def __init__(self, value: object) -> None:
        self._lock = threading.Lock()
        self._reference: ray.ObjectRef[Any] | None = ray.put(value)
        self.pickled: bytes = cloudpickle.dumps(self._reference)
        """The pickled reference to the value. Any process of the cluster can unpickle it with Ray's cloudpickle,
        until `release`.
        """

    def release(self) -> None:
        """Releases the object in Ray's object store. Idempotent."""
        with self._lock:
            reference, self._reference = self._reference, None
        if reference is not None and ray.is_initialized():
            # Ray has no public function for this: pickling has added a permanent reference, which is removed here.
            worker: Any = ray._private.worker.global_worker
            worker.core_worker.remove_object_ref_reference(reference)


def share_modules_by_value() -> None:
    """Makes Ray pickle by value the modules that the user has registered with cloudpickle (`register_pickle_by_value`).

    Ray pickles with its own copy of cloudpickle, which has a separate registry. Without this, processes import these
    modules, which do not exist on other machines or in a runtime environment with another working directory.
    """
    for name in own_cloudpickle.list_registry_pickle_by_value():
        if (module := sys.modules.get(name)) is not None:
            cloudpickle.register_pickle_by_value(module)
