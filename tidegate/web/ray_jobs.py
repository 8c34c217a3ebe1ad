"""`RayJobs`: the jobs of all drivers on a Ray cluster, for its web server.

Rules:
- A coordinator has one question at a time. One that is slow is not asked again, and keeps nobody from the others.
- Coordinators are named actors; a look begins with their names.
- The coordinator of a job that is over goes soon. What became of the job stands in its event log, which is read once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from tidegate.actors.coordinator.chronicle import Chronicle
from tidegate.actors.coordinator.state.coordinator_state import JobStatus
from tidegate.actors.drivers.coordinator_host import replay
from tidegate.actors.ray.driver.listing import COORDINATOR_SUFFIX
from tidegate.actors.ray.driver.ray_job import check_shared
from tidegate.actors.ray.fleet.named_actors import find_actor
from tidegate.actors.ray.process.calls import NAMESPACE
from tidegate.actors.ray.process.death_words import death_of
from tidegate.actors.ray.process.orders import Handle
from tidegate.actors.runtimes.job_snapshot import JobSnapshot, snapshot_of
from tidegate.actors.runtimes.running_job import JobCard, SnapshotRequest, answers_of, progress_of
from tidegate.recovery.cleanup.deletion import delete
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import StorageError, TidegateError
from tidegate.storage.files.file_system_store import check_savepoint_target
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.web.jobs import Look, NotReachedError, Question

log = logging.getLogger(__name__)

LOOK_S = 1.0
CALL_TIMEOUT_S = 15.0


@dataclass(slots=True)
class _Coordinator:
    """One coordinator. `asked`: a question that has not been answered yet."""

    handle: Handle
    card: JobCard | None = None
    asked: Any = None
    requests: tuple[str, ...] = field(default=())
    over: bool = False


class RayJobs:
    """All jobs on the Ray that this process is connected to (a `Jobs`)."""

    def __init__(self, open_store: OpenStore, namespace: str = NAMESPACE) -> None:
        self._open_store = open_store
        self._namespace = namespace
        self._coordinators: dict[str, _Coordinator] = {}

    def look(self, questions: Mapping[JobId, Question]) -> Look:
        """See `Jobs`."""
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
            answered, _ = ray.wait(list(open_ones), num_returns=len(open_ones), timeout=LOOK_S)
        snapshots: list[JobSnapshot] = []
        for reference in answered:
            coordinator = self._coordinators[open_ones[reference]]
            coordinator.asked = None
            try:
                snapshot: JobSnapshot | None = ray.get(reference)
            except ActorDiedError as error:
                log.info("a coordinator has gone: %s", death_of(error))
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
        """See `Jobs`."""
        target = wanted.target
        if target is not None:
            check_shared(target)
            target = self._open_store(target).url
            check_savepoint_target(target, "the savepoint")
        self._call(self._handle(job_id).request, job_id, request, wanted.kind, target, wanted.savepoint_format)

    def cancel(self, job_id: JobId) -> None:
        """See `Jobs`."""
        self._call(self._handle(job_id).cancel, job_id)

    def delete_savepoint(self, path: str) -> None:
        """See `Jobs`."""
        delete(path, open_store=self._open_store)

    def close(self) -> None:
        """See `Jobs`."""
        self._coordinators.clear()

    def _find(self) -> list[_Coordinator]:
        """Look for coordinators that are new. Returns those that have gone."""
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
        """The end of a job whose coordinator has gone, as its log tells it; None if it was told, or cannot be known."""
        card = coordinator.card
        if card is None or coordinator.over:
            return None
        chronicle = Chronicle()
        try:
            machine, _ = replay(EventLog(self._open_store(card.root), card.job_id), chronicle)
        except TidegateError as error:
            log.warning("the log of %s cannot be read: %s", card.job_id, error)
            return None
        state = machine.state
        answers = {name: answer for name, answer in answers_of(state).items() if answer is not None}
        end = snapshot_of(card, None, state, chronicle, progress_of(state, {}), now_ms(), answers=answers)
        if state.status.terminal:
            return end
        reason = "its coordinator is lost for good; execute the job again with restore='latest' to go on"
        lost = replace(end.progress, status="failed", reason=reason)
        return replace(end, status=JobStatus.FAILED, progress=lost)

    def _handle(self, job_id: JobId) -> Handle:
        for coordinator in list(self._coordinators.values()):
            if coordinator.card is not None and coordinator.card.job_id == job_id:
                return coordinator.handle
        raise NotReachedError(f"the coordinator of job {job_id} is not there; ask again")

    def _call(self, method: Any, job_id: JobId, *arguments: object) -> None:
        try:
            ray.get(method.remote(*arguments), timeout=CALL_TIMEOUT_S)
        except RayError as error:
            raise NotReachedError(f"the coordinator of job {job_id} does not answer: {death_of(error)}") from error
        except StorageError as error:
            raise NotReachedError(str(error)) from error
