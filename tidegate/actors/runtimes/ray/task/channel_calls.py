"""`ChannelCalls`: what one task sends over its channels: frames and credit, to the actors at their other ends.

Rules:

- Nobody waits for the answer to a frame of batches: the next one shows that one is missing. Where nothing may follow
  that would show it, behind a barrier, the end or the last of the credit, the answer is watched.
- Between tasks on one node rows go through memory, and all else over a connection between their processes, once the
  receiver has taken what was offered to it (`exchange/`, `neighbour_links.py`). The rest goes by calls of Ray.
- Who has sent everything needs no credit, and may have left before it came.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pyarrow as pa

from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.protocol.identity import ChannelId, TaskId
from tidegate.actors.protocol.stream_elements import EndOfPartition
from tidegate.actors.runtimes.ray.exchange.connections import Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.frame_exchange import Incoming, Outgoing, Packed
from tidegate.actors.runtimes.ray.exchange.frame_heads import make_head
from tidegate.actors.runtimes.ray.exchange.shared_segment import Offer
from tidegate.actors.runtimes.ray.process.orders import Order
from tidegate.actors.runtimes.ray.task.deliveries import Deliveries
from tidegate.actors.runtimes.ray.task.neighbour_links import Doors, NeighbourLinks, TaskLink
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor


class ChannelCalls:
    """Of one task of one attempt. `doors`: where frames and credit come in that somebody sends over a connection."""

    def __init__(
        self,
        order: Order,
        context: JobContext,
        descriptor: TaskDescriptor,
        node_id: str,
        deliveries: Deliveries,
        connections: Connections,
        doors: Doors,
    ) -> None:
        self._attempt, self._deliveries, self._connections = order.attempt, deliveries, connections
        graph, peers = context.graph, order.peers
        self._receivers = {c: graph.receiver(c) for edge in descriptor.outputs for c in edge.channels}
        self._senders = {c: graph.sender(c) for c in descriptor.inputs}
        receivers = {channel: peers[task] for channel, task in self._receivers.items()}
        # Bound once: looking a method up on a handle for each frame costs more than it should.
        self._calls = {channel: peer.frame.remote for channel, peer in receivers.items()}
        self._watched_calls = {channel: peer.frame.options(num_returns=1).remote for channel, peer in receivers.items()}
        self._offers = {channel: peer.offer.remote for channel, peer in receivers.items()}
        self._credits = {channel: peers[task].credit.remote for channel, task in self._senders.items()}
        self._outgoing = Outgoing(order.task, node_id, context.options.shared_bytes, self._offer)
        self._incoming = Incoming(node_id)
        wanted = context.options.sockets
        self._links = NeighbourLinks(
            connections, node_id, wanted, doors, deliveries.later, self._offer_link, self._watch_link
        )
        self._over: set[ChannelId] = set()
        """Input channels whose last element has arrived: their senders may be gone."""

    def send(self, frame: do.SendFrame) -> None:
        """Send a frame; in order for each channel."""
        head = make_head(frame.attempt, frame.channel, frame.first_sequence)
        receiver = self._receivers[frame.channel]
        elements, place = self._outgoing.pack(frame.channel, frame.elements)
        if self._links.send(receiver, (head, elements, place)):
            return
        arguments = (head, elements) if place is None else (head, elements, place)
        if not frame.exhausts_credit and all(isinstance(element, pa.RecordBatch) for element in frame.elements):
            self._calls[frame.channel](*arguments)
        else:
            self._deliveries.watch_until_there(self._watched_calls[frame.channel](*arguments))
        self._links.called(receiver, frame.elements)

    def received(self, at_ms: int, channel: ChannelId, first_sequence: int, packed: Packed) -> ev.FrameArrived | None:
        """What has arrived with a frame; None: nothing new."""
        elements = self._incoming.unpack(channel, packed)
        if elements is None:
            return None
        if elements and isinstance(elements[-1], EndOfPartition):
            self._over.add(channel)
        return ev.FrameArrived(at_ms, self._attempt, channel, first_sequence, elements)

    def grant(self, grant: do.GrantCredit) -> None:
        """Give the sender of a channel room."""
        channel, head = grant.channel, make_head(grant.attempt, grant.channel, grant.total_bytes)
        if channel not in self._over and not self._links.grant(self._senders[channel], head, grant.window_bytes):
            credit = self._credits[channel](head, grant.window_bytes)
            self._deliveries.watch(credit, lambda: channel not in self._over)

    def take(self, channel: ChannelId, offer: Offer | LinkOffer) -> str:
        """Take what the sender of a channel offers. Why it cannot be; empty: it is taken. From any thread."""
        if isinstance(offer, LinkOffer):
            return self._links.take(self._senders[channel], offer)
        return self._incoming.take(channel, offer)

    def finish(self) -> None:
        """The task has finished: say so. It is over when its receivers have heard all that was said."""
        for link in self._links.finish():
            self._deliveries.watch_until_there(link)

    def close(self) -> None:
        """The task is over: let go of the memory and the connections of its channels."""
        self._outgoing.close()
        self._links.close()

    def _offer(self, channel: ChannelId, offer: Offer) -> None:
        self._ask(channel, offer, lambda refusal: self._outgoing.answered(channel, refusal))

    def _offer_link(self, receiver: TaskId, offer: LinkOffer) -> None:
        channel = next(channel for channel, task in self._receivers.items() if task == receiver)
        self._ask(channel, offer, lambda refusal: self._links.answered(receiver, refusal))

    def _ask(self, channel: ChannelId, offer: Offer | LinkOffer, then: Callable[[str], None]) -> None:
        def answered(future: Future[str]) -> None:
            error = future.exception()
            refusal = future.result() if error is None else error_text(error)
            self._deliveries.later(lambda: then(refusal))

        head = make_head(self._attempt, channel, 0)
        self._offers[channel](head, offer).future().add_done_callback(answered)

    def _watch_link(self, link: TaskLink) -> None:
        """A connection that breaks has lost something, unless all that its other end had to say was heard."""

        def fails() -> bool:
            inputs = [channel for channel, task in self._senders.items() if task == link.neighbour]
            if not link.sends and self._over.issuperset(inputs):
                return False
            self._connections.give_up("one of this process broke while both its ends lived")
            return True

        self._deliveries.watch(link, fails)
