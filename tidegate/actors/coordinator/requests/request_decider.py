"""Decides which of the waiting requests becomes the next checkpoint, and when (Flink's `CheckpointRequestDecider`).

`checkpoint_keeper.py` calls `enqueue` for each request and `decide` after each event. Both are pure functions. Rules:

- At most `REQUESTS_MAX` requests wait: forced savepoints first, then savepoints, then checkpoints, each in the order in
  which they came. A full queue refuses the newest request that is not forced.
- Periodic checkpoints take no room in the queue: one is due, or none is.
- Nothing starts while master hooks are called for another checkpoint. Tasks must hear of checkpoints in the order of
  their numbers: one that they hear of after a newer one is stale to them, and could never complete.
- Otherwise a forced savepoint starts at once. All else waits while sink commits lag behind, and while the job is being
  stopped. A checkpoint also waits while `max_concurrent` checkpoints and savepoints are pending.
- A savepoint does not wait for checkpoints: a user wants it, and a slow checkpoint may be the reason. It waits only for
  other savepoints, `max_concurrent` at a time. Where checkpoints are unaligned, it waits for these as well: they are
  taken one at a time, and a savepoint is aligned (as in Flink).
- The minimum pause holds for periodic checkpoints alone.
- Each savepoint is a checkpoint of its own. Requests for a checkpoint that wait together are answered by one.
- If a checkpoint fails because a task was just leaving, its requests wait again, at most `RETRIES_MAX` times. The next
  plan knows that the task has finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.job.job_spec import CheckpointSettings
from tidegate.actors.coordinator.requests.checkpoint_properties import CHECKPOINT, CheckpointProperties
from tidegate.storage.codec import wire

REQUESTS_MAX = 1_000
RETRIES_MAX = 10
"""How often a request may go back into the queue."""
COMMITS_WAITING_MAX = 4
"""How many completed checkpoints may wait for their sink commit before the next one has to wait."""


@wire
@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A user's request that has not been started. `request` is the user's own name for it."""

    request: str
    at_ms: int
    properties: CheckpointProperties = CHECKPOINT
    retries: int = 0
    """How often it has gone back into the queue."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start this checkpoint now, for these requests. `queue`: what still waits."""

    properties: CheckpointProperties
    requests: tuple[str, ...]
    queue: tuple[CheckpointRequest, ...]
    retries: int = 0
    """How often one of these requests has gone back into the queue, at most."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The periodic checkpoint that is due has to wait until then."""

    until_ms: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the decision depends on.

    `pending` counts all pending checkpoints, `savepoints` the savepoints among them. `final`: all operators have
    finished, and no checkpoint covers that yet. `hooks`: master hooks are being called for one.
    """

    queue: tuple[CheckpointRequest, ...]
    due: bool
    final: bool
    pending: int
    commits_waiting: int
    stopping: bool
    last_completed_at_ms: int
    savepoints: int = 0
    hooks: bool = False


def enqueue(
    queue: tuple[CheckpointRequest, ...], request: CheckpointRequest
) -> tuple[tuple[CheckpointRequest, ...], CheckpointRequest | None]:
    """The queue with the request in its place, and the request that is refused if there is no room."""
    refused = None
    if len(queue) >= REQUESTS_MAX:
        if not request.properties.forced:
            return queue, request
        refused = max((r for r in queue if not r.properties.forced), key=lambda r: r.at_ms, default=None)
        if refused is None:
            return queue, request
        queue = tuple(r for r in queue if r is not refused)
    return tuple(sorted((*queue, request), key=_rank)), refused


def decide(demand: Demand, settings: CheckpointSettings, at_ms: int) -> Start | Pause | None:
    """What to start now, if anything."""
    if demand.hooks:
        return None
    first = demand.queue[0] if demand.queue else None
    if first is not None and first.properties.forced:
        return Start(first.properties, (first.request,), demand.queue[1:], first.retries)
    properties = CHECKPOINT if first is None else first.properties
    if demand.stopping or demand.commits_waiting >= COMMITS_WAITING_MAX or not has_room(properties, demand, settings):
        return None
    if first is not None and first.properties.kind.is_savepoint:
        return Start(first.properties, (first.request,), demand.queue[1:], first.retries)
    if first is not None:
        return Start(CHECKPOINT, tuple(r.request for r in demand.queue), (), max(r.retries for r in demand.queue))
    if demand.final and not demand.pending:
        return Start(CHECKPOINT, (), ())
    if not demand.due:
        return None
    since_ms = demand.last_completed_at_ms
    # A completion in the future: the clock was set back, and nobody knows how long the pause was.
    pause = since_ms <= at_ms < since_ms + settings.min_pause_ms
    return Pause(since_ms + settings.min_pause_ms) if pause else Start(CHECKPOINT, (), ())


def has_room(properties: CheckpointProperties, demand: Demand, settings: CheckpointSettings) -> bool:
    """Whether one more such checkpoint may be pending."""
    goes_ahead = properties.kind.is_savepoint and not settings.unaligned
    return (demand.savepoints if goes_ahead else demand.pending) < settings.max_concurrent


def _rank(request: CheckpointRequest) -> tuple[bool, bool, int]:
    properties = request.properties
    return not properties.forced, not properties.kind.is_savepoint, request.at_ms
