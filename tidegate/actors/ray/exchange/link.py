"""`Link`: one end of a connection between two processes, without its socket: how messages become bytes. Pure.

`Connection` (`connections.py`) has the socket. Rules:

- First each end shows what proves that it is of the job. Nothing that comes before that is looked at.
- Messages have a length and a kind. They are read whole, and in the order in which they were sent.
- Nothing is refused for its size, up to `MESSAGE_BYTES_MAX`: what waits to be written is bounded by the credit of the
  channels. A message that is larger fails whoever sends it.
- A large message is read into memory of its own, where Arrow can leave its rows.
- At most one message carries a descriptor: that of the memory for rows.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from tidegate.storage.errors import ProtocolError

MESSAGE_BYTES_MAX = 1 << 30
LARGE_BYTES = 256 * 1024
"""A message of at least this size is read into memory of its own."""
PIECES_MAX = 64
"""Pieces that are written at once."""
COPIED_BYTES_MAX = 4096
"""Joining pieces up to this size costs less than writing them one by one."""
_HEAD = struct.Struct("<IB")

Bytes: TypeAlias = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message is. The first six go between workers (`peer_links.py`), the last three on a `Line`."""

    MEMORY = 1
    MAPPED = 2
    FRAME = 3
    CREDIT = 4
    SYNC = 5
    SYNCED = 6
    SAID = 7
    TAKEN_IN = 8
    MENTIONED = 9


class Message(NamedTuple):
    """A message that was read. `payload` is aligned for Arrow if it is large."""

    kind: Kind
    payload: bytes | memoryview


class Link:
    """One end. `shows`: what this end begins with. `expects`: what the other end begins with, empty if it was read."""

    def __init__(self, shows: Bytes, expects: bytes) -> None:
        self._expects = expects
        self._unread = bytearray()
        """The beginning of a message that is not whole yet."""
        self._large: memoryview | None = None
        """Where the large message goes that is being read."""
        self._large_kind, self._large_bytes = Kind.FRAME, 0
        """Its kind, and how much of it was read."""
        self._unwritten: deque[memoryview] = deque((memoryview(shows),) if shows else ())
        self._descriptor: int | None = None
        self._pieces_before_descriptor = 0

    @property
    def is_open(self) -> bool:
        """Whether the other end has proved who it is."""
        return not self._expects

    # --- writing ----------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, *payload: Bytes, descriptor: int | None = None) -> None:
        """Send a message, with a descriptor or without. ProtocolError if it is too large."""
        size_bytes = sum(map(len, payload))
        if size_bytes > MESSAGE_BYTES_MAX:
            raise ProtocolError(
                f"{size_bytes} bytes are too many for one message to another process, which takes {MESSAGE_BYTES_MAX}. "
                "Make batches smaller, such as with source_rows_max."
            )
        head = _HEAD.pack(size_bytes, kind)
        if descriptor is not None:
            self._descriptor, self._pieces_before_descriptor = descriptor, len(self._unwritten)
        pieces: Sequence[Bytes] = (b"".join((head, *payload)),) if size_bytes < COPIED_BYTES_MAX else (head, *payload)
        self._unwritten.extend(memoryview(piece) for piece in pieces if len(piece))

    def unwritten(self) -> tuple[list[memoryview], int | None]:
        """Return what is to be written next, empty for nothing, and the descriptor that goes with its first byte."""
        if self._descriptor is None:
            return list(islice(self._unwritten, PIECES_MAX)), None
        before = self._pieces_before_descriptor
        return list(islice(self._unwritten, min(before, PIECES_MAX) or 1)), None if before else self._descriptor

    def wrote(self, size_bytes: int) -> None:
        """Take note that this many bytes of it were written."""
        if size_bytes and not self._pieces_before_descriptor:
            self._descriptor = None
        while size_bytes:
            piece = self._unwritten[0]
            if len(piece) > size_bytes:
                self._unwritten[0] = piece[size_bytes:]
                return
            size_bytes -= len(piece)
            self._unwritten.popleft()
            self._pieces_before_descriptor = max(0, self._pieces_before_descriptor - 1)

    # --- reading ----------------------------------------------------------------------------------------------------

    def space(self) -> memoryview | None:
        """Return where the next bytes are to be read to (`filled`); None: they go to `read`."""
        return None if self._large is None else self._large[self._large_bytes :]

    def filled(self, size_bytes: int) -> list[Message]:
        """Take note that this many bytes were read to `space`. Returns the message if it is whole now."""
        assert self._large is not None
        self._large_bytes += size_bytes
        if self._large_bytes < len(self._large):
            return []
        message, self._large = Message(self._large_kind, self._large), None
        return [message]

    def read(self, data: Bytes) -> list[Message]:
        """Take bytes in that were read. Returns the messages that are whole now. ProtocolError if they are none."""
        self._unread += data
        at = 0
        if self._expects:
            if len(self._unread) < len(self._expects):
                return []
            if self._unread[: len(self._expects)] != self._expects:
                raise ProtocolError("the other end of a connection is not the one that was meant")
            at, self._expects = len(self._expects), b""
        messages: list[Message] = []
        with memoryview(self._unread) as unread:
            while len(unread) - at >= _HEAD.size:
                size_bytes, number = _HEAD.unpack_from(unread, at)
                if size_bytes > MESSAGE_BYTES_MAX or number not in _KINDS:
                    raise ProtocolError(f"a connection carries what is no message: {size_bytes} bytes of kind {number}")
                begin, end = at + _HEAD.size, at + _HEAD.size + size_bytes
                if end > len(unread):
                    if size_bytes >= LARGE_BYTES:
                        self._begin_large(Kind(number), size_bytes, unread[begin:])
                        at = len(unread)
                    break
                messages.append(Message(Kind(number), bytes(unread[begin:end])))
                at = end
        del self._unread[:at]
        return messages

    def _begin_large(self, kind: Kind, size_bytes: int, begin: memoryview) -> None:
        self._large = memoryview(pa.allocate_buffer(size_bytes)).cast("B")
        self._large[: len(begin)] = begin
        self._large_kind, self._large_bytes = kind, len(begin)


_KINDS = frozenset(Kind)
