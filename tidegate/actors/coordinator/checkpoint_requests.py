"""Decides which checkpoint or savepoint is taken next, when, and with which properties. The functions are pure.

`CheckpointCoordinator` calls `enqueue` for each request and `decide` after each event. The model are Flink's
`CheckpointProperties` and `CheckpointRequestDecider`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.job_spec import CheckpointSettings, Retention
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.stream_elements import Alignment, BarrierOptions
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.codec import wire


@wire
@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """The kind of a checkpoint and, for a savepoint, its target folder and format (Flink's `CheckpointProperties`).

    - A savepoint belongs to the user. It is never unaligned, no newer checkpoint subsumes it, its failure is not
      counted, and its files are copied to a separate folder of the user. Only a stop waits for the copy.
    - The savepoint of a `stop` is forced: it starts at once, whatever else is pending.

    `target` is the URL below which the savepoint gets a folder. It is None for a checkpoint, which also ignores the
    format.
    """

    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    target: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL

    def __post_init__(self) -> None:
        assert self.kind.is_savepoint == (self.target is not None), "savepoints, and only they, have a target"

    @property
    def forced(self) -> bool:
        """Returns whether the checkpoint starts at once, whatever else is pending."""
        return self.kind.stops

    @property
    def copied_afterwards(self) -> bool:
        """Returns whether the copy to the user's folder follows the completion of the checkpoint.

        True for a plain savepoint. The savepoint of a stop is copied before its checkpoint completes.
        """
        return self.kind is SnapshotKind.SAVEPOINT

    @property
    def canonical(self) -> bool:
        """Returns whether all state is written as sorted rows, which is the canonical savepoint format.

        Such a savepoint is not incremental, and no checkpoint is based on it.
        """
        return self.kind.is_savepoint and self.savepoint_format is SavepointFormat.CANONICAL

    @property
    def subsumable(self) -> bool:
        """Returns whether the checkpoint can be deleted once a newer one is complete."""
        return not self.kind.is_savepoint


CHECKPOINT = CheckpointProperties()


def barrier_options(settings: CheckpointSettings, properties: CheckpointProperties) -> BarrierOptions:
    """Returns the options of the barriers of a checkpoint: exactly once or at least once, aligned or unaligned."""
    kind = properties.kind
    savepoint_format = properties.savepoint_format
    if not settings.exactly_once:
        return BarrierOptions(Alignment.AT_LEAST_ONCE, None, kind, savepoint_format)
    if kind.is_savepoint or not settings.unaligned:
        return BarrierOptions(Alignment.ALIGNED, None, kind, savepoint_format)
    if not settings.aligned_timeout_ms:
        return BarrierOptions(Alignment.UNALIGNED, None, kind)
    return BarrierOptions(Alignment.ALIGNED, settings.aligned_timeout_ms, kind)


def keeps_checkpoints(retention: Retention, end: JobStatus) -> bool:
    """Returns whether a job that ends with the status `end` keeps its completed checkpoints instead of deleting them.

    Finished and suspended jobs always keep them. For failed and cancelled jobs, `retention` decides.
    """
    if end is JobStatus.FAILED:
        return retention is not Retention.NEVER_RETAIN
    if end is JobStatus.CANCELLED:
        return retention is Retention.RETAIN_ON_CANCELLATION
    return True


REQUESTS_MAX = 1_000
RETRIES_MAX = 10
"""The number of times that a request whose checkpoint failed may go back into the queue."""
COMMITS_WAITING_MAX = 4
"""The next checkpoint waits while this number of completed checkpoints, or more, has outstanding sink commits."""


@wire
@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A queued request of a user for a checkpoint or savepoint. `request` is the id under which the user's call is
    answered.
    """

    request: str
    at_ms: int
    properties: CheckpointProperties = CHECKPOINT
    retries: int = 0
    """How many times the request has gone back into the queue."""


@dataclass(frozen=True, slots=True)
class Start:
    """Decision to start a checkpoint now.

    `requests` are the ids of the user requests that this checkpoint answers. `queue` has the requests that stay in the
    queue.
    """

    properties: CheckpointProperties
    requests: tuple[str, ...]
    queue: tuple[CheckpointRequest, ...]
    retries: int = 0
    """The number of times that a request of this checkpoint went back into the queue (the maximum over its requests).
    """


@dataclass(frozen=True, slots=True)
class Pause:
    """Decision that the periodic checkpoint that is due waits until `until_ms`."""

    until_ms: int


@dataclass(frozen=True, slots=True)
class Demand:
    """The facts on which `decide` depends.

    `due`: a periodic checkpoint is due. `final`: all operators have finished, and no checkpoint covers that yet.
    `pending`: the number of pending checkpoints, with savepoints. `savepoints`: the number of pending savepoints.
    `commits_waiting`: completed checkpoints with outstanding sink commits. `hooks`: master hooks are being called.
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
    """Adds a request to the queue, which has at most `REQUESTS_MAX` entries.

    Returns the new queue, and the request that is refused because the queue is full, or None.
    """
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
    """Decides which of the waiting requests becomes the next checkpoint, and when (Flink's `CheckpointRequestDecider`).

    Returns the checkpoint to start now, the time until which to wait, or None if nothing may start.

    Rules:

    - At most `REQUESTS_MAX` requests wait: forced savepoints first, then savepoints, then checkpoints, each in the
      order in which they came. A full queue refuses the newest request that is not forced.
    - A periodic checkpoint is not in the queue. It is either due or not.
    - Nothing starts while master hooks are called for another checkpoint. Tasks must be triggered in the order of
      checkpoint ids: a checkpoint that reaches a task after a newer one could never complete.
    - Otherwise a forced savepoint starts at once. All other requests wait while sink commits lag behind, and while the
      job is being stopped. A checkpoint also waits while `max_concurrent` checkpoints and savepoints are pending.
    - A savepoint does not wait for checkpoints, because a slow checkpoint may be the reason why the user requests it.
      It waits only for other savepoints, `max_concurrent` at a time. With unaligned checkpoints it waits for these as
      well: unaligned checkpoints are taken one at a time, and a savepoint is aligned (as in Flink).
    - The minimum pause holds for periodic checkpoints alone.
    - Each savepoint is a checkpoint of its own. Waiting requests for a checkpoint are all answered by one checkpoint.
    - If a checkpoint fails because a task was just leaving, its requests wait again, at most `RETRIES_MAX` times. The
      next plan counts that task as finished.
    """
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
    # A completion in the future: the clock was set back, and the length of the pause is unknown.
    pause = since_ms <= at_ms < since_ms + settings.min_pause_ms
    return Pause(since_ms + settings.min_pause_ms) if pause else Start(CHECKPOINT, (), ())


def has_room(properties: CheckpointProperties, demand: Demand, settings: CheckpointSettings) -> bool:
    """Returns whether the limit `max_concurrent` of pending checkpoints allows one more checkpoint.

    Checkpoints do not count against a savepoint, unless checkpoints are unaligned.
    """
    goes_ahead = properties.kind.is_savepoint and not settings.unaligned
    return (demand.savepoints if goes_ahead else demand.pending) < settings.max_concurrent


def _rank(request: CheckpointRequest) -> tuple[bool, bool, int]:
    properties = request.properties
    return not properties.forced, not properties.kind.is_savepoint, request.at_ms
