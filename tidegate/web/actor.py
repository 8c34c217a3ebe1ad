"""`WebActor`: the web server of a Ray: one small actor, which all drivers and all clients share.

Rules:
- Whoever wants it and finds none starts it, on its own node, so that its address is one of that machine. Its name is
  `tidegate/web`; Ray shows it with its address.
- It reserves nothing, and works with the lowest priority of the machine: what is left by jobs is enough for it.
- It is nobody's, and ends with its cluster. On one that outlives the driver it leaves when no job has run for a while.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.ray.fleet.named_actors import find_actor
from tidegate.actors.ray.process.calls import NAMESPACE
from tidegate.actors.ray.process.death_words import death_of
from tidegate.actors.ray.slots.reservation import started_here
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.files.store import OpenStore
from tidegate.web.options import WebOptions, digest_of, find_token
from tidegate.web.ray_jobs import RayJobs
from tidegate.web.server import WebServer

log = logging.getLogger(__name__)

NAME = "tidegate/web"
NICENESS = 19
START_TIMEOUT_S = 60.0
IDLE_MS = 600_000
LOOK_S = 15.0


@dataclass(frozen=True, slots=True)
class Served:
    """A web server, and whether it is the one that was asked for: it listens as asked, and knows the token."""

    url: str
    same_token: bool


class WebActor:
    """The actor's class. `leaves`: whether it goes by itself."""

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
        """Where it listens, and whether it knows this token."""
        self._used_ms = monotonic_ms()
        return Served(self._server.url, digest == self._digest)

    def _leave(self) -> None:
        """Wait until nobody needs it, and go."""
        pause = threading.Event()
        while self._server.alive:
            pause.wait(LOOK_S)
            if self._server.watch.runs_jobs:
                self._used_ms = monotonic_ms()
            if monotonic_ms() - self._used_ms > IDLE_MS:
                break
        self._server.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


# Ray's types do not know of all options.
_remote: Any = ray.remote
_Web: Any = _remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(WebActor)


def serve_on_ray(options: WebOptions, open_store: OpenStore, namespace: str = NAMESPACE) -> str:
    """The address of the web server of this Ray, which is started unless it runs. ConfigurationError if it cannot.

    A server that runs already stays as it is, whatever the options say.
    """
    token, where = find_token()
    digest, leaves = digest_of(token), not started_here()
    actor = find_actor(NAME, namespace) or _start(options, digest, open_store, namespace, leaves)
    try:
        served: Served = ray.get(actor.served.remote(digest), timeout=START_TIMEOUT_S)
    except TidegateError:
        raise
    except RayError as error:
        cause = error.__cause__
        why = str(cause) if isinstance(cause, TidegateError) else death_of(error)
        raise ConfigurationError(f"the web server has not started: {why}") from error
    if not served.same_token:
        log.warning("the web server at %s was started with another token than that of %s", served.url, where)
    return served.url


def _start(options: WebOptions, digest: bytes, open_store: OpenStore, namespace: str, leaves: bool) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = _Web.options(name=NAME, namespace=namespace, scheduling_strategy=here, lifetime="detached")
    try:
        return actor.remote(options, digest, open_store, namespace, leaves)
    except ActorAlreadyExistsError:
        return ray.get_actor(NAME, namespace=namespace)
