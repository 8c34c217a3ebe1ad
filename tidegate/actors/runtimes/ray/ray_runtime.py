"""`RayRuntime`: the Ray runtime as the driver sees it: one coordinator actor a job, and one actor a task.

Rules:

- A job takes as many slots as its widest vertex has subtasks, and keeps them until it is over.
- A job ends with its driver: all its processes are the driver's. A detached one is nobody's (`detached.py`): it has
  slots of its own, and nothing that it needs lies in the driver.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.hosts.process_settings import Standbys
from tidegate.actors.restore.state_follower import can_follow
from tidegate.actors.runtimes.ray.coordinator_actor import CoordinatorProcess
from tidegate.actors.runtimes.ray.detached import check_detachable, own_slots, start_detached
from tidegate.actors.runtimes.ray.fleet.fleet import FleetOptions, SlotPlacement
from tidegate.actors.runtimes.ray.fleet.standby_plan import standby_delay_ms, standbys_kept
from tidegate.actors.runtimes.ray.listing import find, jobs_on_ray
from tidegate.actors.runtimes.ray.memory_store import open_store_on_ray, start_memory
from tidegate.actors.runtimes.ray.process.calls import CONCURRENCY_GROUPS, NAMESPACE
from tidegate.actors.runtimes.ray.process.orders import Handle
from tidegate.actors.runtimes.ray.ray_job import RayJob, check_shared
from tidegate.actors.runtimes.ray.shared_value import SharedValue
from tidegate.actors.runtimes.ray.token_check import is_on_spark, warn_if_open
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, Submission
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.process_id import ProcessId, this_process

__all__ = ["RayJob", "RayRuntime", "SlotPlacement"]

COORDINATOR_RESTARTS_MAX = 1_000
STOP_TIMEOUT_S = 30.0

# Ray's types do not know of concurrency groups.
_remote: Any = ray.remote
_CoordinatorActor: Any = _remote(
    num_cpus=0,
    max_restarts=COORDINATOR_RESTARTS_MAX,
    max_task_retries=0,
    concurrency_groups=CONCURRENCY_GROUPS,
)(CoordinatorProcess)


class RayRuntime:
    """Runs jobs on the Ray cluster that this process is connected to.

    `placement` gives the slots of a reservation; without one, actors go where Ray puts them and reserve nothing.
    `standbys` is the number of spare processes of each job that names none itself: more of them survive more failures
    at once without the start of a process, at some 200 MB of memory each (see `standby_plan.py`).
    """

    def __init__(
        self,
        placement: SlotPlacement | None = None,
        namespace: str = NAMESPACE,
        open_store: OpenStore = open_store_on_ray,
        standbys: Standbys = "auto",
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
            check_shared(url)
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
        urls = (submission.context.root, *submission.context.table_urls)
        self.check(graph, urls)
        if submission.detached:
            return self._detach(submission, urls)
        slots, free = range(0), 0
        if self._placement is not None:
            first, width = self._first_slot(graph), _width(graph)
            slots, free = range(first, first + width), self._placement.slots - len(self._busy()) - width
        options = self._fleet_options(submission, self._placement, slots.start, free, this_process())
        # One copy in the object store, for the coordinator, its successors, and all tasks.
        context = SharedValue(submission.context)
        try:
            coordinator = self._start(submission, context, options)
        except ActorAlreadyExistsError:
            options = replace(options, prefix=submission.spec.job_id)
            coordinator = self._start(submission, context, options)
        job = RayJob(submission.card, coordinator, context, slots, self.open_store)
        self._jobs.append(job)
        return job

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """Refuse a job that could not outlive its driver, and one whose name is taken on this Ray."""
        check_detachable(name, self._namespace, urls)

    def overviews(self) -> list[tuple[str, JobOverview | None]]:
        """The jobs of all drivers on this Ray."""
        return [(job.actor, job.overview) for job in jobs_on_ray(self._namespace)]

    def attach(self, name: str) -> tuple[JobCard, RayJob]:
        """A job of any driver on this Ray, by its name or id."""
        if not ray.is_initialized():
            raise ConfigurationError(f"attach({name!r}): this process is not connected to Ray")
        card, coordinator = find(name, self._namespace)
        return card, RayJob(card, coordinator, None, range(0), self.open_store)

    def _detach(self, submission: Submission, urls: Sequence[str]) -> RayJob:
        spec = submission.spec
        self.check_detached(spec.job_name, urls)
        placement = None if self._placement is None else own_slots(spec.job_id, _width(submission.context.graph))
        options = self._fleet_options(submission, placement, 0, 0, None)
        coordinator = start_detached(submission, options, COORDINATOR_RESTARTS_MAX)
        return RayJob(submission.card, coordinator, None, range(0), self.open_store)

    def stop(self) -> None:
        """Cancel what runs, wait for it, and end all processes."""
        for job in self._jobs:
            job.stop(STOP_TIMEOUT_S)
        self._jobs.clear()

    def _fleet_options(
        self,
        submission: Submission,
        placement: SlotPlacement | None,
        first_slot: int,
        free_slots: int,
        driver: ProcessId | None,
    ) -> FleetOptions:
        settings = submission.context.processes
        wanted = self._standbys if settings.standbys is None else settings.standbys
        graph, backend = submission.context.graph, submission.context.options.backend
        followed = graph.keyed_tasks() if wanted == "warm" and can_follow(backend) else ()
        return FleetOptions(
            prefix=submission.spec.job_name,
            namespace=self._namespace,
            placement=placement,
            first_slot=first_slot,
            standbys=standbys_kept(wanted, free_slots, len(graph.tasks()), len(followed)),
            open_store=self.open_store,
            driver=driver,
            slot_request_timeout_ms=settings.slot_request_timeout_ms,
            followed=frozenset(followed),
            standby_delay_ms=standby_delay_ms(wanted),
        )

    def _start(self, submission: Submission, context: SharedValue, options: FleetOptions) -> Handle:
        name = f"{options.prefix}/coordinator"
        actor = _CoordinatorActor.options(name=name, namespace=self._namespace)
        return actor.remote(submission.spec, context.pickled, options, submission.card)

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
        busy = self._busy()
        for first in range(placement.slots - width + 1):
            if all(slot not in busy for slot in range(first, first + width)):
                return first
        names = sorted({job.name for job in busy.values()})
        raise ConfigurationError(
            f"the job needs {width} neighbouring task slots, and {len(busy)} of "
            f"{placement.slots} are taken by {', '.join(names)}: wait for it or cancel it, or start the session with "
            "more slots"
        )

    def _busy(self) -> dict[int, RayJob]:
        """Slots that are taken, and the job that has each."""
        return {slot: job for job in self._jobs if job.slots and not job.over for slot in job.slots}


def _width(graph: JobGraph) -> int:
    return max(vertex.parallelism for vertex in graph.vertices)
