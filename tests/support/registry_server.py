"""A schema registry on loopback that speaks Confluent's REST interface, for tests."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class RegistryServer:
    """The schemas of a registry. Its address is `url`."""

    def __init__(self, user: str | None = None, password: str | None = None) -> None:
        self.subjects: dict[str, list[int]] = {}
        self.schemas: dict[int, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []
        """Status codes with which the next requests are answered; 0 breaks the connection."""
        self.incompatible: set[str] = set()
        """Subjects that accept no further schema."""
        self.wanted = None if user is None else base64.b64encode(f"{user}:{password}".encode()).decode()
        self.url = ""

    def add(
        self, subject: str, schema: object, kind: str = "AVRO", references: list[dict[str, Any]] | None = None
    ) -> int:
        """Registers a schema, and returns its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        body = {"schema": text, "schemaType": kind, "references": references or []}
        known = [number for number, found in self.schemas.items() if found == body]
        number = known[0] if known else len(self.schemas) + 1
        self.schemas[number] = body
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)
        return number

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns status and answer of a request."""
        parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
        if parts[:2] == ["schemas", "ids"]:
            found = self.schemas.get(int(parts[2]))
            return (404, {"error_code": 40403, "message": "Schema not found"}) if found is None else (200, found)
        subject = parts[1]
        if method == "POST" and parts[2:] == ["versions"]:
            if subject in self.incompatible:
                return 409, {"error_code": 409, "message": "Schema being registered is incompatible"}
            references = body.get("references") or []
            for each in references:
                if not 1 <= each["version"] <= len(self.subjects.get(each["subject"], [])):
                    return 422, {"error_code": 42201, "message": f"Invalid schema: no reference {each['name']!r}"}
            return 200, {"id": self.add(subject, body["schema"], body.get("schemaType", "AVRO"), references)}
        versions = self.subjects.get(subject)
        if versions is None:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        if method == "POST":
            wanted = (body["schema"], body.get("references") or [])
            same = [
                {"subject": subject, "id": number, "version": version, **self.schemas[number]}
                for version, number in enumerate(versions, 1)
                if (self.schemas[number]["schema"], self.schemas[number]["references"]) == wanted
            ]
            return (200, same[0]) if same else (404, {"error_code": 40403, "message": "Schema not found"})
        version = len(versions) if parts[3] == "latest" else int(parts[3])
        number = versions[version - 1]
        return 200, {"subject": subject, "id": number, "version": version, **self.schemas[number]}


@contextmanager
def registry_server(
    user: str | None = None, password: str | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[RegistryServer]:
    """Yields a registry that runs in this process, on a free port of loopback."""
    registry = RegistryServer(user, password)

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            registry.requests.append((self.command, self.path))
            code = registry.failures.pop(0) if registry.failures else None
            status, answer = 0, dict[str, Any]()
            if code == 0:
                self.close_connection = True
                return
            if code is not None:
                status, answer = code, {"message": "try again"}
            elif registry.wanted is not None and self.headers.get("Authorization") != f"Basic {registry.wanted}":
                status, answer = 401, {"error_code": 401, "message": "Unauthorized"}
            else:
                status, answer = registry.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    registry.url = f"http{'s' if tls is not None else ''}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
