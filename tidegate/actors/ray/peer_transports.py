"""The transports of one subtask to its neighbours in other workers: sockets on the same node, else calls of Ray.

Rules:

- A subtask is ready once the connections to all these processes are settled (`peer_connections.py`). So the transport
  of each channel is known before rows flow, and does not change.
- A finished subtask is over when all processes to which it has sent frames over sockets have received them.
- A broken connection has lost something for a subtask, unless all of its input from there has arrived and it had
  nothing to send.
- Ray repeats frames and grants that did not arrive, behind those that were sent meanwhile, and whether or not they had
  arrived. They have numbers. A frame is handed on once all before it have been, and an early one waits. A frame that
  comes twice is handed on twice: the machine drops elements that it has. Waiting frames are bounded by the credit of
  the channel and by `EARLY_MAX`, and wait for `GAP_MS_MAX`. Then they are handed on, and the machine fails for the gap.
- The sender does not wait for the answer to a frame of batches: the next frame shows that one is missing. A frame that
  may be the last one for some time (a barrier, the end, or the last of the credit) is watched.
- A sender that has sent everything needs no credit, and may have left before it came.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from tidegate.actors.drivers.worker import Transport
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.ray.actor_calls import Deliveries
from tidegate.actors.ray.peer_connections import PeerConnection, PeerConnections, Way, make_head, pickled_elements
from tidegate.actors.ray.shared_memory import is_arrows_own
from tidegate.actors.ray.task_deployment import Handle, TaskDeployment
from tidegate.actors.task import instructions as do
from tidegate.actors.task.events import FrameArrived
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import EndOfPartition


class PeerTransports:
    """Of one subtask of one attempt. All on the mailbox."""

    def __init__(
        self,
        order: TaskDeployment,
        graph: JobGraph,
        descriptor: TaskDescriptor,
        links: PeerConnections,
        deliveries: Deliveries,
    ) -> None:
        self._peers, self._deliveries = order.peers, deliveries
        # Only channels that leave the worker; `Worker` carries the others.
        outputs = (channel for edge in descriptor.outputs for channel in edge.channels)
        self._receivers = {c: task for c in outputs if (task := graph.receiver(c)) in order.peers}
        self._senders = {c: task for c in descriptor.inputs if (task := graph.sender(c)) in order.peers}
        tasks = {*self._receivers.values(), *self._senders.values()}
        self._links = {task: links.to(order.peers[task]) for task in sorted(tasks)}
        self._sent_over: set[PeerConnection] = set()
        """Sockets over which the subtask sends frames."""
        self._over: set[ChannelId] = set()
        """Input channels whose last element has arrived: their senders may be gone."""

    @property
    def settled(self) -> bool:
        """Whether it is known how each neighbour is reached."""
        return all(link.way is not Way.OPENING for link in self._links.values())

    def connect(self, neighbour: TaskId) -> Transport:
        """Return the transport to a neighbour for this attempt, once everything is settled."""
        link = self._links[neighbour]
        assert link.way is not Way.OPENING
        if link.way is Way.SOCKET:
            if neighbour in self._receivers.values():
                self._sent_over.add(link)
            return link
        return PeerCalls(self._peers[neighbour].handle, self._deliveries, self._over.__contains__)

    def arrived(self, frame: FrameArrived) -> None:
        """Take note of a frame that is handed on."""
        if frame.elements and isinstance(frame.elements[-1], EndOfPartition):
            self._over.add(frame.channel)

    def needs(self, link: PeerConnection) -> bool:
        """Whether something may be lost for this subtask if this link breaks."""
        there = {task for task, one in self._links.items() if one is link}
        return any(task in there for task in self._receivers.values()) or any(
            task in there and channel not in self._over for channel, task in self._senders.items()
        )

    def finish(self) -> None:
        """The subtask has finished: it is over when its receivers have taken in what went over sockets."""
        for link in self._sent_over:
            self._deliveries.watch_until_there(link.sync())


class PeerCalls:
    """To one process, of one subtask in one attempt (a `Transport`). `is_over`: whether a channel needs no credit."""

    def __init__(self, handle: Handle, deliveries: Deliveries, is_over: Callable[[ChannelId], bool]) -> None:
        # Bound once: looking a method up on a handle for each frame costs more than it should.
        self._frame = handle.frame.remote
        self._watched_frame = handle.frame.options(num_returns=1).remote
        self._credit = handle.credit.remote
        self._deliveries, self._is_over = deliveries, is_over

    def send(self, frame: do.SendFrame) -> None:
        """Send a frame."""
        head = make_head(frame.attempt, frame.channel, frame.first_sequence)
        batches = [element for element in frame.elements if isinstance(element, pa.RecordBatch)]
        plain = all(is_arrows_own(field.type) for batch in batches for field in batch.schema)
        elements = frame.elements if plain else pickled_elements(frame.elements)
        if not frame.exhausts_credit and len(batches) == len(frame.elements):
            self._frame(head, elements)
        else:
            self._deliveries.watch_until_there(self._watched_frame(head, elements))

    def grant(self, grant: do.GrantCredit) -> None:
        """Grant credit."""
        channel = grant.channel
        if not self._is_over(channel):
            head = make_head(grant.attempt, channel, grant.total_bytes)
            self._deliveries.watch(self._credit(head, grant.window_bytes), lambda: not self._is_over(channel))


EARLY_MAX = 10_000
"""Frames of a task that may wait. Watermarks and barriers need no credit."""
GAP_MS_MAX = 20_000
"""Ray sends again as soon as it reaches the process, as it does with what has come early."""


class FrameOrder:
    """That of one attempt of a task. Pure."""

    def __init__(self) -> None:
        self._due: dict[ChannelId, int] = {}
        """The number of the element that comes next, of each channel."""
        self._early: dict[ChannelId, dict[int, FrameArrived]] = {}
        """What waits, by channel and number."""
        self._waiting = 0

    def arrived(self, frame: FrameArrived) -> tuple[FrameArrived, ...]:
        """A frame came in: the frames that are to be handed on now."""
        channel, first = frame.channel, frame.first_sequence
        due = self._due.get(channel, 0)
        if first > due:
            early = self._early.setdefault(channel, {})
            self._waiting += first not in early
            early.setdefault(first, frame)
            return self.give_up(channel) if self._waiting > EARLY_MAX else ()
        self._due[channel] = due = max(due, first + len(frame.elements))
        if channel not in self._early:
            return (frame,)
        return (frame, *self._follow(channel, due))

    def _follow(self, channel: ChannelId, due: int) -> list[FrameArrived]:
        """What had come early and is not early any more."""
        early, frames = self._early[channel], []
        for first in sorted(early):
            if first > due:
                break
            frames.append(early.pop(first))
            due = max(due, first + len(frames[-1].elements))
        self._waiting -= len(frames)
        self._due[channel] = due
        if not early:
            del self._early[channel]
        return frames

    def gap(self, channel: ChannelId) -> int | None:
        """The number that frames of a channel wait for; None where none waits."""
        return self._due.get(channel, 0) if channel in self._early else None

    def give_up(self, channel: ChannelId) -> tuple[FrameArrived, ...]:
        """What waits, though something is missing before it."""
        early = self._early.pop(channel, {})
        self._waiting -= len(early)
        return tuple(early[first] for first in sorted(early))


class OrderedFrames:
    """Hands the frames of one attempt of a task on. All on its mailbox."""

    def __init__(
        self, hand_on: Callable[[FrameArrived], object], call_later: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._hand_on = hand_on
        self._call_later = call_later
        self._order = FrameOrder()

    def arrived(self, frame: FrameArrived) -> None:
        """A frame came in."""
        before = self._order.gap(frame.channel)
        for one in self._order.arrived(frame):
            self._hand_on(one)
        if before is None and (due := self._order.gap(frame.channel)) is not None:
            self._call_later(GAP_MS_MAX, partial(self._look, frame.channel, due))

    def _look(self, channel: ChannelId, due: int) -> None:
        gap = self._order.gap(channel)
        if gap == due:
            for frame in self._order.give_up(channel):
                self._hand_on(frame)
        elif gap is not None:
            self._call_later(GAP_MS_MAX, partial(self._look, channel, gap))
