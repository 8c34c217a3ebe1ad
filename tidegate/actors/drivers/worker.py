"""`Worker`: runs the subtasks of one slot, in turns, by one loop on one thread.

A slot holds subtask i of every step that shares the slot. Rules:

- A turn is the work on one batch at most. Frames between subtasks of the worker are appended to one queue, without
  copying or encoding, and handled before the next turn, in the order in which they were sent. `Transport` describes how
  frames travel in general.
- An exception of a subtask fails this subtask alone. The failure is reported before anything is closed or logged,
  because that may fail too, or never return.
- A subtask that is stopped leaves its keyed state to the next attempt of the same subtask in this worker.
- A subtask closes its resources once its running I/O has returned. I/O that still waits for a thread is dropped.
- This module does not depend on Ray. A runtime creates the subtasks (`Subtask`) and handles their ends (`Wiring`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.log_lines import lines_are_about
from tidegate.actors.drivers.ports import TryAgain
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.drivers.threads import ThreadPool, leave_if_forked
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.ids import AttemptNumber, OperatorUid


class Transport(Protocol):
    """Carries frames and credit between two subtasks. One interface, three implementations.

    `Subtask.connect(peer)` returns the transport to a peer subtask, once for each channel and attempt. Whatever carries
    it, a frame arrives as `FrameArrived` at `Worker.deliver`, and a grant as `CreditGranted`.

    - In the same worker: `QueueTransport` (`worker.py`) appends the elements themselves to the queue of the worker.
    - In another worker on the same node: `PeerConnection` (`ray/peer_connections.py`) writes to a socket, and rows to
      shared memory. A socket keeps the order.
    - On another node, or without sockets: `PeerCalls` (`ray/peer_transports.py`) makes calls of Ray, which Ray repeats.
      Frames are numbered, and the receiver sorts them (`OrderedFrames`).

    Rules for all transports:

    - The transport of a channel is known before the subtask reports that it is ready, so before rows flow. It never
      changes during an attempt.
    - Elements of one channel are delivered once and in the order in which they were sent, or the attempt fails.
    - No send waits. The credit of the channel limits the bytes on their way.
    - The receiver drops everything that belongs to another attempt.
    - A finished subtask ends once its receivers have handled all frames that it has sent.
    """

    def send(self, frame: do.SendFrame) -> None:
        """Sends a frame to the task at the receiving end of its channel."""

    def grant(self, grant: do.GrantCredit) -> None:
        """Sends a credit grant to the task at the sending end of a channel."""


IO_THREADS = 4
"""Number of threads of a worker for I/O, without the threads for reads of sources and for `map_async` functions."""
Kept = Mapping[OperatorUid, KeyedBackend]
"""Keyed state backends, by operator, that a stopped subtask leaves to its next attempt."""


class IoPool(ThreadPool):
    """The threads for the I/O of subtasks that begin an attempt together. The threads end with the last of these
    subtasks.
    """

    def __init__(self, threads: int, name: str, died: Callable[[BaseException], object]) -> None:
        super().__init__(threads, name, died)
        self._users = 0

    def enter(self) -> None:
        """Counts a subtask that starts to use the threads of the pool."""
        self._users += 1

    def leave(self) -> None:
        """Counts one subtask less that uses the threads. The last one closes the pool."""
        self._users -= 1
        if not self._users:
            self.close()


def io_pool(graph: JobGraph, tasks: Iterable[TaskId], name: str, died: Callable[[BaseException], object]) -> IoPool:
    """Starts the I/O threads of these subtasks for one attempt. Raises RuntimeError if they cannot be started.

    Every source subtask gets a thread for its reads, because a read may block for any time. Every subtask that waits
    for `map_async` functions gets a thread, too. A read cannot be interrupted: the next attempt gets new threads, and
    the old threads end with their reads.
    """
    vertices = [graph.vertex(task.vertex) for task in tasks]
    sources = sum(vertex.source is not None for vertex in vertices)
    callers = sum(any(spec.calls is not None for spec in vertex.operators) for vertex in vertices)
    return IoPool(IO_THREADS + sources + callers, name, died)


class Wiring(Protocol):
    """The callbacks that a runtime provides to a worker."""

    def post(self, action: Callable[[], object]) -> None:
        """Runs an action on the worker's thread. May be called from any thread."""

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        """Runs an action on the worker's thread after a delay in ms."""

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        """Called when a subtask has failed. Reports the failure before anything else happens."""

    def finished(self, subtask: Subtask) -> None:
        """Called when a subtask has finished and no longer runs in the worker."""

    def acted(self, subtask: Subtask) -> None:
        """Called when a subtask has done some work and continues to run."""


class Subtask(ABC):
    """One attempt of a subtask, and its `TaskPort`. A runtime adds the connections to other workers."""

    virtual = False

    def __init__(self, worker: Worker, task: TaskId, attempt: AttemptNumber, siblings: Collection[TaskId]) -> None:
        """Creates the subtask. `siblings` are the subtasks of the same worker that begin this attempt together."""
        self.worker = worker
        self.task = task
        self.attempt = attempt
        self._siblings = siblings
        self.log_fields: Mapping[str, object] = {"task": str(task), "attempt": attempt}
        self._transports: dict[ChannelId, Transport] = {}
        self._host: TaskDriver | None = None
        self._pool: IoPool | None = None
        self._lock = threading.Lock()
        self._io_under_way = 0
        self._retired = False

    def begin(self, host: TaskDriver, pool: IoPool | None) -> None:
        """Sets the driver of the task machine, and the threads for its I/O. `pool` is None in a runtime without
        threads.
        """
        if pool is not None:
            pool.enter()
        self._host = host
        self._pool = pool

    @property
    def host(self) -> TaskDriver:
        """Returns the driver of the subtask's machine."""
        assert self._host is not None
        return self._host

    # --- what a runtime does ----------------------------------------------------------------------------------------

    @abstractmethod
    def report(self, event: CoordinatorEvent) -> None:
        """Sends an event to the coordinator."""

    @abstractmethod
    def connect_out(self, neighbour: TaskId) -> Transport:
        """Returns the transport to a subtask in another worker."""

    # --- what every subtask does ------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return now_ms()

    def monotonic_ms(self) -> int:
        return monotonic_ms()

    def connect(self, neighbour: TaskId) -> Transport:
        """Returns the transport to a peer subtask for this attempt: a queue within the worker, or a connection."""
        if self.is_sibling(neighbour):
            return QueueTransport(neighbour, self.worker.queue, self.worker.deliver, self.now_ms)
        return self.connect_out(neighbour)

    def is_sibling(self, task: TaskId) -> bool:
        """Returns whether another subtask has begun this attempt in the same worker."""
        return task in self._siblings

    def send_frame(self, frame: do.SendFrame) -> None:
        channel = frame.channel
        if channel not in self._transports:
            self._transports[channel] = self.connect(self.worker.graph.receiver(channel))
        self._transports[channel].send(frame)

    def grant_credit(self, grant: do.GrantCredit) -> None:
        channel = grant.channel
        if channel not in self._transports:
            self._transports[channel] = self.connect(self.worker.graph.sender(channel))
        self._transports[channel].grant(grant)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self.worker.wiring.call_later(delay_ms, partial(self.worker.guarded, self, action))

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action on the worker's thread, if the subtask still runs then. May be called from any thread."""
        self.worker.wiring.post(partial(self.worker.guarded, self, action))

    def set_timer(self, instruction: do.SetTaskTimer, delay_ms: int) -> None:
        # A timer may be far away: it must not keep the state of a subtask that is over until then.
        worker = self.worker
        weak = weakref.ref(self)

        def fire() -> None:
            if (subtask := weak()) is not None:
                event = ev.TimerDue(subtask.now_ms(), instruction.timer, instruction.due_at_ms)
                worker.guarded(subtask, partial(subtask.host.handle, event))

        self.worker.wiring.call_later(delay_ms, fire)

    def run_io(self, work: Callable[[], ev.TaskEvent | TryAgain | None]) -> None:
        assert self._pool is not None

        def run() -> ev.TaskEvent | TryAgain | None:
            with self._lock:
                if self._retired:
                    return None
                self._io_under_way += 1
            lines_are_about(self.log_fields)
            try:
                return work()
            finally:
                lines_are_about({})
                self._io_is_back()

        def finish(future: Future[ev.TaskEvent | TryAgain | None]) -> None:
            if (event := future.result()) is not None:
                self.host.handle(event)

        self._pool.submit(run, lambda future: self.later(partial(finish, future)))

    def retire(self) -> None:
        """Closes the resources of a subtask that has ended, once its running I/O has returned, and drops the results of
        that I/O.

        Releases its I/O threads, which end unless another subtask uses them.
        """
        assert self._pool is not None
        self.host.hurry()
        with self._lock:
            self._retired = True
            closes = not self._io_under_way
        try:
            if closes:
                self.host.close()
        finally:
            self._pool.leave()

    def _io_is_back(self) -> None:
        with self._lock:
            self._io_under_way -= 1
            closes = self._retired and not self._io_under_way
        if closes:
            self.host.close()


class QueueTransport:
    """The transport to a subtask in the same process: a queue, without copying or encoding."""

    def __init__(
        self,
        to: TaskId,
        queue: deque[Callable[[], object]],
        deliver: Callable[[TaskId, AttemptNumber, ev.TaskEvent], object],
        now_ms: Callable[[], int],
    ) -> None:
        """Creates the transport to subtask `to`. `deliver` passes an event to that subtask when the queue is
        processed.
        """
        self._to = to
        self._queue = queue
        self._deliver = deliver
        self._now_ms = now_ms

    def send(self, frame: do.SendFrame) -> None:
        """Appends a frame to the queue of the receiving subtask."""
        event = ev.FrameArrived(self._now_ms(), frame.attempt, frame.channel, frame.first_sequence, frame.elements)
        self._queue.append(partial(self._deliver, self._to, frame.attempt, event))

    def grant(self, grant: do.GrantCredit) -> None:
        """Appends a credit grant to the queue of the sending subtask."""
        event = ev.CreditGranted(self._now_ms(), grant.attempt, grant.channel, grant.total_bytes, grant.window_bytes)
        self._queue.append(partial(self._deliver, self._to, grant.attempt, event))


class Worker:
    """The subtasks of one slot, and the loop that runs them. Every method runs on the worker's thread."""

    def __init__(self, graph: JobGraph, wiring: Wiring, queue: deque[Callable[[], object]] | None = None) -> None:
        """Creates the worker. `queue` is a queue that other workers share and another loop processes, or None for
        a new queue.
        """
        self.graph = graph
        self.wiring = wiring
        self.queue: deque[Callable[[], object]] = deque() if queue is None else queue
        """Queue of the frames and credit grants between subtasks of this worker."""
        self.subtasks: dict[TaskId, Subtask] = {}
        """The running subtasks, by task."""
        self._kept: dict[TaskId, Kept] = {}
        self._order: list[Subtask] = []
        self._next = 0
        """Index in `_order` of the subtask that gets the next turn, if it has work."""
        self._pid = os.getpid()
        self.doing: TaskId | None = None
        """The subtask that is working now, or that worked last. May be read from any thread."""

    def kept(self, task: TaskId) -> Kept:
        """Removes and returns the state backends that the last attempt of a subtask left in this process, by operator.
        May be empty.
        """
        return self._kept.pop(task, {})

    def forget(self) -> None:
        """Drops the state backends that subtasks left in this process, because no other attempt follows."""
        self._kept.clear()

    def add(self, subtask: Subtask) -> None:
        """Adds a subtask to the worker, which runs it from now on."""
        assert subtask.task not in self.subtasks
        self.subtasks[subtask.task] = subtask
        self._order.append(subtask)

    def stop(self, task: TaskId) -> Subtask | None:
        """Stops a running subtask, and keeps its keyed state for the next attempt.

        Returns the subtask, so that `retire` can release its resources, or None if it does not run.
        """
        subtask = self._remove(task)
        if subtask is not None:
            self._kept[task] = subtask.host.hand_over()
        return subtask

    def deliver(self, task: TaskId, attempt: AttemptNumber, event: ev.TaskEvent) -> bool:
        """Passes an event to a subtask. Returns False if the subtask does not run in this attempt."""
        subtask = self.subtasks.get(task)
        if subtask is None or subtask.attempt != attempt:
            return False
        self.guarded(subtask, partial(subtask.host.handle, event))
        return True

    def turn(self) -> bool:
        """Delivers the queued frames, then gives one turn to a subtask. Returns False if there was nothing to do."""
        busy = self.take_in()
        return self.next_turn() or busy

    def take_in(self) -> bool:
        """Delivers the queued frames between subtasks, in order. Returns False if the queue was empty."""
        busy = bool(self.queue)
        while self.queue:
            self.queue.popleft()()
        return busy

    def next_turn(self) -> bool:
        """Gives one turn to the next subtask that has work. Returns False if no subtask has work."""
        order = self._order
        count = len(self._order)
        for index in range(count):
            at = (self._next + index) % count
            subtask = order[at]
            if subtask.host.machine.runnable and self.guarded(subtask, subtask.host.turn):
                self._next = at + 1
                return True
        return False

    def guarded(self, subtask: Subtask, action: Callable[[], object]) -> bool:
        """Runs an action of a subtask that still runs. An exception of the action fails the subtask.

        Returns whether the action has made progress, or has failed.
        """
        if self.subtasks.get(subtask.task) is not subtask:
            return False
        self.doing = subtask.task
        lines_are_about(subtask.log_fields)
        try:
            progressed = bool(action())
        except BaseException as error:  # noqa: BLE001 (code of users: whatever it raises has failed the subtask)
            leave_if_forked(self._pid)
            self.fail(subtask, error)
            return True
        finally:
            lines_are_about({})
        if subtask.host.finished:
            self._remove(subtask.task)
            self.wiring.finished(subtask)
        else:
            self.wiring.acted(subtask)
        return progressed

    def fail(self, subtask: Subtask, error: BaseException) -> None:
        """Removes a subtask from the running ones, and reports its failure."""
        self._remove(subtask.task)
        self.wiring.failed(subtask, error)

    def _remove(self, task: TaskId) -> Subtask | None:
        subtask = self.subtasks.pop(task, None)
        if subtask is not None:
            # A new list: this may happen while `next_turn` looks at the old one.
            self._order = [each for each in self._order if each is not subtask]
        return subtask


MAPPED_FROM_BYTES = 4 << 20
KEPT_BYTES = 16 << 20
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Numbers of the parameters of `mallopt` in glibc."""
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes the allocator of the C library keep freed memory, in processes that run tasks.

    Returns False if the C library has no such settings, or the environment sets them.

    Each batch allocates and frees some arrays of a megabyte. By default glibc returns the end of its heap to the system
    as soon as a few of them are free, and the next batch waits for the same pages again, which are cleared first: a
    hundred to two thousand page faults a batch. Rules:

    - Arrays of up to `MAPPED_FROM_BYTES` are in heaps, one or more for each thread. Up to `KEPT_BYTES` at the end of
      each heap stay free for the next arrays.
    - Larger arrays, such as state, are mapped separately, and are returned to the system at once.
    - Thresholds that are set in the environment (`MALLOC_*`, `GLIBC_TUNABLES`) stay as they are.
    """
    if any(name in environment for name in _OWN_SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # To set one of them keeps glibc from moving either.
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
