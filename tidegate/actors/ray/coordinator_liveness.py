"""Ends a worker's process when its coordinator is lost for good, or when the current coordinator does not list the
process.

Workers outlive their coordinator, because Ray restarts it. So they are detached actors that Ray does not end. Rules:

- `CoordinatorLiveness`: a call to the coordinator stays pending while it lives. When the call fails, Ray reports
  whether the coordinator comes back. The process ends after the second report that it does not, because one could be a
  mistake.
- `MembershipCheck`: a process requests whether it belongs to the job when it has started, and every `ASK_EVERY_S`. Ray
  still carries out the orders of a coordinator whose network link was cut. So a process may start long after a new
  coordinator has taken over that never ordered it, or on a node that was cut off and replaced.
- Only the current coordinator can answer. A coordinator that is taking over answers None, and answers from a replaced
  coordinator are ignored. The process ends after two denials in a row, because it may just be getting subtasks.
- These checks do not need the mailbox, because it may be blocked by a function of the user.
- A process that Ray has not started yet cannot end itself, and would keep its name and its demand for resources for
  ever. So the living processes of a job that is gone end the waiting ones first, and each environment and submission
  does so too.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.task_deployment import Handle
from tidegate.actors.task.invariants import may_obey
from tidegate.protocol.failures import error_text
from tidegate.storage.ids import Generation

log = logging.getLogger(__name__)

ASK_EVERY_S, ASK_AGAIN_S = 30.0, 0.5
LEAVE_S_MAX = 5.0
"""Seconds for which a process lives on to end the waiting processes of its job. Ray may not answer."""
DENIALS = 2
"""Number of denials in a row after which a process ends."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A coordinator's answer whether a process belongs to its job. `known` is None while the coordinator has no
    list of its processes yet.
    """

    generation: Generation
    known: bool | None


class Step(enum.Enum):
    """The next step of a process after an answer about its membership. LATER: repeat the request after `ASK_EVERY_S`.
    SOON: repeat it after `ASK_AGAIN_S`. LEAVE: end the process.
    """

    LATER = "later"
    SOON = "soon"
    LEAVE = "leave"


class DenialCounter:
    """Decides whether a process ends, from the answers about its membership. No I/O."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def answered(self, answer: Membership | None, newest: int) -> Step:
        """Returns the next step after an answer, or after a failed request (None).

        `newest` is the generation of the newest coordinator that has sent this process a message.
        """
        if answer is None or answer.known is None or not may_obey(answer.generation, newest):
            self._in_a_row = 0
            return Step.SOON
        self._in_a_row = 0 if answer.known else self._in_a_row + 1
        if answer.known:
            return Step.LATER
        return Step.LEAVE if self._in_a_row >= DENIALS else Step.SOON


class MembershipCheck:
    """Requests from the coordinator, repeatedly, whether this process belongs to its job. Ends the process if it does
    not.

    `ask` calls the coordinator. `newest` returns the generation of the newest coordinator that has sent a message.
    `leave` ends the process.
    """

    def __init__(self, ask: Callable[[], Any], newest: Callable[[], int], leave: Callable[[], None]) -> None:
        self._ask = ask
        self._newest = newest
        self._leave = leave
        self._denials = DenialCounter()

    def hold(self) -> None:
        """Starts the requests to the coordinator: sends one now, and another one after each answer."""
        self._ask().future().add_done_callback(self._answered)

    def _answered(self, call: Future[Membership]) -> None:
        answer = None if call.exception() is not None else call.result()
        step = self._denials.answered(answer, self._newest())
        if step is Step.LEAVE:
            log.warning("the current coordinator does not list this process (%s): it ends", answer)
            self._leave()
            return
        again = threading.Timer(ASK_EVERY_S if step is Step.LATER else ASK_AGAIN_S, self.hold)
        again.daemon = True
        again.start()


def watch_coordinator(coordinator: Handle, info: ProcessInfo, newest: Callable[[], int]) -> None:
    """Starts to watch the coordinator. Ends this process when it is lost for good, or does not list the process.

    Returns at once.
    """
    CoordinatorLiveness(lambda: coordinator.live.remote(), _leave_with_orphans).hold()
    MembershipCheck(lambda: coordinator.membership.remote(info.name, info.actor_id), newest, end_process).hold()


def _leave_with_orphans() -> None:
    """Ends this process, because the coordinator is lost for good.

    First ends worker processes of the job that never started. Runs on a new thread.
    """
    threading.Thread(target=_end_all, name="tidegate-leave", daemon=True).start()


def _end_all() -> None:
    limit = threading.Timer(LEAVE_S_MAX, end_process)
    limit.daemon = True
    limit.start()
    try:
        end_orphans()
    finally:
        end_process()


DEATHS = 2
"""Number of consecutive reports of Ray that the coordinator is dead, after which the process ends."""


def end_process() -> None:
    """Ends this process at once."""
    os._exit(0)


class CoordinatorLiveness:
    """Ends this process when Ray reports that its coordinator is dead.

    `live` calls the coordinator. The call returns only when the coordinator has died.
    """

    def __init__(self, live: Callable[[], Any], leave: Callable[[], None] = end_process) -> None:
        self._live = live
        self._leave = leave
        self._deaths = 0

    def hold(self) -> None:
        """Makes the call `live`, which stays pending while the coordinator lives."""
        self._live().future().add_done_callback(self._ended)

    def _ended(self, call: Future[Any]) -> None:
        self._deaths = self._deaths + 1 if isinstance(call.exception(), ActorDiedError) else 0
        if self._deaths >= DEATHS:
            self._leave()
            return
        again = threading.Timer(ASK_AGAIN_S, self.hold)
        again.daemon = True
        again.start()


WORKER_CLASS = "WorkerProcess"
COORDINATOR_SUFFIX = "/coordinator"
_WAITS = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")
_DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class ActorRow:
    """An actor in Ray's list of actors. `ray_job` is the Ray job that created it, directly or indirectly."""

    name: str
    class_name: str
    ray_job: str
    state: str


def orphans(actors: Iterable[ActorRow]) -> list[str]:
    """Returns the names of worker processes that wait for resources although their coordinator is dead. No I/O.

    Only coordinators in the same Ray job as the worker are considered.
    """
    known = [actor for actor in actors if actor.name and actor.state != _DEAD]
    jobs = [(a.name.removesuffix("coordinator"), a.ray_job) for a in known if a.name.endswith(COORDINATOR_SUFFIX)]
    return [
        actor.name
        for actor in known
        if actor.class_name == WORKER_CLASS
        and actor.state in _WAITS
        and not any(actor.name.startswith(prefix) and actor.ray_job == ray_job for prefix, ray_job in jobs)
    ]


def end_orphans(namespace: str = NAMESPACE) -> None:
    """Ends waiting worker processes of jobs that are gone. Errors of Ray are logged, and the next environment
    tries again.
    """
    try:
        actors: Any = ray._private.state.actors()
        rows = [ActorRow(a["Name"], a["ActorClassName"], a["JobID"], a["State"]) for a in actors.values()]
        for name in orphans(rows):
            log.info("%s waits for room, but its job is gone: ending it", name)
            try:
                ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
            except ValueError:
                continue  # It has ended meanwhile, or belongs to another namespace.
    except (RayError, ConnectionError, RuntimeError) as error:
        log.warning("searching for processes of jobs that are gone failed: %s", error_text(error))
