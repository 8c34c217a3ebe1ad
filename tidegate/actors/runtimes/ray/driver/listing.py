"""Which jobs run on a Ray cluster, of all drivers: their coordinators are named actors, and say what they are."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import ray
from ray.exceptions import ActorDiedError, RayError

from tidegate.actors.runtimes.ray.fleet.named_actors import find_actor
from tidegate.actors.runtimes.ray.process.calls import NAMESPACE
from tidegate.actors.runtimes.ray.process.orders import Handle
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, not_there
from tidegate.storage.errors import ConfigurationError

ANSWER_TIMEOUT_S = 30.0
ASK_AGAIN_S = 0.5
COORDINATOR_SUFFIX = "/coordinator"


@dataclass(frozen=True, slots=True)
class Listed:
    """A job. `overview` is None where its coordinator did not answer: it is starting, or Ray restarts it."""

    actor: str
    """The name that its actors begin with: the job's, or its id where that was taken."""
    coordinator: Handle
    overview: JobOverview | None


def jobs_on_ray(namespace: str = NAMESPACE, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Listed]:
    """All jobs, by name. Those whose coordinator does not answer in time are among them."""
    handles: dict[str, Handle] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        ours = actor["namespace"] == namespace and actor["name"].endswith(COORDINATOR_SUFFIX)
        if ours and (handle := find_actor(actor["name"], namespace)) is not None:  # None: it has gone meanwhile
            handles[actor["name"].removesuffix(COORDINATOR_SUFFIX)] = handle
    overviews = _overviews(handles, timeout_s)
    return [Listed(name, handles[name], overviews[name]) for name in sorted(overviews)]


def find(name: str, namespace: str = NAMESPACE) -> tuple[JobCard, Handle]:
    """The job of a name or id. ConfigurationError, with the jobs that run, where there is not just one."""
    jobs = jobs_on_ray(namespace)
    cards = [(job.overview.card, job.coordinator) for job in jobs if job.overview is not None]
    found = [(card, handle) for card, handle in cards if name in (card.name, card.job_id)]
    if len(found) == 1:
        return found[0]
    if not found and any(job.actor == name and job.overview is None for job in jobs):
        raise ConfigurationError(
            f"the coordinator of {name!r} has not answered for {ANSWER_TIMEOUT_S:g} s: it is starting, or Ray restarts "
            "it; ask again, or look for dead nodes"
        )
    raise not_there(name, "on this Ray", [card for card, _ in cards])


def _overviews(handles: dict[str, Handle], timeout_s: float) -> dict[str, JobOverview | None]:
    """What the coordinators say. One that has died is left out, one that is being restarted is asked again."""
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
