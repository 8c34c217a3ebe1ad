"""`WebActor`: the web server of a Ray cluster, one small actor that all drivers and clients share.

Rules:

- If a driver needs the server and does not find it, it starts it on its own node, so that the address belongs to that
  machine. Its name is `tidegate/web`; Ray's dashboard shows it with its address.
- It reserves no resources and runs with the lowest priority of the machine.
- No driver owns it: it ends with its cluster. In a cluster that runs longer than the driver it stops when no job has
  run for `IDLE_MS`.
- `RayJobs` finds coordinators by their actor names. Each has at most one pending question, so a slow one does not delay
  other ones.
- The coordinator of a job that has ended soon disappears. `RayJobs` then reads the event log of the job, once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.coordinator.coordinator_state import JobStatus
from tidegate.actors.coordinator.job_history import JobHistory
from tidegate.actors.drivers.coordinator_driver import replay
from tidegate.actors.ray.actor_calls import NAMESPACE, find_actor
from tidegate.actors.ray.exit_probe import death_of
from tidegate.actors.ray.ray_job import check_shared
from tidegate.actors.ray.ray_runtime import COORDINATOR_SUFFIX
from tidegate.actors.ray.reservation import started_here
from tidegate.actors.ray.task_deployment import Handle
from tidegate.actors.runtimes.job_snapshot import JobSnapshot, snapshot_of
from tidegate.actors.runtimes.running_job import JobCard, SnapshotRequest, answers_of, progress_of
from tidegate.recovery.deletion import delete
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.errors import ConfigurationError, StorageError, TidegateError
from tidegate.storage.files.file_system_store import check_savepoint_target
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.web.jobs import Look, NotReachedError, Question
from tidegate.web.options import WebOptions, digest_of, find_token
from tidegate.web.server import WebServer

log = logging.getLogger(__name__)
NAME = "tidegate/web"
NICENESS = 19
START_TIMEOUT_S = 60.0
IDLE_MS = 600_000
IDLE_CHECK_S = 15.0
ANSWER_S = 1.0
"""How many seconds a look waits for the answers of all coordinators."""
CALL_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Served:
    """The URL of a web server, and whether it uses the same token as the caller."""

    url: str
    same_token: bool


class WebActor:
    """The Ray actor with the web server. `leaves`: whether it ends by itself when it is idle."""

    def __init__(self, options: WebOptions, digest: bytes, open_store: OpenStore, namespace: str, leaves: bool) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        self._digest = digest
        self._server = WebServer(RayJobs(open_store, namespace), options, digest)
        self._used_ms = monotonic_ms()
        if leaves:
            threading.Thread(target=self._leave, name="tidegate-web-leave", daemon=True).start()

    def __repr__(self) -> str:
        return f"tidegate.web({self._server.url})"

    def served(self, digest: bytes) -> Served:
        """Returns the URL of the server, and whether it uses this token."""
        self._used_ms = monotonic_ms()
        return Served(self._server.url, digest == self._digest)

    def _leave(self) -> None:
        """Waits until the server has been idle for `IDLE_MS`, and then ends the actor."""
        pause = threading.Event()
        while self._server.alive:
            pause.wait(IDLE_CHECK_S)
            if self._server.watch.runs_jobs:
                self._used_ms = monotonic_ms()
            if monotonic_ms() - self._used_ms > IDLE_MS:
                break
        self._server.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


# Ray's type stubs lack some of these options.
_remote: Any = ray.remote

_Web: Any = _remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(WebActor)


def serve_on_ray(options: WebOptions, open_store: OpenStore) -> str:
    """Returns the URL of the web server of this Ray cluster, and starts it if necessary.

    A server that already runs keeps its options. Raises ConfigurationError if it cannot start.
    """
    token, where = find_token()
    digest = digest_of(token)
    leaves = not started_here()
    actor = find_actor(NAME, NAMESPACE) or _start(options, digest, open_store, NAMESPACE, leaves)
    try:
        served: Served = ray.get(actor.served.remote(digest), timeout=START_TIMEOUT_S)
    except TidegateError:
        raise
    except RayError as error:
        cause = error.__cause__
        why = str(cause) if isinstance(cause, TidegateError) else death_of(error)
        raise ConfigurationError(
            f"the web server did not start: {why}; check rest.port and rest.bind-address"
        ) from error
    if not served.same_token:
        log.warning("the web server at %s was started with a token that differs from %s", served.url, where)
    return served.url


def _start(options: WebOptions, digest: bytes, open_store: OpenStore, namespace: str, leaves: bool) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = _Web.options(name=NAME, namespace=namespace, scheduling_strategy=here, lifetime="detached")
    try:
        return actor.remote(options, digest, open_store, namespace, leaves)
    except ActorAlreadyExistsError:
        return ray.get_actor(NAME, namespace=namespace)


class RayJobs:
    """The jobs on the Ray cluster of this process (a `Jobs`)."""

    def __init__(self, open_store: OpenStore, namespace: str = NAMESPACE) -> None:
        self._open_store = open_store
        self._namespace = namespace
        self._coordinators: dict[str, _Coordinator] = {}

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        gone = self._find()
        for coordinator in self._coordinators.values():
            if coordinator.asked is None and not coordinator.over:
                card = coordinator.card
                question = Question() if card is None else questions.get(card.job_id, Question())
                coordinator.requests = question.requests
                coordinator.asked = coordinator.handle.snapshot.remote(question.known, question.requests)
        open_ones = {each.asked: name for name, each in self._coordinators.items() if each.asked is not None}
        answered: list[Any] = []
        if open_ones:
            answered, _ = ray.wait(list(open_ones), num_returns=len(open_ones), timeout=ANSWER_S)
        snapshots: list[JobSnapshot] = []
        for reference in answered:
            coordinator = self._coordinators[open_ones[reference]]
            coordinator.asked = None
            try:
                snapshot: JobSnapshot | None = ray.get(reference)
            except ActorDiedError as error:
                log.info("a coordinator ended: %s", death_of(error))
                gone.append(self._coordinators.pop(open_ones[reference]))
                continue
            except RayError:
                continue  # Ray restarts it.
            if snapshot is not None:
                coordinator.card = snapshot.card
                coordinator.over = snapshot.status.terminal
                snapshots.append(snapshot)
        snapshots += [end for each in gone if (end := self._end_of(each)) is not None]
        return Look(tuple(snapshots), any(each.card is None for each in self._coordinators.values()))

    def request(self, job_id: JobId, request: str, wanted: SnapshotRequest) -> None:
        target = wanted.target
        if target is not None:
            check_shared(target, "the target of the savepoint")
            target = self._open_store(target).url
            check_savepoint_target(target, "the savepoint")
        self._call(self._handle(job_id).request, job_id, request, wanted.kind, target, wanted.savepoint_format)

    def cancel(self, job_id: JobId) -> None:
        self._call(self._handle(job_id).cancel, job_id)

    def delete_savepoint(self, path: str) -> None:
        delete(path, open_store=self._open_store)

    def close(self) -> None:
        self._coordinators.clear()

    def _find(self) -> list[_Coordinator]:
        """Finds new coordinators on Ray, and starts to watch them. Returns the coordinators that no longer exist."""
        names = {
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == self._namespace and actor["name"].endswith(COORDINATOR_SUFFIX)
        }
        for name in names - self._coordinators.keys():
            handle = find_actor(name, self._namespace)
            if handle is not None:
                self._coordinators[name] = _Coordinator(handle)
        return [self._coordinators.pop(name) for name in self._coordinators.keys() - names]

    def _end_of(self, coordinator: _Coordinator) -> JobSnapshot | None:
        """Returns the final state of a job from its log, after its coordinator has disappeared.

        None if it is already known or cannot be read.
        """
        card = coordinator.card
        if card is None or coordinator.over:
            return None
        job_history = JobHistory()
        try:
            machine, _ = replay(EventLog(self._open_store(card.root), card.job_id), job_history)
        except TidegateError as error:
            log.warning("the log of %s cannot be read: %s", card.job_id, error)
            return None
        state = machine.state
        answers = {name: answer for name, answer in answers_of(state).items() if answer is not None}
        end = snapshot_of(card, None, state, job_history, progress_of(state, {}), now_ms(), answers=answers)
        if state.status.terminal:
            return end
        reason = "its coordinator is lost for good; execute the job again with restore='latest' to continue"
        lost = replace(end.progress, status="failed", reason=reason)
        return replace(end, status=JobStatus.FAILED, progress=lost)

    def _handle(self, job_id: JobId) -> Handle:
        for coordinator in list(self._coordinators.values()):
            if coordinator.card is not None and coordinator.card.job_id == job_id:
                return coordinator.handle
        raise NotReachedError(
            f"the coordinator of job {job_id} was not found: the job is starting or has ended. Try again"
        )

    def _call(self, method: Any, job_id: JobId, *arguments: object) -> None:
        try:
            ray.get(method.remote(*arguments), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            raise NotReachedError(
                f"the coordinator of job {job_id} does not answer: {death_of(error)}; try again"
            ) from error
        except StorageError as error:
            raise NotReachedError(str(error)) from error


@dataclass(slots=True)
class _Coordinator:
    """A job's coordinator on Ray, as the web server watches it. `asked` is the pending request for the job's state, or
    None.
    """

    handle: Handle
    card: JobCard | None = None
    asked: Any = None
    requests: tuple[str, ...] = field(default=())
    over: bool = False
