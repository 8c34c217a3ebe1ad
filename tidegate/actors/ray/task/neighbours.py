"""`Neighbours`: the transports of one subtask in one attempt to the processes of its neighbours in other workers.

Rules:

- The subtask is ready once the links to all these processes are settled (`peer_links.py`). So the transport of each
  channel is known before rows flow, and does not change.
- A subtask that has finished is over when all processes to which it has sent frames over sockets have taken them in.
- A link that breaks has lost something for this subtask unless all that it had to receive has arrived, and it had
  nothing to send.
"""

from __future__ import annotations

from tidegate.actors.drivers.transport import Transport
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.ray.exchange.peer_links import PeerLink, PeerLinks, Way
from tidegate.actors.ray.process.orders import Order
from tidegate.actors.ray.task.deliveries import Deliveries
from tidegate.actors.ray.task.peer_calls import PeerCalls
from tidegate.actors.task.messages.events import FrameArrived
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import EndOfPartition


class Neighbours:
    """Of one subtask of one attempt. All on the mailbox."""

    def __init__(
        self, order: Order, graph: JobGraph, descriptor: TaskDescriptor, links: PeerLinks, deliveries: Deliveries
    ) -> None:
        self._peers, self._deliveries = order.peers, deliveries
        # Only channels that leave the worker; `Worker` carries the others.
        outputs = (channel for edge in descriptor.outputs for channel in edge.channels)
        self._receivers = {c: task for c in outputs if (task := graph.receiver(c)) in order.peers}
        self._senders = {c: task for c in descriptor.inputs if (task := graph.sender(c)) in order.peers}
        tasks = {*self._receivers.values(), *self._senders.values()}
        self._links = {task: links.to(order.peers[task]) for task in sorted(tasks)}
        self._sent_over: set[PeerLink] = set()
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

    def needs(self, link: PeerLink) -> bool:
        """Whether something may be lost for this subtask if this link breaks."""
        there = {task for task, one in self._links.items() if one is link}
        return any(task in there for task in self._receivers.values()) or any(
            task in there and channel not in self._over for channel, task in self._senders.items()
        )

    def finish(self) -> None:
        """The subtask has finished: it is over when its receivers have taken in what went over sockets."""
        for link in self._sent_over:
            self._deliveries.watch_until_there(link.sync())
