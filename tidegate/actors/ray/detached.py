"""Jobs that outlive their driver: everything that such a job needs is outside of the driver's process.

Rules:

- The coordinator is a detached actor, which Ray restarts on any node. Its workers are detached as well. They outlive
  the coordinator's process, and end by themselves when Ray reports that the coordinator is gone for good
  (`coordinator_liveness.py`).
- Small detached actors hold the program, because an object that the driver has put into Ray's memory is lost with the
  driver. A restarted coordinator reads the program from them. There are two such actors, on different nodes if there
  are two nodes. The coordinator replaces a lost one, and moves one if both are on one node: one step at a time, and
  never the last copy first. The program is lost only if both actors and the coordinator are lost at once.
- The job has its own slots, because the slots of a session end with the session.
- After the end of the job its slots are released at once, and its actors end after `LINGER_S`. Until then attached
  drivers receive the end from the coordinator. Later they read it in the event log.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.ray.actor_calls import CONCURRENCY_GROUPS, NAMESPACE, find_actor
from tidegate.actors.ray.coordinator_actor import CoordinatorProcess
from tidegate.actors.ray.memory_store import SCHEME
from tidegate.actors.ray.placement import PoolOptions
from tidegate.actors.ray.reservation import common_name, own_name, release, started_here
from tidegate.actors.ray.task_deployment import Handle
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, Submission
from tidegate.protocol.failures import error_text
from tidegate.storage.errors import ConfigurationError, JobFailedError, TidegateError
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import ProcessId

log = logging.getLogger(__name__)

LINGER_S = 60.0
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 15.0
KILL_STEPS_MAX = 50
KILL_STEP_S = ASK_AGAIN_S = 0.2
ERROR_CHARACTERS_MAX = 500
RAY_RESTARTS_IT = ProcessId("Ray", "", 0, "")
"""Takes the place of the driver's process in the lease of a detached job, because Ray may restart a dead
coordinator.
"""

_remote: Any = ray.remote


@dataclass(frozen=True, slots=True)
class Program:
    """The objects from which a coordinator is created, pickled with cloudpickle."""

    spec: JobSpec
    context: JobContext
    options: PoolOptions
    card: JobCard


class DetachedCoordinator(CoordinatorProcess):
    """The actor class of a detached job's coordinator. It reads its program from a `ProgramHolder`, and ends
    after the job.
    """

    def __init__(self, job_id: JobId, namespace: str) -> None:
        pickled = read_program(job_id, namespace)
        program: Program = cloudpickle.loads(pickled)
        self._leaving = False
        self._me = ray.get_runtime_context().current_actor
        self._keeper = ProgramKeeper(job_id, namespace, pickled)
        super().__init__(program.spec, cloudpickle.dumps(ray.put(program.context)), program.options, program.card)
        self._keeper.start()

    def _publish_end(self) -> None:
        super()._publish_end()
        if not self._leaving:
            self._leaving = True
            self._keeper.close()
            threading.Thread(target=self._leave, name="tidegate-leave", daemon=True).start()

    def _leave(self) -> None:
        release_slots(self._options)
        threading.Event().wait(LINGER_S)
        _kill(*_holders(self._spec.job_id, self._options.namespace), self._me)


_Coordinator: Any = _remote(num_cpus=0, max_task_retries=0, concurrency_groups=CONCURRENCY_GROUPS)(DetachedCoordinator)


def check_detachable(name: str, namespace: str, urls: Sequence[str]) -> None:
    """Raises ConfigurationError if a job with this name and these storage URLs cannot run detached."""
    what = f"execute({name!r}, detached=True)"
    if started_here():
        raise ConfigurationError(
            f"{what}: this script has started Ray itself, and Ray ends with it. Start a cluster that stays "
            '(`ray start --head`), and join it: StreamEnvironment.raydp(ray_address="host:port")'
        )
    for url in urls:
        if url.startswith(SCHEME):
            raise ConfigurationError(
                f"{what}: checkpoints in memory ({url}) go with this script; name a storage that all nodes share "
                "(CheckpointConfig(storage=...))"
            )
    if (taken := find_actor(f"{name}/coordinator", namespace)) is not None and not _is_over(taken):
        raise ConfigurationError(
            f"{what}: a job of this name runs on this Ray already. Give this one another name, or end that one first "
            f"(`tidegate job {name} stop`, or env.attach({name!r}).cancel())"
        )


_CloudPickler: Any = cloudpickle.CloudPickler
"""Ray's cloudpickle pickler, for which Ray has no type hints."""


class _Finder(_CloudPickler):  # type: ignore[misc]
    """A pickler that finds Ray objects and actor handles in a program that will be lost when this driver ends."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Records an object if Ray deletes it with this driver, and pickles it as CloudPickler does."""
        if isinstance(obj, ray.ObjectRef):
            self.found.add("an object reference (ray.put, or the result of a task)")
        elif isinstance(obj, ActorHandle) and not _is_detached(obj):
            self.found.add("the handle of an actor that is not detached")
        return super().reducer_override(obj)


def _is_detached(handle: Handle) -> bool:
    known: Any = ray._private.state.actors(handle._actor_id.hex())
    return bool(known.get("IsDetached"))


def warn_of_ray_objects(graph: JobGraph) -> None:
    """Logs a warning for each vertex whose functions contain Ray objects that end with this driver."""
    for vertex in graph.vertices:
        finder = _Finder()
        finder.dump(vertex)
        if finder.found:
            log.warning(
                "a function of step %r holds %s of this driver, which ends with the driver: the detached job fails "
                "when it restarts. Give the function the value itself, or look up a detached actor by its name",
                vertex.name,
                " and ".join(sorted(finder.found)),
            )


def start_detached(submission: Submission, options: PoolOptions, restarts_max: int) -> Handle:
    """Starts a detached job, and returns its coordinator once it runs. The driver may end after that.

    Raises ConfigurationError if the job cannot start. `restarts_max`: how many times Ray may restart the coordinator.
    """
    name, job_id, namespace = submission.spec.job_name, submission.spec.job_id, options.namespace
    options = replace(options, driver=RAY_RESTARTS_IT)
    named = {"namespace": namespace, "lifetime": "detached"}
    actor: Handle | None = None
    warn_of_ray_objects(submission.context.graph)
    try:
        program = cloudpickle.dumps(Program(submission.spec, submission.context, options, submission.card))
        _end_finished_job(name, namespace)
        ProgramKeeper(job_id, namespace, program).fill()
        # The owner of this name is the only coordinator of the job.
        actor = _Coordinator.options(name=f"{name}/coordinator", max_restarts=restarts_max, **named).remote(
            job_id, namespace
        )
        await_start(actor)
    except BaseException as error:
        _kill(actor, *_holders(job_id, namespace))
        release_slots(options)
        if isinstance(error, ActorAlreadyExistsError):
            raise ConfigurationError(
                f"a job named {name!r} was started on this Ray at the same moment"
                f": attach to it with env.attach({name!r}), or give this job another name"
            ) from error
        if isinstance(error, RayError):
            why = " ".join(str(error).split())[:ERROR_CHARACTERS_MAX]
            raise ConfigurationError(
                f"the coordinator of {name!r} has not started within {START_TIMEOUT_S:g} s: {why}"
                ". Free a CPU on the cluster, or read the log of the Ray actor, and execute the job again"
            ) from error
        raise
    return actor


def await_start(coordinator: Handle) -> None:
    """Waits until a coordinator answers. Raises RayError if it is dead, or after `START_TIMEOUT_S`.

    Retries while only the connection is broken, because Ray may be restarting the coordinator.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            ray.get(coordinator.identify.remote(), timeout=max(0.0, deadline - time.monotonic()))
            return
        except ActorUnavailableError:
            if time.monotonic() >= deadline:
                raise
        threading.Event().wait(ASK_AGAIN_S)


def clean_up_lost_job(name: str, job_id: JobId) -> None:
    """Ends the remaining actors and slots of a detached job whose coordinator is lost for good."""
    try:
        program: Program = cloudpickle.loads(read_program(job_id, NAMESPACE))
        release_slots(program.options)
    except (RayError, TidegateError) as error:
        _release_by_name(job_id, error)
    _kill(find_actor(f"{name}/coordinator", NAMESPACE), *_holders(job_id, NAMESPACE))


def release_slots(options: PoolOptions) -> None:
    """Releases the slots of a detached job."""
    if options.placement is not None:
        release(options.placement.placement_group)
    release(options.own_slots)


def _release_by_name(job_id: JobId, why: Exception) -> None:
    """Releases the slots of a job whose program is lost. Finds them by the names of their placement groups. `why` is
    logged.
    """
    found = [name for name in (common_name(job_id), own_name(job_id)) if _release_named(name)]
    if not found:
        log.warning(
            "if job %s had slots, they may be left behind (`ray list placement-groups` shows them): %s", job_id, why
        )


def _release_named(name: str) -> bool:
    try:
        release(ray.util.get_placement_group(name))
    except ValueError:
        return False
    return True


def _end_finished_job(name: str, namespace: str) -> None:
    """Ends the remaining actors of an older job with this name, if that job has ended. Raises RayError."""
    coordinator = find_actor(f"{name}/coordinator", namespace)
    if coordinator is not None and _is_over(coordinator):
        overview: JobOverview = ray.get(coordinator.overview.remote(), timeout=CALL_TIMEOUT_S)
        _kill(coordinator, *_holders(overview.card.job_id, namespace))
        for _ in range(KILL_STEPS_MAX):
            if find_actor(f"{name}/coordinator", namespace) is None:
                return
            threading.Event().wait(KILL_STEP_S)


def _kill(*actors: Handle | None) -> None:
    for actor in actors:
        if actor is not None:
            ray.kill(actor, no_restart=True)


def _holders(job_id: JobId, namespace: str) -> list[Handle]:
    return [held for name in holders_of(job_id) if (held := find_actor(name, namespace)) is not None]


def _is_over(coordinator: Handle) -> bool:
    """Returns whether the job of a coordinator has ended. False if the coordinator does not answer, as it may be
    restarting.
    """
    try:
        return bool(ray.get(coordinator.view.remote(0.0), timeout=CALL_TIMEOUT_S).ended)
    except RayError:
        return False


LOOK_EVERY_S = 5.0
ASK_TIMEOUT_S = 15.0
MAKE_TIMEOUT_S = 180.0
READ_RETRY_S = 0.5


class ProgramHolder:
    """The class of the actor that stores one copy of a detached job's program."""

    def __init__(self, name: str, pickled: bytes) -> None:
        self._name = name
        self._pickled = pickled

    def __repr__(self) -> str:
        """Returns the name under which Ray shows the actor in logs."""
        return f"{self._name.replace('/', ': ')}, {len(self._pickled):,} bytes"

    def read(self) -> bytes:
        """Returns the pickled program."""
        return self._pickled

    def node(self) -> str:
        """Returns the id of this actor's node. Answers only after the actor has received the program."""
        found: str = ray.get_runtime_context().get_node_id()
        return found


_Holder: Any = _remote(num_cpus=0, max_restarts=0)(ProgramHolder)


def holders_of(job_id: JobId) -> tuple[str, str]:
    """Returns the names of the two actors that hold copies of a job's program."""
    return (f"{job_id}/program", f"{job_id}/program copy")


@dataclass(frozen=True, slots=True)
class Make:
    """A step of `next_step`: create a missing copy of the program, on `node`, or on any node if that is None."""

    name: str
    node: str | None


@dataclass(frozen=True, slots=True)
class End:
    """A step of `next_step`: end a copy of the program that shares its node with the other copy, to create it
    elsewhere.
    """

    name: str


def next_step(places: Mapping[str, str | None], nodes: Collection[str]) -> Make | End | None:
    """Returns the next step to keep both copies of the program on different nodes, or None if nothing is to do.

    `places` has the node of each copy by name, None for a lost copy. `nodes` are the living nodes.
    """
    alive = {name: node for name, node in places.items() if node is not None}
    elsewhere = sorted(set(nodes) - set(alive.values()))
    for name in places:
        if name not in alive:
            return Make(name, elsewhere[0] if elsewhere else None)
    if len(alive) > 1 and len(set(alive.values())) == 1 and elsewhere:
        return End(list(alive)[-1])
    return None


class ProgramKeeper:
    """Keeps two copies of one program available. `look` must be called from one thread at a time."""

    def __init__(self, job_id: JobId, namespace: str, pickled: bytes) -> None:
        self._names = holders_of(job_id)
        self._namespace = namespace
        self._pickled = pickled
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts a thread that calls `look` every `LOOK_EVERY_S`, until `close`."""
        threading.Thread(target=self._keep, name="tidegate-program", daemon=True).start()

    def close(self) -> None:
        """Stops the thread that watches the copies, because the job has ended."""
        self._closed.set()

    def fill(self) -> None:
        """Creates all copies of the program. Raises RayError."""
        while self.look():
            pass

    def look(self) -> bool:
        """Creates or moves one copy of the program if needed. Returns whether it did. Raises RayError."""
        places = {name: self._place(name) for name in self._names}
        nodes = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        step = next_step(places, nodes)
        match step:
            case Make(name, node):
                log.info("a copy of the program is made: %s", name)
                ray.get(self._make(name, node).node.remote(), timeout=MAKE_TIMEOUT_S)
            case End(name):
                log.info("both copies of the program are on one node: %s moves to another", name)
                ray.kill(ray.get_actor(name, namespace=self._namespace), no_restart=True)
        return step is not None

    def _keep(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            try:
                self.look()
            except (RayError, ActorAlreadyExistsError, ValueError) as error:
                # A copy has ended at this moment, or does not answer. The next look shows which.
                log.info("the copies of the program could not be looked after: %s", error_text(error))

    def _place(self, name: str) -> str | None:
        held = find_actor(name, self._namespace)
        if held is None:
            return None
        try:
            return str(ray.get(held.node.remote(), timeout=ASK_TIMEOUT_S))
        except ActorDiedError:
            return None

    def _make(self, name: str, node: str | None) -> Handle:
        where = {} if node is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        return _Holder.options(name=name, namespace=self._namespace, lifetime="detached", **where).remote(
            name, self._pickled
        )


def read_program(job_id: JobId, namespace: str) -> bytes:
    """Returns the pickled program of a job from the first copy that answers.

    Raises JobFailedError if no copy exists any more, or none answers in time.
    """
    deadline = time.monotonic() + MAKE_TIMEOUT_S
    while True:
        held = [found for name in holders_of(job_id) if (found := find_actor(name, namespace)) is not None]
        if not held:
            raise JobFailedError(
                f"the program of {job_id} is lost, because the nodes of both copies were lost; execute the job again "
                "with restore='latest'"
            )
        waiting = [holder.read.remote() for holder in held]
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            (*answered,), waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
            for answer in answered:
                try:
                    pickled: Any = ray.get(answer)
                except RayError as error:
                    log.info("a copy of the program of %s cannot be read: %s", job_id, error_text(error))
                else:
                    return bytes(pickled)
        if time.monotonic() > deadline:
            raise JobFailedError(
                f"no copy of the program of {job_id} has answered within {MAKE_TIMEOUT_S:g} s"
                "; look for dead nodes, and execute the job again with restore='latest'"
            )
        threading.Event().wait(READ_RETRY_S)
