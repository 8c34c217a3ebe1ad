"""`Transport`: what carries frames and credit between two subtasks. One interface, three cases.

A subtask sends by `Subtask.connect(peer)`, which gives the transport to a neighbour, once for each channel and attempt.
Whatever carries it, a frame arrives as `FrameArrived` at `Worker.deliver`, and a grant as `CreditGranted`.

- In the same worker: `QueueTransport` (`worker.py`) appends the elements themselves to the queue of the worker.
- In another worker on the same node: `PeerLink` (`runtimes/ray/exchange/peer_links.py`) writes to a socket, and rows to
  shared memory. A socket keeps the order.
- On another node, or without sockets: `PeerCalls` (`runtimes/ray/task/peer_calls.py`) makes calls of Ray, which Ray
  repeats. Frames are numbered, and the receiver sorts them (`runtimes/ray/task/frame_order.py`).

Rules that all of them keep:

- The transport of a channel is known before the subtask reports that it is ready, so before rows flow. It never changes
  during an attempt.
- Elements of one channel are handed over once and in the order in which they were sent, or the attempt fails.
- No send waits. What is on its way is bounded by the credit of the channel.
- What belongs to another attempt is dropped by the receiver.
- A subtask that has finished has ended once its receivers have taken in all that it has sent.
"""

from __future__ import annotations

from typing import Protocol

from tidegate.actors.task.messages import instructions as do


class Transport(Protocol):
    """Carries what one subtask sends to a neighbour in one attempt. Called on the worker's thread."""

    def send(self, frame: do.SendFrame) -> None:
        """Send a frame to the receiver of its channel."""

    def grant(self, grant: do.GrantCredit) -> None:
        """Grant credit to the sender of a channel."""
