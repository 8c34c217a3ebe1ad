"""Two workers' processes on one node, without Ray: how they reach each other, and what the end of a connection does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray_fakes import CHECKPOINT, FIRST, ROWS, SINK, SOURCE, TIMEOUT_S, Process, task_processes
from waiting import until, watched

from tidegate.actors.coordinator import events as co
from tidegate.actors.ray import framed_connections as connections
from tidegate.actors.ray import worker_actor as ray_worker
from tidegate.actors.ray.peer_connections import PeerConnection, Way
from tidegate.actors.ray.task_deployment import Peer
from tidegate.actors.task import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, Generation

SECOND, THIRD = AttemptNumber(1), AttemptNumber(2)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TaskId], Process]]:
    """Makes processes whose tasks wait for an order."""
    monkeypatch.setattr(ray_worker, "LOST_CALL_GRACE_MS", 0)
    with task_processes(monkeypatch) as maker:

        def made(task: TaskId) -> Process:
            process = maker(task)
            process.drop(FIRST)
            return process

        yield made


def peer_of(process: Process, node_id: str = "node", address: bytes | None = None) -> Peer:
    """How another process reaches this one."""
    info = process.actor.info()
    return Peer(process.peer, info.actor_id, node_id, info.address if address is None else address)


def order(process: Process, peer: Peer, attempt: AttemptNumber = SECOND) -> None:
    """Begin an attempt of its task, whose neighbour this is."""
    [neighbour] = process.order.peers
    process.order = replace(process.order, attempt=attempt, peers={neighbour: peer}, generation=Generation(attempt))
    actor: Any = process.actor
    actor.deploy(process.order)


def await_ready(process: Process, attempt: AttemptNumber = SECOND) -> None:
    """Wait until the task is ready."""
    while True:
        report = process.await_report(co.TaskReady)
        assert isinstance(report, co.TaskReady)
        if report.attempt == attempt:
            return


def start(process: Process, attempt: AttemptNumber = SECOND) -> None:
    """Wait until the task is ready, and let it begin."""
    await_ready(process, attempt)
    process.tell(ev.TasksStarted(0), attempt)


def link(process: Process) -> PeerConnection:
    """The link of the task that runs to its neighbour."""
    [found] = process.running.neighbours.links.values()
    assert isinstance(found, PeerConnection)
    return found


def complete(process: Process, attempt: AttemptNumber = SECOND) -> None:
    """Take a checkpoint."""
    process.tell(ev.CheckpointTriggered(0, attempt, CHECKPOINT, 0), attempt)
    process.await_report(co.CheckpointAcknowledged)
    process.tell(ev.CheckpointCompleted(0, attempt, CHECKPOINT), attempt)


@pytest.fixture(params=["the source first", "the sink first"])
def pair(request: pytest.FixtureRequest, make: Callable[[TaskId], Process]) -> tuple[Process, Process]:
    """Source and sink that are joined by a socket, and run."""
    source, sink = make(SOURCE), make(SINK)
    orders = [(source, sink), (sink, source)]
    for process, other in orders if request.param == "the source first" else reversed(orders):
        order(process, peer_of(other))
    for process in (source, sink):
        start(process)
    return source, sink


def test_all_goes_over_the_socket(pair: tuple[Process, Process]) -> None:
    """Rows in shared memory, barriers, credit and the end: no call of Ray is made, and both tasks finish."""
    source, sink = pair
    assert (link(source).way, link(sink).way) == (Way.SOCKET, Way.SOCKET)
    source.await_report(co.TaskReachedEndOfData)
    until("the rows", lambda: sink.running.host.rows_in == ROWS.num_rows)
    writer = link(source).packer.writer
    assert writer is not None
    assert writer.num_frames > 0, "they were written to shared memory"
    complete(source)
    sink.await_report(co.CheckpointAcknowledged)
    sink.tell(ev.CheckpointCompleted(0, SECOND, CHECKPOINT), SECOND)
    assert [process.outcome(SECOND).kind for process in pair] == ["finished", "finished"]
    for process in pair:
        assert process.peer.frame.calls.empty()
        assert process.peer.credit.calls.empty()


def test_a_subtask_is_ready_when_it_is_known_how_its_neighbour_is_reached(make: Callable[[TaskId], Process]) -> None:
    """Not before: so no row goes another way than those behind it."""
    source, sink = make(SOURCE), make(SINK)
    first, second = sorted((source, sink), key=lambda process: process.actor.info().actor_id, reverse=True)
    order(first, peer_of(second))
    until("the end of the restore", lambda: getattr(first.running, "_ready", None) is not None)
    ready = [report for report in first.coordinator.report.so_far() if isinstance(report, co.TaskReady)]
    assert SECOND not in [report.attempt for report in ready]
    order(second, peer_of(first))
    for process in (first, second):
        await_ready(process)


@pytest.mark.parametrize(
    ("node_id", "address"), [("elsewhere", None), ("node", b"")], ids=["on another node", "without sockets"]
)
def test_a_neighbour_that_has_no_socket_here_is_called(
    make: Callable[[TaskId], Process], caplog: pytest.LogCaptureFixture, node_id: str, address: bytes | None
) -> None:
    """At once, and that is no news."""
    source, sink = make(SOURCE), make(SINK)
    order(source, peer_of(sink, node_id, address))
    start(source)
    assert link(source).way is Way.CALLS
    _, (head, _) = sink.peer.frame.received()
    assert head == (SECOND, 0, 0, 0, 0)
    assert not [record for record in caplog.records if "calls of Ray" in record.getMessage()]


def test_a_process_that_cannot_connect_reports_that_and_both_use_calls(
    make: Callable[[TaskId], Process], caplog: pytest.LogCaptureFixture
) -> None:
    """One is in a container with a network of its own, for instance. That is noted."""
    source, sink = make(SOURCE), make(SINK)
    connects, waits = sorted((source, sink), key=lambda process: process.actor.info().actor_id)
    for process, other in ((waits, connects), (connects, waits)):
        order(process, peer_of(other, address=b"\0nobody"))
    await_ready(connects)
    assert link(connects).way is Way.CALLS
    _, arguments = waits.peer.no_link.received()
    assert "refused" in arguments[1]
    waits.settle()
    assert link(waits).way is Way.OPENING
    actor: Any = waits.actor
    actor.no_link(*arguments)
    await_ready(waits)
    assert link(waits).way is Way.CALLS
    assert len({record.getMessage() for record in caplog.records if "calls of Ray" in record.getMessage()}) == 1


def test_an_end_that_comes_before_the_link_is_open_leaves_it_with_calls(
    make: Callable[[TaskId], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has too many connections, for instance: it lets nobody in."""
    source, sink = make(SOURCE), make(SINK)
    connects, waits = sorted((source, sink), key=lambda process: process.actor.info().actor_id)
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 1)
    waits.actor.links._connections._open[-1] = None  # type: ignore[union-attr,assignment]
    order(waits, peer_of(connects))
    order(connects, peer_of(waits))
    await_ready(connects)
    actor: Any = waits.actor
    actor.no_link(*waits.peer.no_link.received()[1])
    await_ready(waits)
    assert (link(connects).way, link(waits).way) == (Way.CALLS, Way.CALLS)


def test_the_next_attempt_uses_the_same_connection(pair: tuple[Process, Process]) -> None:
    """Nothing of the attempt before is taken by the new one."""
    source, sink = pair
    before = link(source)
    source.await_report(co.TaskReachedEndOfData)
    for process, other in ((sink, source), (source, sink)):
        order(process, peer_of(other), THIRD)
    for process in pair:
        start(process, THIRD)
    source.await_report(co.TaskReachedEndOfData)
    until("the rows", lambda: sink.running.host.rows_in == ROWS.num_rows)
    assert link(source) is before
    complete(source, THIRD)
    sink.await_report(co.CheckpointAcknowledged)
    sink.tell(ev.CheckpointCompleted(0, THIRD, CHECKPOINT), THIRD)
    assert [process.outcome(THIRD).kind for process in pair] == ["finished", "finished"]


def test_a_connection_that_breaks_while_both_live_fails_both_subtasks(pair: tuple[Process, Process]) -> None:
    """It is not known what was on its way. The next attempt uses calls: these do not break so."""
    source, sink = pair
    connection = link(source).connection
    assert connection is not None
    connection.cut()
    for process in pair:
        outcome = process.outcome(SECOND)
        assert (outcome.kind, "broke" in (outcome.reason or "")) == ("failed", True)
    for process, other in ((sink, source), (source, sink)):
        order(process, peer_of(other), THIRD)
        start(process, THIRD)
        assert link(process).way is Way.CALLS
    sink.peer.frame.received()


def test_a_connection_that_breaks_fails_no_later_attempt(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has died, and the attempt that used it is gone when the time is up."""
    later: list[Callable[[], object]] = []
    source, sink = pair
    watched.remove(sink.coordinator.report.failure)
    monkeypatch.setattr(source.actor.mailbox, "call_later", lambda delay_ms, action, *_: later.append(action))
    connection = link(source).connection
    assert connection is not None
    connection.cut()
    until("the break", lambda: any("guarded" in repr(action) for action in later))
    order(source, peer_of(sink), THIRD)
    await_ready(source, THIRD)
    for action in later:
        source.actor.mailbox.post(action)
    assert not source.over
    assert source.running is not None


def test_a_subtask_that_has_finished_is_over_when_its_end_was_taken_in(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its process is needed, as if it had not finished. If the connection breaks, it has failed."""
    source, sink = pair
    reads, goes_on = threading.Event(), threading.Event()
    take = sink.actor.frame_came

    def hold(*frame: Any) -> None:
        reads.set()
        assert goes_on.wait(TIMEOUT_S)
        take(*frame)

    source.await_report(co.TaskReachedEndOfData)
    monkeypatch.setattr(sink.actor, "frame_came", hold)
    complete(source)
    assert reads.wait(TIMEOUT_S)
    until("the end of the subtask", lambda: source.running is None)
    assert not source.over
    goes_on.set()
    assert source.outcome(SECOND).kind == "finished"


def test_a_subtask_whose_end_was_not_taken_in_has_failed(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it had finished: nobody may skip what was lost."""
    source, sink = pair
    source.await_report(co.TaskReachedEndOfData)
    until("the rows", lambda: sink.running.host.rows_in == ROWS.num_rows)
    connection = link(sink).connection
    assert connection is not None
    source.tell(ev.CheckpointTriggered(0, SECOND, CHECKPOINT, 0), SECOND)
    for process in pair:
        process.await_report(co.CheckpointAcknowledged)
    monkeypatch.setattr(sink.actor, "frame_came", lambda *frame: connection.cut())
    source.tell(ev.CheckpointCompleted(0, SECOND, CHECKPOINT), SECOND)
    outcome = source.outcome(SECOND)
    assert (outcome.kind, "the last messages did not arrive" in (outcome.reason or "")) == ("failed", True)


def test_a_sender_that_has_sent_everything_may_leave(pair: tuple[Process, Process]) -> None:
    """The end of its connection fails nobody who has all that it had to send."""
    source, sink = pair
    source.await_report(co.TaskReachedEndOfData)
    complete(source)
    assert source.outcome(SECOND).kind == "finished"
    sink.await_report(co.CheckpointAcknowledged)
    broken = link(sink)
    assert broken.connection is not None
    broken.connection.cut()
    until("the break", lambda: broken.way is Way.CALLS)
    sink.tell(ev.CheckpointCompleted(0, SECOND, CHECKPOINT), SECOND)
    assert sink.outcome(SECOND).kind == "finished"
