"""The program of a detached job, for a coordinator that Ray restarts: nobody else has it when the driver has gone.

Rules:

- Two small actors hold it, on different nodes where there are two. So the loss of one node leaves one of them, also
  when the coordinator was on that node.
- The coordinator, which has the program too, makes a new one where one is gone, and moves one where both have come to
  be on one node: one step at a look, and never the last copy first.
- Only when both and the coordinator go at once is the program lost, and the job with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.ray.fleet.named_actors import find_actor
from tidegate.actors.ray.process.orders import Handle
from tidegate.protocol.failure_reasons import error_text
from tidegate.storage.errors import JobFailedError
from tidegate.storage.ids import JobId

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
ASK_TIMEOUT_S = 15.0
MAKE_TIMEOUT_S = 180.0
READ_RETRY_S = 0.5

_remote: Any = ray.remote


class HeldProgram:
    """The class of the actor that holds one copy."""

    def __init__(self, name: str, pickled: bytes) -> None:
        self._name = name
        self._pickled = pickled

    def __repr__(self) -> str:
        """What Ray shows of this actor."""
        return f"{self._name.replace('/', ': ')}, {len(self._pickled):,} bytes"

    def read(self) -> bytes:
        """The program, pickled."""
        return self._pickled

    def node(self) -> str:
        """Where it is; answered once it holds the program."""
        found: str = ray.get_runtime_context().get_node_id()
        return found


_Holder: Any = _remote(num_cpus=0, max_restarts=0)(HeldProgram)


def holders_of(job_id: JobId) -> tuple[str, str]:
    """The names of the actors that hold the program of a job."""
    return (f"{job_id}/program", f"{job_id}/program copy")


@dataclass(frozen=True, slots=True)
class Make:
    """A copy is missing: make it, on this node if that can be (None: anywhere)."""

    name: str
    node: str | None


@dataclass(frozen=True, slots=True)
class End:
    """A copy is where another one is, and there is another node: end it, to be made there."""

    name: str


def next_step(places: Mapping[str, str | None], nodes: Collection[str]) -> Make | End | None:
    """What to do about copies. `places`: the node of each, None for one that is gone. `nodes`: those that live."""
    alive = {name: node for name, node in places.items() if node is not None}
    elsewhere = sorted(set(nodes) - set(alive.values()))
    for name in places:
        if name not in alive:
            return Make(name, elsewhere[0] if elsewhere else None)
    if len(alive) > 1 and len(set(alive.values())) == 1 and elsewhere:
        return End(list(alive)[-1])
    return None


class ProgramKeeper:
    """Keeps the copies of one program. `look` may be called from one thread at a time."""

    def __init__(self, job_id: JobId, namespace: str, pickled: bytes) -> None:
        self._names = holders_of(job_id)
        self._namespace = namespace
        self._pickled = pickled
        self._closed = threading.Event()

    def start(self) -> None:
        """Look now and then, until `close`."""
        threading.Thread(target=self._keep, name="tidegate-program", daemon=True).start()

    def close(self) -> None:
        """The job is over."""
        self._closed.set()

    def fill(self) -> None:
        """Make the copies of a job that starts. Raises RayError."""
        while self.look():
            pass

    def look(self) -> bool:
        """Take one step, if one is due. Raises RayError."""
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
                # One has gone at this moment, or does not answer: the next look tells.
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
    """The program of a job, from whoever answers. JobFailedError when nobody holds it any more, or answers in time."""
    deadline = time.monotonic() + MAKE_TIMEOUT_S
    while True:
        held = [found for name in holders_of(job_id) if (found := find_actor(name, namespace)) is not None]
        if not held:
            raise JobFailedError(
                f"nobody holds the program of {job_id} any more: the nodes of both copies were lost; execute the job "
                "again with restore='latest'"
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
            raise JobFailedError(f"those that hold the program of {job_id} have not answered for {MAKE_TIMEOUT_S:g} s")
        threading.Event().wait(READ_RETRY_S)
