"""Lists the jobs on a Ray cluster, of all drivers: their coordinators are named actors, and describe their jobs.

A job whose coordinator does not answer is listed too, and so is one whose coordinator has died for good while something
of the job is left: processes of tasks, or the program that a detached job keeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from tidegate.actors.ray.driver.held_program import holders_of
from tidegate.actors.ray.fleet.named_actors import find_actor
from tidegate.actors.ray.process.calls import NAMESPACE
from tidegate.actors.ray.process.orders import Handle
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, SilentJob, not_there
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import JobId

ANSWER_TIMEOUT_S = 30.0
ASK_AGAIN_S = 0.5
COORDINATOR_SUFFIX = "/coordinator"
DIED = "its coordinator has died, and Ray does not restart it"


@dataclass(frozen=True, slots=True)
class Listed:
    """A job. `coordinator` is None for one whose coordinator has died for good."""

    actor: str
    """The name that its actors begin with: the job's, or its id where that was taken."""
    coordinator: Handle | None
    overview: JobOverview | SilentJob


def jobs_on_ray(namespace: str = NAMESPACE, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Listed]:
    """Return all jobs, by name. Those whose coordinator does not answer within the time are among them."""
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
    """Return the names of actors that belong to no job with a coordinator. `living`: the names of such jobs."""
    kept = {name for job_id in ids for name in holders_of(job_id)}
    return [
        name
        for name in named
        if name not in kept
        and not any(name.startswith(f"{job}/") or _is_program_of(job, name) for job in living)
        and not name.endswith(COORDINATOR_SUFFIX)
    ]


def without_coordinator(left: Sequence[str], died_ms: Mapping[str, int]) -> dict[str, int]:
    """Return the jobs that actors were left behind by, and when their coordinators died (ms since the epoch).

    `died_ms`: the names of all jobs whose coordinators Ray knows to be dead. A job that ended in order leaves nothing.
    """
    return {
        job: at_ms
        for job, at_ms in died_ms.items()
        if any(name.startswith(f"{job}/") or _is_program_of(job, name) for name in left)
    }


def _is_program_of(job: str, name: str) -> bool:
    """Whether an actor holds the program of a job of this name, whose id continues with a suffix."""
    job_id = JobId(name.rpartition("/")[0])
    return name in holders_of(job_id) and job_id.rpartition("-")[0] == job


def _died_ms() -> dict[str, int]:
    """When coordinators died that Ray does not restart, by the names of their jobs. Asks Ray."""
    # Ray's public list of actors needs its dashboard.
    known: Any = ray._private.state.actors()
    return {
        actor["Name"].removesuffix(COORDINATOR_SUFFIX): int(actor["EndTime"])
        for actor in known.values()
        if actor["State"] == "DEAD" and str(actor["Name"]).endswith(COORDINATOR_SUFFIX)
    }


def find(name: str, namespace: str = NAMESPACE) -> tuple[JobCard, Handle]:
    """The job of a name or id. ConfigurationError, with the jobs that run, where there is not just one."""
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
            "it; ask again, or look for dead nodes"
        )
    raise not_there(name, "on this Ray", [card for card, _ in cards])


def _overviews(handles: dict[str, Handle], timeout_s: float) -> dict[str, JobOverview | None]:
    """Return the answers of coordinators, None for one that is late.

    One that has died for good is left out. One that is being restarted is asked again.
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
