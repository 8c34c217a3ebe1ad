"""`RayRuntime`: starts, finds and lists jobs on a Ray cluster. A job has one coordinator actor and one actor for each
worker.

Rules:

- Until its end, a job uses as many common slots as the widest vertex of each slot sharing group has subtasks. Steps
  with resources have their own slots, which are reserved when the job is submitted (`slot_plan.py`).
- All processes of a job end with its driver. A detached job (`detached.py`) belongs to no driver: it has its own slots,
  and everything that it needs is outside of the driver.
- The list of jobs shows the jobs of all drivers: coordinators are named actors that describe their jobs. It includes
  jobs whose coordinator does not answer, and jobs whose coordinator has died for good while processes of workers or the
  program of a detached job are left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray import cloudpickle
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup

from tidegate.actors.drivers.job_context import Standbys
from tidegate.actors.graph.job_graph import JobGraph, vertex_labels
from tidegate.actors.graph.slot_plan import SLOT_BUNDLE, Placement, SlotPlan, slot_plan, strategy_of
from tidegate.actors.ray.actor_calls import CONCURRENCY_GROUPS, NAMESPACE, find_actor
from tidegate.actors.ray.authentication import is_on_spark, warn_if_open
from tidegate.actors.ray.coordinator_actor import CoordinatorProcess
from tidegate.actors.ray.coordinator_liveness import end_orphans
from tidegate.actors.ray.detached import check_detachable, holders_of, start_detached
from tidegate.actors.ray.memory_store import open_store_on_ray, start_memory
from tidegate.actors.ray.placement import PoolOptions, SlotPlacement, standby_delay_ms, standbys_kept
from tidegate.actors.ray.ray_job import RayJob, SharedValue, check_shared, share_modules_by_value
from tidegate.actors.ray.reservation import (
    ADVICE,
    COMMON,
    SlotRequest,
    check_fits,
    common_slots,
    own_slots,
    release,
    reserve,
    started_here,
)
from tidegate.actors.ray.task_deployment import Handle
from tidegate.actors.ray.worker_pool import first_names, start_workers
from tidegate.actors.restore.state_follower import can_follow
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, SilentJob, Submission, not_there
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import ProcessId, this_process

__all__ = ["RayJob", "RayRuntime", "SlotPlacement"]

COORDINATOR_RESTARTS_MAX = 1_000
STOP_TIMEOUT_S = 30.0
ALONE_TIMEOUT_S = 30.0
"""Longest time, in seconds, to wait for slots if only processes that are ending can release them."""

# Ray's type hints lack concurrency groups.
_remote: Any = ray.remote
_CoordinatorActor: Any = _remote(
    num_cpus=0,
    max_restarts=COORDINATOR_RESTARTS_MAX,
    max_task_retries=0,
    concurrency_groups=CONCURRENCY_GROUPS,
)(CoordinatorProcess)


class RayRuntime:
    """Runs jobs on the Ray cluster to which this process is connected.

    `placement`: the reserved common slots. With None, Ray places the actors, and only steps with resources reserve
    something. `strategy`: how the reservations of a job are placed on nodes. `standbys`: the number of spare processes
    of each job that does not set one. More of them survive more failures at once without the start of a process, at
    some 200 MB of memory each (see `placement.py`).
    """

    def __init__(
        self,
        placement: SlotPlacement | None = None,
        namespace: str = NAMESPACE,
        open_store: OpenStore = open_store_on_ray,
        standbys: Standbys = "auto",
        strategy: Placement = "spread",
    ) -> None:
        self.placement = placement
        self._namespace = namespace
        self.open_store = open_store
        self._standbys = standbys
        self._strategy = strategy
        self.jobs: list[RayJob] = []
        """Jobs of this session. Jobs that are over are removed when the next one is submitted."""
        self._rented: PlacementGroup | None = None
        """The placement group of the common slots that this object has reserved itself, or None."""
        self._memory: Any = None
        """The actor that stores checkpoints in memory, or None until it is started."""

    @classmethod
    def with_slots(cls, slots: int, strategy: Placement, timeout_s: float) -> Self:
        """Reserves common slots of one CPU each, until `stop`, and returns the runtime.

        Raises ConfigurationError if the cluster has no free resources for them within `timeout_s`.
        """
        bundles, labels = [SLOT_BUNDLE] * slots, [COMMON] * slots
        wanted = SlotRequest("tidegate (slots)", bundles, labels, strategy_of(strategy))
        group = reserve(wanted, timeout_s, "Request fewer slots, or add nodes")
        runtime = cls(SlotPlacement(group, tuple(range(slots))), strategy=strategy)
        runtime._rented = group
        return runtime

    def check(self, graph: JobGraph, urls: Mapping[str, str]) -> None:
        """Raises ConfigurationError for a job that cannot run on this Ray. `urls` has the setting of each URL of
        the job.
        """
        if not ray.is_initialized():
            raise ConfigurationError(
                "this process is not connected to Ray; make the environment with StreamEnvironment.raydp(...), or call "
                "ray.init first"
            )
        for url, setting in urls.items():
            check_shared(url, setting)
        plan = _plan(graph)
        self._first_slot(graph, plan)
        check_fits(own_slots(JobId("the job"), plan, self._strategy, detached=False))
        warn_if_open(ray.get_runtime_context().gcs_address, os.environ, on_spark=is_on_spark())

    @property
    def sends_functions(self) -> bool:
        """Always True, because tasks run in other processes."""
        return True

    @property
    def memory_url(self) -> str:
        """Returns the URL of checkpoint storage in the memory of an actor, which the first call starts."""
        url, self._memory = start_memory("tidegate")
        return url

    def submit(self, submission: Submission) -> RayJob:
        """Starts a job. Raises ConfigurationError as `check` does."""
        graph = submission.context.graph
        urls = dict.fromkeys(submission.context.table_urls, "the URL of a table")
        urls[submission.context.root] = "the folder of the checkpoints"
        self.check(graph, urls)
        share_modules_by_value()
        end_orphans(self._namespace)
        if submission.detached:
            return self._detach(submission, tuple(urls))
        slots, free, plan = range(0), 0, _plan(graph)
        if self.placement is not None:
            first = self._first_slot(graph, plan)
            slots, free = range(first, first + plan.width), self.placement.slots - len(self._busy()) - plan.width
        options = self.pool_options(submission, self.placement, slots.start, free, this_process())
        own = self._reserve_own(submission, plan)
        try:
            coordinator, context = self._start_free(submission, replace(options, own_slots=own))
        except BaseException:
            release(own)
            raise
        job = RayJob(submission.card, coordinator, context, slots, self.open_store, own)
        # Jobs that are over have already released their slots.
        self.jobs = [each for each in self.jobs if not each.over]
        self.jobs.append(job)
        return job

    def _start_free(self, submission: Submission, options: PoolOptions) -> tuple[Handle, SharedValue]:
        """Starts the coordinator. If another actor uses the job's name, actor names begin with the job's id
        instead.
        """
        # One copy in the object store, for the coordinator, its successors, and all tasks.
        context = SharedValue(submission.context)
        try:
            return self._start(submission, context, options), context
        except ActorAlreadyExistsError:
            options = replace(options, prefix=submission.spec.job_id)
            return self._start(submission, context, options), context

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """Raises ConfigurationError for a job that cannot run detached, or whose name another job on this Ray
        uses.
        """
        check_detachable(name, self._namespace, urls)

    def overviews(self) -> list[tuple[str, JobOverview | SilentJob]]:
        """Returns the name and overview of each job on this Ray, from all drivers."""
        return [(job.actor, job.overview) for job in jobs_on_ray(self._namespace)]

    def attach(self, name: str) -> tuple[JobCard, RayJob]:
        """Returns the card and the job with this name or id, of any driver on this Ray. Raises ConfigurationError
        if there is none.
        """
        if not ray.is_initialized():
            raise ConfigurationError(f"attach({name!r}): this process is not connected to Ray; call ray.init first")
        card, coordinator = find(name, self._namespace)
        return card, RayJob(card, coordinator, None, range(0), self.open_store)

    def _detach(self, submission: Submission, urls: Sequence[str]) -> RayJob:
        spec = submission.spec
        self.check_detached(spec.job_name, urls)
        options = self.pool_options(submission, None, 0, 0, None)
        options = self._with_detached_slots(submission, _plan(submission.context.graph), options)
        coordinator = start_detached(submission, options, COORDINATOR_RESTARTS_MAX)
        return RayJob(submission.card, coordinator, None, range(0), self.open_store)

    def _with_detached_slots(self, submission: Submission, plan: SlotPlan, options: PoolOptions) -> PoolOptions:
        """Reserves the slots of a detached job: its own common slots, and the slots of its steps with resources."""
        own = self._reserve_own(submission, plan)
        if self.placement is None:
            return replace(options, own_slots=own)
        wanted = common_slots(submission.spec.job_id, plan, self._strategy)
        advice = f"A detached job has slots of its own, in addition to the slots of this session. {ADVICE}"
        try:
            group = reserve(wanted, self._patience_s(submission), advice)
        except BaseException:
            release(own)
            raise
        return replace(options, placement=SlotPlacement(group, tuple(range(plan.width))), own_slots=own)

    def _reserve_own(self, submission: Submission, plan: SlotPlan) -> PlacementGroup | None:
        """Reserves the slots of steps with resources. Returns None if the job has no such steps.

        Raises ConfigurationError if the cluster has no free resources for them in time.
        """
        wanted = own_slots(submission.spec.job_id, plan, self._strategy, detached=submission.detached)
        if not wanted.bundles:
            return None
        for job in self.jobs:
            _ = job.over  # Reading this releases the slots of a job that has ended.
        return reserve(wanted, self._patience_s(submission), ADVICE)

    def _patience_s(self, submission: Submission) -> float:
        """Returns how many seconds to wait for slots.

        The wait is short if nodes cannot be added and all jobs of this script have ended.
        """
        wait_s = submission.context.processes.slot_request_timeout_ms / 1_000
        hopeless = started_here() and all(job.over for job in self.jobs)
        return min(wait_s, ALONE_TIMEOUT_S) if hopeless else wait_s

    def stop(self) -> None:
        """Cancels running jobs, waits for them, and ends all processes."""
        for job in self.jobs:
            job.stop(STOP_TIMEOUT_S)
        self.jobs.clear()
        rented, self._rented = self._rented, None
        release(rented)

    def pool_options(
        self,
        submission: Submission,
        placement: SlotPlacement | None,
        first_slot: int,
        free_slots: int,
        driver: ProcessId | None,
    ) -> PoolOptions:
        """Returns the options of a job's worker pool: its slots, and how many standbys it keeps.

        `first_slot` and `free_slots` are about the slots of `placement`. `driver`: the process with which the job ends.
        """
        settings = submission.context.processes
        wanted = self._standbys if settings.standbys is None else settings.standbys
        graph, backend = submission.context.graph, submission.context.options.backend
        plan = _plan(graph)
        keyed = graph.keyed_tasks() if wanted == "warm" and can_follow(backend) else ()
        followed = [task for task in keyed if plan.workers[task] in plan.slots]
        followers = len({plan.workers[task] for task in followed})
        return PoolOptions(
            prefix=submission.spec.job_name,
            namespace=self._namespace,
            placement=placement,
            first_slot=first_slot,
            standbys=standbys_kept(wanted, free_slots, len(plan.slots), followers),
            open_store=self.open_store,
            driver=driver,
            slot_request_timeout_ms=settings.slot_request_timeout_ms,
            followed=frozenset(followed),
            standby_delay_ms=standby_delay_ms(wanted),
        )

    def _start(self, submission: Submission, context: SharedValue, options: PoolOptions) -> Handle:
        name = f"{options.prefix}/coordinator"
        actor = _CoordinatorActor.options(name=name, namespace=self._namespace)
        graph = submission.context.graph
        actors = ray.util.list_named_actors(all_namespaces=True)
        taken = {actor["name"] for actor in actors if actor["namespace"] == self._namespace}
        options = replace(options, first_names=first_names(options.prefix, _plan(graph), taken))
        coordinator: Handle = actor.remote(submission.spec, context.pickled, options, submission.card)
        start_workers(graph, cloudpickle.loads(context.pickled), coordinator, options)
        return coordinator

    def _first_slot(self, graph: JobGraph, plan: SlotPlan) -> int:
        """Returns the first of the consecutive free common slots for a job. Raises ConfigurationError if too few
        are free.
        """
        placement = self.placement
        if placement is None:
            return 0
        width = plan.width
        if width > placement.slots:
            raise ConfigurationError(_too_few_slots(graph, plan, placement.slots))
        busy = self._busy()
        for first in range(placement.slots - width + 1):
            if all(slot not in busy for slot in range(first, first + width)):
                return first
        names = sorted({job.name for job in busy.values()})
        of_groups = f" ({plan.groups_text})" if plan.groups_text else ""
        raise ConfigurationError(
            f"the job needs {width} neighbouring task slots{of_groups}, and {len(busy)} of "
            f"{placement.slots} are taken by {', '.join(names)}: wait for it or cancel it, or start the session with "
            "more slots"
        )

    def _busy(self) -> dict[int, RayJob]:
        """Returns the job that uses each common slot in use."""
        return {slot: job for job in self.jobs if job.slots and not job.over for slot in job.slots}


def _too_few_slots(graph: JobGraph, plan: SlotPlan, slots: int) -> str:
    """Returns the error text for a job that needs more common slots than the reservation has."""
    if len(plan.groups) > 1:
        return (
            f"the job needs {plan.width} task slots ({plan.groups_text}), because slot sharing groups share none, and "
            f"there are {slots}: lower the parallelism, name fewer groups (slot_sharing_group=), or start the session "
            "with more executors or slots_per_executor"
        )
    vertex = max((v for v in graph.vertices if v.resources is None), key=lambda v: v.parallelism)
    return (
        f"vertex {vertex.name!r} has parallelism {plan.width}, and there are {slots} task slots: lower "
        "the parallelism, or start the session with more executors or slots_per_executor"
    )


def _plan(graph: JobGraph) -> SlotPlan:
    return slot_plan(graph, vertex_labels(graph))


ANSWER_TIMEOUT_S = 30.0
ASK_AGAIN_S = 0.5
COORDINATOR_SUFFIX = "/coordinator"
DIED = "its coordinator has died, and Ray does not restart it"


@dataclass(frozen=True, slots=True)
class Listed:
    """A job in the list of jobs. `coordinator` is None if the coordinator has died for good."""

    actor: str
    """First part of the names of the job's actors: its name, or its id if another actor used the name."""
    coordinator: Handle | None
    overview: JobOverview | SilentJob


def jobs_on_ray(namespace: str = NAMESPACE, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Listed]:
    """Returns all jobs on this Ray, sorted by name, also jobs whose coordinator does not answer within
    `timeout_s`.
    """
    actors = ray.util.list_named_actors(all_namespaces=True)
    named = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    handles: dict[str, Handle] = {}
    for name in named:
        if name.endswith(COORDINATOR_SUFFIX) and (handle := find_actor(name, namespace)) is not None:
            handles[name.removesuffix(COORDINATOR_SUFFIX)] = handle
    asked_ms = now_ms()
    overviews = _overviews(handles, timeout_s)
    silent = SilentJob(asked_ms, f"its coordinator has not answered for {timeout_s:g} s")
    found = [Listed(name, handles[name], overview or silent) for name, overview in overviews.items()]
    ids = {each.overview.card.job_id for each in found if isinstance(each.overview, JobOverview)}
    left = left_behind(named, overviews.keys(), ids)
    if left:
        died = without_coordinator(left, _died_ms())
        found += [Listed(name, None, SilentJob(at_ms, DIED)) for name, at_ms in died.items()]
    return sorted(found, key=lambda each: each.actor)


def left_behind(named: Sequence[str], living: Collection[str], ids: Collection[JobId]) -> list[str]:
    """Returns the names of actors that remain from lost jobs: they belong to no job with a coordinator.

    `named`: all actor names. `living`: names of the jobs with a coordinator. `ids`: ids of the jobs that have answered.
    """
    kept = {name for job_id in ids for name in holders_of(job_id)}
    return [
        name
        for name in named
        if name not in kept
        and not any(name.startswith(f"{job}/") or _is_program_of(job, name) for job in living)
        and not name.endswith(COORDINATOR_SUFFIX)
    ]


def without_coordinator(left: Sequence[str], died_ms: Mapping[str, int]) -> dict[str, int]:
    """Returns the jobs that have remaining actors (`left`) and a dead coordinator, with the time of its death in ms
    since the epoch.

    `died_ms` has the dead coordinators according to Ray. A job that ended normally leaves no actors behind.
    """
    return {
        job: at_ms
        for job, at_ms in died_ms.items()
        if any(name.startswith(f"{job}/") or _is_program_of(job, name) for name in left)
    }


def _is_program_of(job: str, name: str) -> bool:
    """Returns whether an actor holds a program copy of a detached job with this name. The actor's name contains the
    job's id, which begins with the job's name.
    """
    job_id = JobId(name.rpartition("/")[0])
    return name in holders_of(job_id) and job_id.rpartition("-")[0] == job


def _died_ms() -> dict[str, int]:
    """Returns when the coordinators died that Ray does not restart, in ms since the epoch, by job name."""
    # Ray's public list of actors needs its dashboard.
    known: Any = ray._private.state.actors()
    return {
        actor["Name"].removesuffix(COORDINATOR_SUFFIX): int(actor["EndTime"])
        for actor in known.values()
        if actor["State"] == "DEAD" and str(actor["Name"]).endswith(COORDINATOR_SUFFIX)
    }


def find(name: str, namespace: str = NAMESPACE) -> tuple[JobCard, Handle]:
    """Returns the card and coordinator of the job with a name or id.

    Raises ConfigurationError, which lists the running jobs, unless there is exactly one.
    """
    jobs = jobs_on_ray(namespace)
    cards = [
        (job.overview.card, job.coordinator)
        for job in jobs
        if isinstance(job.overview, JobOverview) and job.coordinator is not None
    ]
    found = [(card, handle) for card, handle in cards if name in (card.name, card.job_id)]
    if len(found) == 1:
        return found[0]
    silent = next((job.overview for job in jobs if job.actor == name and isinstance(job.overview, SilentJob)), None)
    if not found and silent is not None and silent.why == DIED:
        raise ConfigurationError(f'{name!r}: {DIED}; start the job again with restore="latest"')
    if not found and silent is not None:
        raise ConfigurationError(
            f"the coordinator of {name!r} has not answered for {ANSWER_TIMEOUT_S:g} s: it is starting, or Ray restarts "
            "it; try again, or look for dead nodes"
        )
    raise not_there(name, "on this Ray", [card for card, _ in cards])


def _overviews(handles: dict[str, Handle], timeout_s: float) -> dict[str, JobOverview | None]:
    """Returns the overview that each coordinator reports, or None if it does not answer in time.

    Coordinators that are dead for good are omitted. A coordinator that is being restarted is called again.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[str, JobOverview | None] = {}
    open_names = list(handles)
    while open_names:
        asked = {handles[name].overview.remote(): name for name in open_names}
        answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=max(0.0, deadline - time.monotonic()))
        found |= {asked[reference]: None for reference in late}
        open_names = []
        for reference in answered:
            name = asked[reference]
            try:
                found[name] = ray.get(reference)
            except ActorDiedError:
                continue
            except RayError:
                found[name] = None
                open_names.append(name)
        if time.monotonic() >= deadline:
            break
        if open_names:
            threading.Event().wait(ASK_AGAIN_S)
    return found
