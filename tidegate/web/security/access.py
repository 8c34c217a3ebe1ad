"""`Access`: who may do what; pure.

Rules:
- What changes a job needs the token, in the header `Authorization: Bearer ...`: no other site can send it.
- A server on loopback answers who only reads. It asks for the name of a loopback host in the header `Host`, so that no
  site can read it by calling itself this machine.
- A server that other machines reach asks everybody for the token, in the header or, for reading, in the cookie.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from tidegate.web.options import digest_of, is_loopback

COOKIE = "tidegate_rest_token"
READING = ("GET", "HEAD", "OPTIONS")
_CHALLENGE = {"www-authenticate": 'Bearer realm="tidegate"'}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^][:/@\s]+))(?::[0-9]{1,5})?", re.ASCII)
"""A host and, after one colon, a port, with nothing behind it (RFC 9110, section 7.2)."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server. `digest`: of its token."""

    digest: bytes
    open_to_others: bool

    def is_token(self, given: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(digest_of(given), self.digest)

    def refuse_host(self, headers: Mapping[str, str]) -> Refusal | None:
        """Returns why a server on loopback does not answer a request for this host, or None if it does.

        The rule holds for every path, the login included: a site whose name leads to this machine sends its name.
        Names of headers are in small letters.
        """
        if self.open_to_others or is_loopback(host_of(headers.get("host", ""))):
            return None
        return Refusal(400, "this server answers only as a loopback host: use http://127.0.0.1:PORT, or a tunnel to it")

    def refuse(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Returns why a request lacks the right to be answered, or None if it has it.

        Names of headers are in small letters.
        """
        if method in READING and not self.open_to_others:
            return None
        given = _given(headers, cookie=method in READING)
        if given is None:
            return Refusal(401, "the token is needed: send the header 'Authorization: Bearer TOKEN'", _CHALLENGE)
        return None if self.is_token(given) else Refusal(403, "this is not the token of this server")


def host_of(header: str) -> str:
    """Returns the host in the header `Host` without its port, or "" where the header is not a host and a port."""
    found = _HOST.fullmatch(header)
    return "" if found is None else found[1] or found[2]


def _given(headers: Mapping[str, str], *, cookie: bool) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if not cookie:
        return None
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value
