"""Has fork servers started before a job needs them, and says how the processes of a job are to start.

The driver calls it. A task of Ray that does nothing is sent to each node as soon as there is a runtime: its process is
the first that the server there forks. So the server imports while the program is planned and its coordinator starts.
Ray keeps the process, and the first task of a job gets it.

Rules:

- Nobody waits for a server who has something better: until the one beside the driver has answered, a coordinator gets a
  process that Ray keeps ready. Tasks come later, and are forked.
- Where the first process says that it was not forked, no process of later jobs is: with the server's script they would
  only start later.
- A program, which is a job of Ray, sends a node one such task, and all of them anew when the server beside the driver
  has ended, as it does when it has had no child for a while. A task that is lost nobody misses: who comes next starts
  the server.
"""

from __future__ import annotations

import os
import select
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.actors.runtimes.ray.fork_server.launch import IN_AN_EXECUTOR
from tidegate.actors.runtimes.ray.fork_server.worker_command import actor_options, not_possible, why_not_forked

NODES_MAX = 64
"""So many nodes are sent something. On others the first process of a job starts the server."""


@dataclass(frozen=True, slots=True)
class Start:
    """How processes of tasks start. `options`: what Ray is told. `why_not_forked`: None if they are, or need not be."""

    options: Mapping[str, Any] = field(default_factory=dict)
    why_not_forked: str | None = None


@dataclass(slots=True)
class _Program:
    """What was sent for one job of Ray, by the ids of nodes."""

    session: str
    job: str
    sent: dict[str, ray.ObjectRef[Any]] = field(default_factory=dict)
    server: int | None = None
    """The server beside the driver: a descriptor of its process."""

    def begin_anew(self) -> None:
        """Nothing is known of any server."""
        self.sent.clear()
        if self.server is not None:
            os.close(self.server)
            self.server = None


@dataclass(frozen=True, slots=True)
class FirstProcess:
    """What it says of itself."""

    why_not_forked: str | None
    parent: int
    """The server, if it was forked."""


_programs: list[_Program] = []
"""That of this process: none before it has connected to Ray."""


def start_servers(nodes: Collection[str] = ()) -> None:
    """Have the servers of this node and of these ones start, unless they were told to."""
    options, program = actor_options(), _program()
    if not options:
        return
    _answer()
    for node in [_here(), *sorted(nodes)][:NODES_MAX]:
        if node not in program.sent:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            program.sent[node] = _first_process().options(scheduling_strategy=there, **options).remote()


def task_start(wanted: bool, on_spark: bool) -> Start:
    """How the processes of a job are to start that has this setting. `on_spark`: Ray is in executors of Spark."""
    if not wanted:
        return Start()
    if on_spark:
        return Start(why_not_forked=IN_AN_EXECUTOR)
    if (why_not := not_possible()) is not None:
        return Start(why_not_forked=why_not)
    start_servers()
    _, why_not = _answer()
    return Start(actor_options()) if why_not is None else Start(why_not_forked=why_not)


def coordinator_options(of_tasks: Mapping[str, Any]) -> dict[str, Any]:
    """How the coordinator of a job is to start whose tasks start in this way."""
    return dict(of_tasks) if of_tasks and _answer()[0] else {}


def _answer() -> tuple[bool, str | None]:
    """Whether the server here forks, as far as is known, and why it does not."""
    program = _program()
    first = program.sent.get(_here())
    if first is None or not ray.wait([first], timeout=0)[0]:
        return False, None
    try:
        found: FirstProcess = ray.get(first)
        if found.why_not_forked is not None:
            return False, found.why_not_forked
        if program.server is None:
            program.server = os.pidfd_open(found.parent)
    except (RayError, OSError):
        program.begin_anew()
        return False, None
    if select.select([program.server], [], [], 0)[0]:
        program.begin_anew()
        return False, None
    return True, None


def _here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _program() -> _Program:
    context = ray.get_runtime_context()
    session, job = context.get_session_name(), context.get_job_id()
    if not _programs or (_programs[0].session, _programs[0].job) != (session, job):
        for former in _programs:
            former.begin_anew()
        _programs[:] = [_Program(session, job)]
    return _programs[0]


@cache
def _first_process() -> Any:
    """Made when it is asked for, as Ray's classes of actors are."""
    remote: Any = ray.remote
    return remote(num_cpus=0, max_retries=0)(_first)


def _first() -> FirstProcess:
    return FirstProcess(why_not_forked(os.environ), os.getppid())
