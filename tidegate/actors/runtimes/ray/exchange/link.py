"""`Link`: one end of a connection between the processes of two tasks: what is said and heard, and how it ends. Pure.

`Connection` (`connections.py`) has the socket, and asks. Rules:

- First each end shows a token, which both have from a call of Ray. Nothing that comes before is looked at.
- Messages have a length and a kind. They are heard whole, and in the order in which they were said.
- What waits to be written is bounded. `say` refuses what finds no room, and what is large: that goes another way.
- Who has said everything says END. The other end answers with END once it has taken in all that came before (`end`),
  not earlier: so who hears END knows that all was heard.
- A connection that ends before END was heard may have lost something. It is never taken up again.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from tidegate.storage.errors import ProtocolError

TOKEN_BYTES = 16
MESSAGE_BYTES_MAX = 1024 * 1024
"""Of one message. What is larger costs no more by Ray's call."""
WAITING_BYTES_MAX = 1024 * 1024
"""Said and not yet written: what a process that does not read leaves in this one, beside the buffers of the system."""
PIECES_MAX = 64
"""That are written at once."""
COPIED_BYTES_MAX = 4096
"""To put so much together costs less than to write it in pieces."""
_HEAD = struct.Struct("<IB")

Bytes: TypeAlias = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message is. Frames and credit go between tasks, the last three on a `Line`."""

    FRAME = 1
    CREDIT = 2
    END = 3
    SAID = 4
    TAKEN_IN = 5
    MENTIONED = 6


class Message(NamedTuple):
    """What was heard. Of END nobody hears: see `Link.heard_end`."""

    kind: Kind
    payload: bytes


class Link:
    """One end. `shows`: the token that this end begins with; `expects`: that of the other end, empty if it was seen."""

    def __init__(self, shows: bytes, expects: bytes) -> None:
        self._expects = expects
        self._unread = bytearray()
        """The begin of what is not whole yet."""
        self._unwritten: deque[memoryview] = deque((memoryview(shows),))
        self._unwritten_bytes = len(shows)
        self._said_end = False
        self.heard_end = False
        """Whether the other end has said everything."""

    @property
    def is_open(self) -> bool:
        """Whether the other end has shown its token."""
        return not self._expects

    @property
    def is_over(self) -> bool:
        """Whether both ends have said everything, and this one has written it."""
        return self._said_end and self.heard_end and not self._unwritten

    # --- saying ---------------------------------------------------------------------------------------------------

    def say(self, kind: Kind, *payload: Bytes) -> bool:
        """Say something. Whether it will be written; else it has to go another way."""
        size_bytes = sum(map(len, payload))
        if not self.is_open or self._said_end or self.heard_end or size_bytes > MESSAGE_BYTES_MAX:
            return False
        if self._unwritten and self._unwritten_bytes + size_bytes > WAITING_BYTES_MAX:
            return False
        self._put(kind, size_bytes, payload)
        return True

    def end(self) -> None:
        """Everything was said. Idempotent."""
        if not self._said_end:
            self._said_end = True
            self._put(Kind.END, 0, ())

    def unwritten(self) -> list[memoryview]:
        """What is to be written next; empty: nothing."""
        return list(islice(self._unwritten, PIECES_MAX))

    def wrote(self, size_bytes: int) -> None:
        """So many bytes of it were written."""
        self._unwritten_bytes -= size_bytes
        while size_bytes:
            piece = self._unwritten[0]
            if len(piece) > size_bytes:
                self._unwritten[0] = piece[size_bytes:]
                return
            size_bytes -= len(piece)
            self._unwritten.popleft()

    def _put(self, kind: Kind, size_bytes: int, payload: Sequence[Bytes]) -> None:
        head = _HEAD.pack(size_bytes, kind)
        pieces = (b"".join((head, *payload)),) if size_bytes < COPIED_BYTES_MAX else (head, *payload)
        self._unwritten.extend(memoryview(piece) for piece in pieces)
        self._unwritten_bytes += _HEAD.size + size_bytes

    # --- hearing --------------------------------------------------------------------------------------------------

    def heard(self, data: Bytes) -> list[Message]:
        """Bytes came in: the messages that are whole now. ProtocolError if they are none."""
        self._unread += data
        at = 0
        if self._expects:
            if len(self._unread) < TOKEN_BYTES:
                return []
            if self._unread[:TOKEN_BYTES] != self._expects:
                raise ProtocolError("the other end of a connection is not the one that was meant")
            self._expects, at = b"", TOKEN_BYTES
        messages: list[Message] = []
        with memoryview(self._unread) as unread:
            while len(unread) - at >= _HEAD.size:
                size_bytes, kind = _HEAD.unpack_from(unread, at)
                if size_bytes > MESSAGE_BYTES_MAX or kind not in _KINDS or self.heard_end:
                    raise ProtocolError(f"a connection carries what is no message: {size_bytes} bytes of kind {kind}")
                if len(unread) - at - _HEAD.size < size_bytes:
                    break
                at += _HEAD.size
                if kind == Kind.END:
                    self.heard_end = True
                else:
                    messages.append(Message(Kind(kind), bytes(unread[at : at + size_bytes])))
                at += size_bytes
        del self._unread[:at]
        return messages


_KINDS = frozenset(Kind)
