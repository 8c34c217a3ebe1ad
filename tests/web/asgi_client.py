"""Asks an ASGI application as a server would, in this thread: any method, path, headers and body, also wrong ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        """What an error says."""
        assert list(self.json) == ["errors"]
        return self.json["errors"][0]


class Client:
    """Of one application. `ask` waits for the reply."""

    def __init__(self, app: Any, headers: Mapping[str, str] | None = None, peer: str = "127.0.0.1") -> None:
        self._app = app
        self._headers = {"host": "127.0.0.1:8081"} if headers is None else dict(headers)
        self._peer = peer

    def get(self, url: str, **headers: str) -> Reply:
        return self.ask("GET", url, headers=headers)

    def post(self, url: str, body: object = None, **headers: str) -> Reply:
        sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return self.ask("POST", url, sent, headers)

    def ask(self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Reply:
        path, _, query = url.partition("?")
        given = {**self._headers, **{name.replace("_", "-"): value for name, value in (headers or {}).items()}}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]
        return self.raw(method, path, query.encode("latin-1"), raw, [body])

    def raw(
        self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: Iterable[bytes]
    ) -> Reply:
        return asyncio.run(self.asked(method, path, query, headers, body))

    async def asked(
        self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: Iterable[bytes]
    ) -> Reply:
        parts = list(body)
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not parts:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode("utf-8", "surrogatepass"), "query_string": query,
            "root_path": "", "headers": headers, "client": (self._peer, 4_711), "server": ("127.0.0.1", 8081),
        }  # fmt: skip
        await self._app(scope, receive, send)
        head = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent[0]["headers"]}
        return Reply(sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:]))
