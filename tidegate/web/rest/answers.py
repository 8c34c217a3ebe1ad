"""Answers in JSON, and errors as Flink writes them: `{"errors": ["..."]}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidegate.storage.errors import ConfigurationError
from tidegate.web.jobs import NotReachedError
from tidegate.web.model import NotKnown
from tidegate.web.security.gate import FAULT, BodyTooLargeError, error_body

TEXT_CHARACTERS_MAX = 300
"""Of what a client has sent, in an error."""


class RefusedError(Exception):
    """A request that is refused. Its text is the reason."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


def bad_request(reason: str) -> RefusedError:
    """Something is wrong with what a client has sent."""
    return RefusedError(400, reason)


def json_answer(content: object, status: int = 200) -> Response:
    """The content as JSON."""
    return Response(as_json(content), status, media_type="application/json")


def as_json(content: object) -> bytes:
    """What is sent. Numbers that JSON does not have are an error of ours."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_answer(request: Request, error: Exception) -> Response:
    """The answer for an error that the handlers raise."""
    status, headers = 500, None
    reason = str(error) if isinstance(error, ERRORS) else FAULT
    match error:
        case RefusedError():
            status, headers = error.status, error.headers
        case BodyTooLargeError():
            status, headers = 413, {"Connection": "close"}
        case NotKnown():
            status = 404
        case ConfigurationError():
            status = 400
        case NotReachedError():
            status, headers = 503, {"Retry-After": "2"}
        case HTTPException():
            status, headers = error.status_code, error.headers
            reason = f"{request.method} {quoted(request.url.path)}: {error.detail}"
    return Response(error_body(reason), status, headers, media_type="application/json")


def quoted(text: str) -> str:
    """What a client has sent, for an error: cut, and without characters that do something."""
    cut = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…"
    return "".join(character if character.isprintable() else "?" for character in cut)


ERRORS = (RefusedError, BodyTooLargeError, NotKnown, ConfigurationError, NotReachedError, HTTPException)
"""Errors whose text a client may read; whatever else is raised is a fault of ours, and the gate logs it."""
