"""The request decider: order, limits, pause, and what a full queue refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import Coordinator, only, spec
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_requests import (
    CHECKPOINT,
    COMMITS_WAITING_MAX,
    REQUESTS_MAX,
    CheckpointProperties,
    CheckpointRequest,
    Demand,
    Pause,
    Start,
    decide,
    enqueue,
)
from tidegate.actors.coordinator.job_spec import CheckpointSettings
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.storage.checkpoints.metadata import SnapshotKind

SETTINGS = CheckpointSettings(interval_ms=1_000, min_pause_ms=500, max_concurrent=2)
SAVEPOINT = CheckpointProperties(SnapshotKind.SAVEPOINT, "folder")
STOP = CheckpointProperties(SnapshotKind.SUSPEND, "folder")
IDLE = Demand((), due=False, final=False, pending=0, commits_waiting=0, stopping=False, last_completed_at_ms=0)


def wanted(name: str, properties: CheckpointProperties = CHECKPOINT, at_ms: int = 0) -> CheckpointRequest:
    """A request of this name."""
    return CheckpointRequest(name, at_ms, properties)


@given(st.lists(st.tuples(st.sampled_from([CHECKPOINT, SAVEPOINT, STOP]), st.integers(0, 5)), max_size=30))
def test_the_queue_is_in_order_whatever_comes(drawn: list[tuple[CheckpointProperties, int]]) -> None:
    """Forced ones first, then savepoints, then checkpoints; then by time; equal ones as they came."""
    requests = [wanted(str(n), properties, at_ms) for n, (properties, at_ms) in enumerate(drawn)]
    queue: tuple[CheckpointRequest, ...] = ()
    for request in requests:
        queue, refused = enqueue(queue, request)
        assert refused is None

    ranks = {STOP: 0, SAVEPOINT: 1, CHECKPOINT: 2}
    assert sorted(requests, key=lambda r: (ranks[r.properties], r.at_ms)) == list(queue)


@pytest.mark.parametrize("properties", [CHECKPOINT, SAVEPOINT, STOP])
def test_nothing_starts_while_the_hooks_of_another_one_are_called(properties: CheckpointProperties) -> None:
    """Tasks would hear of the newer one first, and take the older one for stale."""
    demand = replace(IDLE, queue=(wanted("mine", properties),), due=True, pending=1, hooks=True)

    assert decide(demand, SETTINGS, 0) is None
    assert isinstance(decide(replace(demand, hooks=False), SETTINGS, 0), Start)


@pytest.mark.parametrize("properties", [CHECKPOINT, SAVEPOINT])
def test_a_full_queue_refuses_the_newest(properties: CheckpointProperties) -> None:
    """What waits already keeps its place."""
    full = tuple(wanted(str(n)) for n in range(REQUESTS_MAX))
    request = wanted("one more", properties, at_ms=9)

    assert enqueue(full, request) == (full, request)


def test_a_forced_request_finds_room_in_a_full_queue() -> None:
    """The newest one that is not forced gives way."""
    full = tuple(wanted(str(n), at_ms=n) for n in range(REQUESTS_MAX))
    request = wanted("stop", STOP, at_ms=10_000)

    queue, refused = enqueue(full, request)

    assert refused == full[-1]
    assert queue == (request, *full[:-1])


CASES = {
    "nothing is wanted": (IDLE, None),
    "a periodic one is due": (replace(IDLE, due=True, last_completed_at_ms=-500), Start(CHECKPOINT, (), ())),
    "a periodic one waits for the pause": (replace(IDLE, due=True), Pause(500)),
    "a request does not wait for the pause": (
        replace(IDLE, due=True, queue=(wanted("a"),)),
        Start(CHECKPOINT, ("a",), ()),
    ),
    "requests that wait share a checkpoint": (
        replace(IDLE, queue=(wanted("a"), wanted("b"))),
        Start(CHECKPOINT, ("a", "b"), ()),
    ),
    "a savepoint is one of its own": (
        replace(IDLE, queue=(wanted("s", SAVEPOINT), wanted("t", SAVEPOINT), wanted("a"))),
        Start(SAVEPOINT, ("s",), (wanted("t", SAVEPOINT), wanted("a"))),
    ),
    "a slot is free": (replace(IDLE, queue=(wanted("a"),), pending=1), Start(CHECKPOINT, ("a",), ())),
    "no slot is free": (replace(IDLE, queue=(wanted("a"),), pending=2), None),
    "a savepoint goes ahead of checkpoints that are pending": (
        replace(IDLE, queue=(wanted("s", SAVEPOINT), wanted("a")), due=True, pending=2),
        Start(SAVEPOINT, ("s",), (wanted("a"),)),
    ),
    "savepoints wait for one another": (replace(IDLE, queue=(wanted("s", SAVEPOINT),), pending=2, savepoints=2), None),
    "a checkpoint waits for savepoints too": (replace(IDLE, queue=(wanted("a"),), pending=2, savepoints=2), None),
    "a savepoint waits while sinks lag behind": (
        replace(IDLE, queue=(wanted("s", SAVEPOINT),), commits_waiting=COMMITS_WAITING_MAX),
        None,
    ),
    "a savepoint does not go ahead of a stop": (
        replace(IDLE, queue=(wanted("s", SAVEPOINT),), pending=1, stopping=True),
        None,
    ),
    "sinks lag behind": (replace(IDLE, queue=(wanted("a"),), commits_waiting=COMMITS_WAITING_MAX), None),
    "a stop needs no slot": (
        replace(IDLE, queue=(wanted("x", STOP),), pending=2, commits_waiting=COMMITS_WAITING_MAX),
        Start(STOP, ("x",), ()),
    ),
    "nothing starts beside a stop": (replace(IDLE, queue=(wanted("a"),), due=True, pending=1, stopping=True), None),
    "the end of the data does not wait for the pause": (replace(IDLE, final=True), Start(CHECKPOINT, (), ())),
    "the end of the data waits for what is pending": (replace(IDLE, final=True, pending=1), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_started(case: str) -> None:
    """The request decider, case by case, at time 0."""
    demand, expected = CASES[case]

    assert expected == decide(demand, SETTINGS, 0)


def test_savepoints_go_ahead_of_nothing_where_checkpoints_are_unaligned() -> None:
    """An unaligned checkpoint is taken alone, and a savepoint is aligned."""
    demand = replace(IDLE, queue=(wanted("s", SAVEPOINT),), pending=1)
    settings = replace(SETTINGS, max_concurrent=1, unaligned=True)

    assert decide(demand, settings, 0) is None
    assert decide(replace(demand, pending=0), settings, 0) == Start(SAVEPOINT, ("s",), ())


def test_a_savepoint_starts_beside_a_pending_checkpoint_and_within_the_pause() -> None:
    """Through the machine: of two savepoints the second waits for the first, and checkpoints wait for both."""
    coordinator = Coordinator(spec(min_pause_ms=500)).run()
    coordinator.ask()
    coordinator.request("checkpoint")

    (first,) = only(coordinator.request("one", SnapshotKind.SAVEPOINT), do.TriggerCheckpoint)
    assert first.options.kind is SnapshotKind.SAVEPOINT
    assert only(coordinator.request("two", SnapshotKind.SAVEPOINT), do.TriggerCheckpoint) == []
    coordinator.collect(1)
    assert only(coordinator.written(1), do.TriggerCheckpoint) == []
    coordinator.acknowledge_all(2)
    coordinator.exported(2)
    (second,) = only(coordinator.written(2), do.TriggerCheckpoint)
    assert second.options.kind is SnapshotKind.SAVEPOINT


def test_savepoints_overtake_checkpoints_that_wait() -> None:
    """Through the machine: when the slot is free again, the savepoint goes first."""
    coordinator = Coordinator(spec(unaligned=True)).run()
    coordinator.ask()
    coordinator.request("checkpoint")
    coordinator.request("savepoint", SnapshotKind.SAVEPOINT)
    coordinator.collect(1)

    (trigger,) = only(coordinator.written(1), do.TriggerCheckpoint)

    assert trigger.options.kind is SnapshotKind.SAVEPOINT


def test_a_periodic_checkpoint_never_queues_twice() -> None:
    """However often it comes due while others are pending, one follows."""
    coordinator = Coordinator().run()
    coordinator.fire("periodic:0", at_ms=1_000)
    for n in range(2, 6):
        coordinator.fire("periodic:0", at_ms=1_000 * n)
    coordinator.collect(1)
    assert len(only(coordinator.written(1), do.TriggerCheckpoint)) == 1
    coordinator.collect(2)

    assert only(coordinator.written(2), do.TriggerCheckpoint) == []


def test_a_request_that_was_refused_says_why() -> None:
    """The reason is of the closed list, and the text is for people."""
    coordinator = Coordinator(spec())
    coordinator.submit()

    (answer,) = only(coordinator.request(), do.CompleteRequest)

    assert answer.reason is CheckpointFailureReason.NOT_ALL_REQUIRED_TASKS_RUNNING
    assert answer.error == "not all required tasks are running: the job is deploying"
