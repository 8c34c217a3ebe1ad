"""How many spare processes a job keeps, when they begin, and in which bundle the next one belongs. Pure.

Rules:

- A number that somebody has named holds. "auto" is one for each free slot of the reservation, since in place of a task
  that is lost each will need what a slot has; but no more than there are tasks, and no more than a few.
- One is kept in any case: it takes no share of a slot until it is put to work, and spares a restart the start of a
  process.
- Those of "auto" begin later than those that somebody has asked for: each takes a processor for seconds, and a job that
  has ended before has lost nothing.
- Only tasks in common slots count: no spare process takes the place of a task that has a slot of its own kind
  (`slot_plan.py`), so none is kept for it.
- A task that is followed has a spare process to itself, which holds its state; those of "auto" come on top.
- Spare processes are spread over nodes first, then over bundles: a node takes those on it along. On a node with none,
  or with as many as any other, they stand beside tasks, in whose place they go on with the local copies there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from tidegate.actors.drivers.process_settings import AUTO_STANDBY_DELAY_MS, STANDBY_DELAY_MS, Standbys

AUTO_MAX = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is: its bundle, and its node once it has started."""

    bundle: int
    node: str | None


def standbys_kept(wanted: Standbys, free_slots: int, tasks: int, followed: int = 0) -> int:
    """How many spare processes a job keeps; `free_slots`: those of the reservation that no job has. `tasks`: those in
    common slots.

    `followed`: tasks each of which has one that follows it, beside the others.
    """
    if isinstance(wanted, int):
        return wanted
    return followed + max(1, min(free_slots, tasks, AUTO_MAX))


def standby_delay_ms(wanted: Standbys) -> int:
    """How long after a deployment the first spare process begins."""
    return AUTO_STANDBY_DELAY_MS if wanted == "auto" else STANDBY_DELAY_MS


def must_wait(common: int, own: int, spare: int, *, reserved: bool) -> bool:
    """Whether tasks without a process must wait while nodes are avoided, since one would start in a bundle there.

    `common`, `own`: how many have common slots, and slots of their own; these are always reserved. `spare`: processes
    on other nodes, which can take over at once. `reserved`: whether the common slots are.
    """
    return own > 0 or (reserved and common > spare)


def best_follower(task: Place | None, standbys: Sequence[Place]) -> int:
    """Which of these is to follow a task: on another node if there is one, else in another bundle; the first of those.

    The node of the task may be lost, and then the state that is held is what spares the reading.
    """
    return max(range(len(standbys)), key=lambda i: (_apart(task, standbys[i]), -i))


def _apart(task: Place | None, standby: Place) -> int:
    if task is None:
        return 0
    return 2 * (task.node != standby.node) + (task.bundle != standby.bundle)


def node_elsewhere(avoided: Container[str], busy: Sequence[str], own: str) -> str:
    """The node of a process that belongs in no bundle, while nodes are to be avoided.

    `busy`: the node of each process that answers. The one with the fewest of them; `own`, the coordinator's, where all
    others are to be avoided.
    """
    counts = Counter(node for node in busy if node not in avoided)
    return min(counts, key=lambda node: (counts[node], node), default=own)


def next_bundle(bundles: Sequence[int], tasks: Sequence[Place], standbys: Sequence[Place]) -> int:
    """The bundle of one more spare process beside processes that live.

    Of equal ones the first of `bundles`, which may hold a bundle several times. A bundle in which nothing has started
    counts as a node of its own.
    """
    nodes: dict[int, str | int] = {bundle: bundle for bundle in bundles}
    nodes |= {place.bundle: place.node for place in (*tasks, *standbys) if place.node is not None}
    on_node = Counter(nodes[place.bundle] for place in standbys)
    in_bundle = Counter(place.bundle for place in standbys)
    with_tasks = {place.bundle for place in tasks}
    return min(bundles, key=lambda bundle: (on_node[nodes[bundle]], in_bundle[bundle], bundle not in with_tasks))
