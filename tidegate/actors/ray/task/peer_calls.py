"""`PeerCalls`: the transport to a neighbour by calls of Ray, between nodes and where no socket joins two processes.

Rules:

- Ray repeats frames and grants that did not arrive, so they may come twice and out of order. Their numbers tell
  (`frame_order.py`).
- Nobody waits for the answer to a frame of batches: the next one shows that one is missing. Where nothing may follow
  that would show it, behind a barrier, the end or the last of the credit, the answer is watched.
- A sender that has sent everything needs no credit, and may have left before it came.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from tidegate.actors.ray.exchange.frames import is_arrows_own
from tidegate.actors.ray.exchange.messages import make_head, pickled_elements
from tidegate.actors.ray.process.orders import Handle
from tidegate.actors.ray.task.deliveries import Deliveries
from tidegate.actors.task.messages import instructions as do
from tidegate.protocol.identity import ChannelId


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
