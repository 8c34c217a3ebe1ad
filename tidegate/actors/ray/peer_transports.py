"""The transports of one subtask to its neighbours in other workers: sockets on the same node, else calls of Ray.

Rules:

- A subtask is ready once the transport to each of these processes is decided (`peer_connections.py`). So the transport
  of each channel is known before rows flow, and does not change.
- A finished subtask ends when all processes to which it has sent frames over sockets have received them.
- A broken connection has lost data of a subtask unless all of its input from there has arrived and it has no receiver
  there.
- Ray repeats lost frames and grants after the frames that were sent meanwhile, and may repeat frames that arrived. So
  frames have numbers. A frame is delivered after all frames before it, and an early frame waits. A repeated frame is
  delivered twice, and the task machine drops its elements. The credit of the channel and `EARLY_MAX` limit the waiting
  frames, and they wait for at most `GAP_MS_MAX`. Then they are delivered, and the machine fails because of the gap.
- The sender does not wait for the answer to a frame of batches, because the next frame reveals a missing one. It
  watches a frame that may be the last one for some time: a barrier, the end of the data, or the last frame that its
  credit allows.
- No grant is needed for a channel whose end has arrived: its sender may be gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from tidegate.actors.drivers.worker import Transport
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.ray.actor_calls import Deliveries
from tidegate.actors.ray.peer_connections import PeerConnection, PeerConnections, Way, make_head, pickled_elements
from tidegate.actors.ray.shared_memory import is_arrow_type
from tidegate.actors.ray.task_deployment import Handle, TaskDeployment
from tidegate.actors.task import instructions as do
from tidegate.actors.task.events import FrameArrived
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import EndOfPartition


class PeerTransports:
    """The transports to other workers of one subtask in one attempt. All methods run on the mailbox."""

    def __init__(
        self,
        deployment: TaskDeployment,
        graph: JobGraph,
        descriptor: TaskDescriptor,
        links: PeerConnections,
        deliveries: Deliveries,
    ) -> None:
        self._peers, self._deliveries = deployment.peers, deliveries
        # Only channels that leave the worker. `Worker` carries frames between its own subtasks.
        outputs = (channel for edge in descriptor.outputs for channel in edge.channels)
        self._receivers = {c: task for c in outputs if (task := graph.receiver(c)) in deployment.peers}
        self._senders = {c: task for c in descriptor.inputs if (task := graph.sender(c)) in deployment.peers}
        tasks = {*self._receivers.values(), *self._senders.values()}
        self.links = {task: links.to(deployment.peers[task]) for task in sorted(tasks)}
        self._sent_over: set[PeerConnection] = set()
        """Socket connections over which the subtask sends frames."""
        self._over: set[ChannelId] = set()
        """Input channels whose last element has arrived. Their senders may have ended."""

    @property
    def settled(self) -> bool:
        """Returns whether it is decided, for each neighbour in another worker, if a socket or Ray calls are used."""
        return all(link.way is not Way.OPENING for link in self.links.values())

    def connect(self, neighbour: TaskId) -> Transport:
        """Returns the transport to a neighbour for this attempt. All transports must be `settled`."""
        link = self.links[neighbour]
        assert link.way is not Way.OPENING
        if link.way is Way.SOCKET:
            if neighbour in self._receivers.values():
                self._sent_over.add(link)
            return link
        return PeerCalls(self._peers[neighbour].handle, self._deliveries, self._over.__contains__)

    def arrived(self, frame: FrameArrived) -> None:
        """Records the end of an input channel, if the delivered frame contains it."""
        if frame.elements and isinstance(frame.elements[-1], EndOfPartition):
            self._over.add(frame.channel)

    def needs(self, link: PeerConnection) -> bool:
        """Returns whether rows to or from this subtask may be lost when this connection breaks."""
        there = {task for task, one in self.links.items() if one is link}
        return any(task in there for task in self._receivers.values()) or any(
            task in there and channel not in self._over for channel, task in self._senders.items()
        )

    def finish(self) -> None:
        """Delays the end of the finished subtask until its receivers have all frames that went over sockets."""
        for link in self._sent_over:
            self._deliveries.watch_until_there(link.sync())


class PeerCalls:
    """The transport of one subtask in one attempt to another process, by Ray calls.

    `is_over` returns whether the end of a channel has arrived, so that its sender needs no more credit.
    """

    def __init__(self, handle: Handle, deliveries: Deliveries, is_over: Callable[[ChannelId], bool]) -> None:
        # Looked up once: a lookup of a method on a handle is too expensive for each frame.
        self._frame = handle.frame.remote
        self._watched_frame = handle.frame.options(num_returns=1).remote
        self._credit = handle.credit.remote
        self._deliveries, self._is_over = deliveries, is_over

    def send(self, frame: do.SendFrame) -> None:
        """Sends a frame to the other process by a Ray call."""
        head = make_head(frame.attempt, frame.channel, frame.first_sequence)
        batches = [element for element in frame.elements if isinstance(element, pa.RecordBatch)]
        plain = all(is_arrow_type(field.type) for batch in batches for field in batch.schema)
        elements = frame.elements if plain else pickled_elements(frame.elements)
        if not frame.exhausts_credit and len(batches) == len(frame.elements):
            self._frame(head, elements)
        else:
            self._deliveries.watch_until_there(self._watched_frame(head, elements))

    def grant(self, grant: do.GrantCredit) -> None:
        """Sends a credit grant, unless the end of the channel has arrived."""
        channel = grant.channel
        if not self._is_over(channel):
            head = make_head(grant.attempt, channel, grant.total_bytes)
            self._deliveries.watch(self._credit(head, grant.window_bytes), lambda: not self._is_over(channel))


EARLY_MAX = 10_000
"""Limit of early frames of a task that wait. Credit alone does not limit them, because watermarks and barriers
use none.
"""
GAP_MS_MAX = 20_000
"""Time in ms after which a gap counts as permanent. Ray repeats a lost call as soon as it reaches the process."""


class FrameOrder:
    """Puts the frames of one attempt of a task into the order of their sequence numbers. No I/O."""

    def __init__(self) -> None:
        self._due: dict[ChannelId, int] = {}
        """The sequence number of the next element of each channel."""
        self._early: dict[ChannelId, dict[int, FrameArrived]] = {}
        """The early frames of each channel, by the sequence number of their first element."""
        self.num_early = 0
        """Number of early frames, of all channels."""

    def arrived(self, frame: FrameArrived) -> tuple[FrameArrived, ...]:
        """Adds a frame. Returns the frames that can be delivered now, in order."""
        channel, first = frame.channel, frame.first_sequence
        due = self._due.get(channel, 0)
        if first > due:
            early = self._early.setdefault(channel, {})
            self.num_early += first not in early
            early.setdefault(first, frame)
            return self.skip_gap(channel) if self.num_early > EARLY_MAX else ()
        self._due[channel] = due = max(due, first + len(frame.elements))
        if channel not in self._early:
            return (frame,)
        return (frame, *self._follow(channel, due))

    def _follow(self, channel: ChannelId, due: int) -> list[FrameArrived]:
        """Removes and returns the early frames of a channel that can be delivered now. `due`: the next sequence
        number.
        """
        early, frames = self._early[channel], []
        for first in sorted(early):
            if first > due:
                break
            frames.append(early.pop(first))
            due = max(due, first + len(frames[-1].elements))
        self.num_early -= len(frames)
        self._due[channel] = due
        if not early:
            del self._early[channel]
        return frames

    def gap(self, channel: ChannelId) -> int | None:
        """Returns the sequence number of the missing element for which early frames of a channel wait, or None if
        none wait.
        """
        return self._due.get(channel, 0) if channel in self._early else None

    def skip_gap(self, channel: ChannelId) -> tuple[FrameArrived, ...]:
        """Removes and returns all early frames of a channel, although an element before them is missing."""
        early = self._early.pop(channel, {})
        self.num_early -= len(early)
        return tuple(early[first] for first in sorted(early))


class OrderedFrames:
    """Delivers the frames of one attempt of a task in order. All methods run on the mailbox."""

    def __init__(
        self, deliver: Callable[[FrameArrived], object], call_later: Callable[[int, Callable[[], None]], None]
    ) -> None:
        self._deliver = deliver
        self._call_later = call_later
        self._order = FrameOrder()

    @property
    def num_early(self) -> int:
        """Returns the number of early frames, which wait for frames with lower sequence numbers."""
        return self._order.num_early

    def arrived(self, frame: FrameArrived) -> None:
        """Receives a frame, and delivers the frames that are now in order."""
        before = self._order.gap(frame.channel)
        for one in self._order.arrived(frame):
            self._deliver(one)
        if before is None and (due := self._order.gap(frame.channel)) is not None:
            self._call_later(GAP_MS_MAX, partial(self._look, frame.channel, due))

    def _look(self, channel: ChannelId, due: int) -> None:
        gap = self._order.gap(channel)
        if gap == due:
            for frame in self._order.skip_gap(channel):
                self._deliver(frame)
        elif gap is not None:
            self._call_later(GAP_MS_MAX, partial(self._look, channel, gap))
