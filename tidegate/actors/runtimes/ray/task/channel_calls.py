"""`ChannelCalls`: what one task sends over its channels, by calls of the actors at their other ends: frames and credit.

Rules:

- Nobody waits for the answer to a frame of batches: the next one shows that one is missing. Where nothing may follow
  that would show it, behind a barrier, the end or the last of the credit, the answer is watched.
- Between tasks on one node rows go through memory, once the receiver has taken what was offered to it (`exchange/`).
- Who has sent everything needs no credit, and may have left before it came.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pyarrow as pa

from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.protocol.identity import ChannelId
from tidegate.actors.protocol.stream_elements import EndOfPartition
from tidegate.actors.runtimes.ray.exchange.frame_exchange import Incoming, Outgoing, Packed
from tidegate.actors.runtimes.ray.exchange.shared_segment import Offer
from tidegate.actors.runtimes.ray.process.orders import Order
from tidegate.actors.runtimes.ray.task.deliveries import Deliveries
from tidegate.actors.runtimes.ray.task.frame_heads import make_head
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor


class ChannelCalls:
    """Of one task of one attempt. `later` runs an action on the mailbox if the task still runs then."""

    def __init__(
        self,
        order: Order,
        context: JobContext,
        descriptor: TaskDescriptor,
        node_id: str,
        deliveries: Deliveries,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._attempt, self._deliveries, self._later = order.attempt, deliveries, later
        graph, peers = context.graph, order.peers
        receivers = {c: peers[graph.receiver(c)] for edge in descriptor.outputs for c in edge.channels}
        # Bound once: looking a method up on a handle for each frame costs more than it should.
        self._calls = {channel: peer.frame.remote for channel, peer in receivers.items()}
        self._watched_calls = {channel: peer.frame.options(num_returns=1).remote for channel, peer in receivers.items()}
        self._offers = {channel: peer.offer.remote for channel, peer in receivers.items()}
        self._credits = {c: peers[graph.sender(c)].credit.remote for c in descriptor.inputs}
        self._outgoing = Outgoing(order.task, node_id, context.options.shared_bytes, self._offer)
        self.incoming = Incoming(node_id)
        self._over: set[ChannelId] = set()
        """Input channels whose last element has arrived: their senders may be gone."""

    def send(self, frame: do.SendFrame) -> None:
        """Send a frame; in order for each channel."""
        head = make_head(frame.attempt, frame.channel, frame.first_sequence)
        elements, place = self._outgoing.pack(frame.channel, frame.elements)
        arguments = (head, elements) if place is None else (head, elements, place)
        if not frame.exhausts_credit and all(isinstance(element, pa.RecordBatch) for element in frame.elements):
            self._calls[frame.channel](*arguments)
        else:
            self._deliveries.watch_until_there(self._watched_calls[frame.channel](*arguments))

    def received(self, at_ms: int, channel: ChannelId, first_sequence: int, packed: Packed) -> ev.FrameArrived | None:
        """What has arrived with a frame; None: nothing new."""
        elements = self.incoming.unpack(channel, packed)
        if elements is None:
            return None
        if elements and isinstance(elements[-1], EndOfPartition):
            self._over.add(channel)
        return ev.FrameArrived(at_ms, self._attempt, channel, first_sequence, elements)

    def grant(self, grant: do.GrantCredit) -> None:
        """Give the sender of a channel room."""
        channel, head = grant.channel, make_head(grant.attempt, grant.channel, grant.total_bytes)
        if channel not in self._over:
            credit = self._credits[channel](head, grant.window_bytes)
            self._deliveries.watch(credit, lambda: channel not in self._over)

    def close(self) -> None:
        """The task is over: let go of the memory of its channels."""
        self._outgoing.close()

    def _offer(self, channel: ChannelId, offer: Offer) -> None:
        def answered(future: Future[str]) -> None:
            error = future.exception()
            refusal = future.result() if error is None else error_text(error)
            self._later(lambda: self._outgoing.answered(channel, refusal))

        head = make_head(self._attempt, channel, 0)
        self._offers[channel](head, offer).future().add_done_callback(answered)
