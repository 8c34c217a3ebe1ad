"""`WebOptions`: the address of a web server. Also finds the token that its clients need."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.private_folders import make_private, open_private

PORT = 8081
"""Flink's web UI uses the same port."""
PORTS_TRIED = 17
"""How many ports are tried, starting with the given one."""
TOKEN_VARIABLE = "TIDEGATE_REST_TOKEN"
TOKEN_FILE = "rest_token"
_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")
_TOKEN_FORM = "16 to 200 letters, digits, dots, dashes, _ and ~"


@dataclass(frozen=True, slots=True)
class WebOptions:
    """The address and port of a server.

    `port` 0 means any free port. Otherwise the first free port from `port` on is used.
    """

    port: int = PORT
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port <= 65_535:
            raise ConfigurationError(f"rest.port is {self.port!r}: give a whole number from 0 to 65,535")
        if (
            not isinstance(self.address, str)
            or not self.address
            or not self.address.isprintable()
            or " " in self.address
        ):
            raise ConfigurationError(f"rest.bind-address is {self.address!r}: give the name or the address of a host")

    @property
    def open_to_others(self) -> bool:
        """Returns whether other machines may reach the server. Then every request needs the token."""
        return not is_loopback(self.address)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a host with this name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def token_file() -> Path:
    """Returns the path of the file with the token of this user."""
    return Path.home() / ".tidegate" / TOKEN_FILE


def find_token() -> tuple[str, str]:
    """Returns the token for requests that change a job, and where it is stored, for messages to the user.

    The token is the value of `TIDEGATE_REST_TOKEN`, or else the content of a file of this user, which is created if it
    does not exist. Raises ConfigurationError for a file that other users can read or change.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        if not _TOKEN.fullmatch(token):
            raise ConfigurationError(f"{TOKEN_VARIABLE} is not a valid token: give {_TOKEN_FORM}")
        return token, TOKEN_VARIABLE
    path = token_file()
    try:
        make_private(str(path.parent))
        return _of_file(str(path)), str(path)
    except OSError as error:
        raise ConfigurationError(
            f"the token of the web server cannot be stored in {path}: {error}; set {TOKEN_VARIABLE} instead"
        ) from error


def _of_file(path: str) -> str:
    try:
        with open(path, opener=open_private, encoding="ascii") as file:
            token = file.read().strip()
    except FileNotFoundError:
        # Written under another name first: two processes may begin at once.
        temporary = f"{path}.{secrets.token_hex(8)}"
        with open(temporary, "x", opener=open_private, encoding="ascii") as file:
            file.write(secrets.token_urlsafe(_TOKEN_BYTES))
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
        return _of_file(path)
    except UnicodeDecodeError:
        token = ""
    if not _TOKEN.fullmatch(token):
        raise ConfigurationError(
            f"{path} does not contain a token ({_TOKEN_FORM}): delete the file, and a new token is created"
        )
    return token


def digest_of(token: str) -> bytes:
    """Returns the hash of a token. A server stores only the hash."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def listen(options: WebOptions) -> socket.socket:
    """Returns a listening socket.

    Raises ConfigurationError if the address belongs to another machine or no port is free.
    """
    ports = [0] if options.port == 0 else range(options.port, min(65_536, options.port + PORTS_TRIED))
    problem: OSError | None = None
    for port in ports:
        try:
            return _bound(options.address.strip("[]"), port)
        except OSError as error:
            problem = error
            if not isinstance(error, PermissionError) and "in use" not in str(error).lower():
                break
    raise ConfigurationError(
        f"nothing can listen at {options.address}, port {options.port} (or the next {PORTS_TRIED - 1}): {problem}; "
        "choose others with rest.bind-address and rest.port"
    )


def _bound(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen()
    except OSError:
        found.close()
        raise
    return found


def url_of(listening: socket.socket, options: WebOptions) -> str:
    """Returns the URL for users. For a server that listens on all addresses it has the name of the machine."""
    port = listening.getsockname()[1]
    host = options.address.strip("[]")
    try:
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
    except ValueError:
        pass
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
