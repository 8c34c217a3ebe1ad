"""`Member`: one process of a job, what is known of it, and in which words its end is told."""

from __future__ import annotations

from collections.abc import Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ray.exceptions import RayError

from tidegate.actors.graph.slot_plan import WorkerId
from tidegate.actors.ray.exchange.line import Line
from tidegate.actors.ray.fleet.standby_plan import Place
from tidegate.actors.ray.process.death_words import death_of, memory_death
from tidegate.actors.ray.process.exit_reasons import Witness, last_lines
from tidegate.actors.ray.process.orders import Handle, Peer
from tidegate.actors.ray.process.process_info import ProcessInfo
from tidegate.protocol.failure_reasons import bounded_text, error_text
from tidegate.protocol.identity import TaskId

END_WAIT_MS = 200
"""How long the end of a process may take to show after its connections have broken."""


@dataclass(slots=True, eq=False)
class Member:
    """One process."""

    name: str
    handle: Handle
    bundle: int | None
    """That of the common slots in which it is; None where nothing is reserved, and in a slot of its own kind."""
    gone: Future[None]
    """Done when the process has died, with what Ray says about it."""
    info: ProcessInfo | None = None
    """None until the process has started."""
    heard_at_ms: int | None = None
    """When it gave its last sign of life, in ms since the epoch; None before the first."""
    dead: bool = False
    witness: Witness | None = None
    """Where the process runs on this node."""
    given_up: bool = False
    """No task is given to it any more, and it is ended once the log says so (`given_up.py`)."""
    doubted: bool = False
    """It has not answered for long, and is being asked a last question: no task is given to it meanwhile."""
    cut_off: bool = False
    """A call to it broke, and it is asked whether it lives (`lost_nodes.py`): no task is given to it meanwhile."""
    follows: WorkerId | None = None
    """The worker of whose subtasks it holds the state, of a standby."""
    acting: TaskId | None = None
    """The subtask that acted when it last answered."""
    line: Line = field(init=False)
    """By which it is told what concerns its task."""

    def __post_init__(self) -> None:
        self.line = Line(self.handle, {})

    @property
    def usable(self) -> bool:
        """Whether it is one of the job's, and is told what concerns its task."""
        return not self.dead and not self.given_up

    @property
    def fit(self) -> bool:
        """Whether it may be given a task."""
        return self.usable and not self.doubted and not self.cut_off

    @property
    def process_id(self) -> str:
        """What no other process is called; its name where it has not said that yet."""
        return self.name if self.info is None else self.info.actor_id or self.name

    def as_peer(self) -> Peer:
        """Return how other processes reach it, once it has started."""
        assert self.info is not None
        return Peer(self.handle, self.process_id, self.info.node_id, self.info.address)

    def is_on(self, nodes: Container[str]) -> bool:
        """Whether it runs on one of these nodes."""
        return self.info is not None and self.info.node_id in nodes

    def forget(self) -> None:
        """Let go of a process that has ended."""
        if self.witness is not None:
            self.witness.close()


def places_of(members: Iterable[Member]) -> list[Place]:
    """Where those processes are that are in bundles of the common slots, and of use."""
    return [place_of(m) for m in members if m.usable and m.bundle is not None]


def place_of(member: Member) -> Place:
    """Where a process is; bundle -1 where it is in none of the common slots."""
    return Place(-1 if member.bundle is None else member.bundle, None if member.info is None else member.info.node_id)


def reason_of(member: Member, error: BaseException) -> str:
    """Why a call to a process failed, in one line: how the process has ended, which it was, and what it said last."""
    if not isinstance(error, RayError):
        return error_text(error)
    info, end = member.info, None if member.witness is None else member.witness.end(END_WAIT_MS)
    end = memory_death(str(error)) or end
    known = f"{end}: " if end else ""
    where = member.name if info is None else f"{member.name}, pid {info.pid},"
    words = "" if info is None else last_lines(info.stderr_path)
    if words:
        told = f"; the last lines of its stderr: {words}"
    elif end:
        told = ""
    else:
        told = f", and how is not known here: {death_of(error)}"
    place = "" if info is None or words else f". Its log on node {info.node_id}: {info.stderr_path}"
    return bounded_text(f"{known}the process {where} has ended{told}{place}")
