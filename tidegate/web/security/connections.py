"""`LimitedConnections`: keeps clients that do not finish their requests from shutting out the others.

Rules:
- A connection *waits* while its client has yet to send something: the rest of its headers or body, or a next request.
- A client has `input_s` seconds to finish a request. Bytes that come one at a time do not extend them.
- Only so many connections may wait. One more closes the connection that has waited longest, first of the same client,
  then of all. A browser sends its request at once, so it is served while somebody holds hundreds of connections open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_WAITS_IN = (h11.IDLE, h11.SEND_BODY)
"""States of a client in h11 in which the next bytes are the client's."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long, and how many. `for_one_client` is less than the requests that are answered at once (`Limits`)."""

    input_s: float = 10.0
    waiting: int = 128
    for_one_client: int = 32


class LimitedConnections:
    """The waiting connections of one server. An instance makes the protocols of uvicorn (`http=`)."""

    def __init__(self, limits: ConnectionLimits = ConnectionLimits()) -> None:
        self.limits = limits
        self._waiting: dict[_Connection, str] = {}  # In the order in which they began to wait.
        self._of_clients: Counter[str] = Counter()

    def __call__(self, **arguments: Any) -> asyncio.Protocol:
        """Returns the protocol of a new connection; uvicorn passes its configuration and state."""
        return _Connection(self, **arguments)

    def add(self, connection: _Connection, client: str) -> None:
        """Counts a connection that begins to wait, and closes another one where there are too many."""
        self._waiting[connection] = client
        self._of_clients[client] += 1
        if self._of_clients[client] > self.limits.for_one_client:
            self._close(next(each for each, owner in self._waiting.items() if owner == client))
        if len(self._waiting) > self.limits.waiting:
            self._close(next(iter(self._waiting)))

    def remove(self, connection: _Connection) -> None:
        """Forgets a connection that no longer waits; one that did not wait stays unknown."""
        client = self._waiting.pop(connection, None)
        if client is not None:
            self._of_clients[client] -= 1
            if not self._of_clients[client]:
                del self._of_clients[client]

    def _close(self, connection: _Connection) -> None:
        self.remove(connection)
        connection.abort()


class _Connection(H11Protocol):
    """One connection, which reports to its server whether it waits."""

    def __init__(self, server: LimitedConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._server = server
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waits_no_more()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Closes the connection at once."""
        self._waits_no_more()
        self.transport.abort()

    def _look(self) -> None:
        waits = self.conn.their_state in _WAITS_IN and not self.transport.is_closing()
        if not waits:
            self._waits_no_more()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._server.limits.input_s, self.abort)
            self._server.add(self, self.client[0] if self.client else "")

    def _waits_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._server.remove(self)
