"""Authenticates this process at a Ray cluster: finds its token, probes the head, and warns if Ray requires no token.

This module imports Ray only where its settings must be read again: Ray's environment decides whether Ray sends a token,
and must be complete before Ray is imported. Rules:

- Ray reads its token from `RAY_AUTH_TOKEN`, from the file `RAY_AUTH_TOKEN_PATH`, or from `~/.ray/auth_token`. Ray sends
  it only in token mode, and does not switch that mode on for an explicit address. If this user has a token, tidegate
  switches token mode on, unless the cluster answers without one. In token mode this process would refuse the calls of
  such a cluster, and Ray would take its actors for actors of a dead process.
- A token file must belong to this user or to root, must not be a link, and must not be writable for others. If others
  may only read it, tidegate removes their access. Ray itself makes the file readable for all users. So before Ray
  starts a cluster here, tidegate creates the file with mode 0600 in a folder with mode 0700.
- Ray retries a dead address for minutes (`ray.init` for more than ten) and reports nothing meanwhile. `probe` makes one
  call with a time limit. Within seconds it reports whether a Ray head listens there, whether it requires a token, and
  the id of its cluster.
- Ray runs whatever code it receives. So without a token every user who reaches its ports can run code. On loopback only
  users of this machine reach them, and no warning is logged. Elsewhere each process logs one warning. It is not an
  error, because a network may be closed by other means.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)

FILE_MODE, FOLDER_MODE = 0o600, 0o700
TOKEN_BYTES = 32
MODE_VARIABLE, TOKEN_VARIABLE, PATH_VARIABLE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def switch_on_token(environ: MutableMapping[str, str], address: str | None = None) -> None:
    """Makes Ray send its token if there is one, unless the cluster at `address` works without a token.

    `environ` is changed. Raises ConfigurationError for a token file that other users could have written.
    """
    if _is_off(environ) or (not environ.get(TOKEN_VARIABLE) and _token_file(environ) is None):
        return
    if _mode(environ):
        return
    if address is not None and answers_without_token(address):
        log.warning("Ray at %s requires no token: everyone who reaches it can run code there", address)
        return
    environ[MODE_VARIABLE] = "token"
    if "ray" in sys.modules:
        # Ray has read its environment already. No public call makes it read the environment again.
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")


def answers_without_token(address: str) -> bool:
    """Returns whether the Ray at address "host:port" accepts calls without a token. False if it does not answer."""
    try:
        return probe(address).answer == "open"
    except ConfigurationError as error:
        log.debug("Ray does not report whether it requires a token: %s", error)
        return False


def make_token_file(environ: Mapping[str, str]) -> None:
    """Creates the token file of a cluster that Ray is about to start here, if this user has no token.

    An existing token file becomes unreadable for others. Raises ConfigurationError for a token file that other users
    could have written.
    """
    if _is_off(environ) or environ.get(TOKEN_VARIABLE) or _token_file(environ) is not None:
        return
    path = Path(default_token_path())
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except FileExistsError:  # Another process has made it at this moment.
        _token_file(environ)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))


def close_token_file(environ: Mapping[str, str]) -> None:
    """Makes the token file unreadable for other users, if Ray uses one.

    Raises ConfigurationError for a token file that other users could have written.
    """
    if not _is_off(environ) and not environ.get(TOKEN_VARIABLE):
        _token_file(environ)


def token_of_this_user(environ: Mapping[str, str]) -> str | None:
    """Returns the token that Ray would send in token mode, or None if this user has none.

    Raises ConfigurationError for a token file that other users could have written.
    """
    if token := environ.get(TOKEN_VARIABLE):
        return token
    path = _token_file(environ)
    return None if path is None else Path(path).read_text().strip() or None


def token_that_is_sent(environ: Mapping[str, str]) -> str | None:
    """Returns the token that Ray sends from this process, or None without a token or outside of token mode."""
    return token_of_this_user(environ) if _mode(environ) == "token" else None


def default_token_path() -> str:
    """Returns the path of the token file that Ray reads by default."""
    return str(Path.home() / ".ray" / "auth_token")


def _mode(environ: Mapping[str, str]) -> str:
    return environ.get(MODE_VARIABLE, "").strip().lower()


def _is_off(environ: Mapping[str, str]) -> bool:
    return _mode(environ) not in ("", "token")


def _token_file(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the token file, or None if there is none. Makes it unreadable for other users.

    Raises ConfigurationError if other users could have written it.
    """
    named = environ.get(PATH_VARIABLE)
    path = named or default_token_path()
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if named:
            raise ConfigurationError(
                f"{PATH_VARIABLE}={named}: there is no such file; correct the path, or unset the variable"
            ) from None
        return None
    except OSError as error:
        raise ConfigurationError(
            f"the token of Ray in {path} cannot be read: {error}; give this user the right to read the file"
        ) from error
    what = _unfit(status)
    if what is not None:
        raise ConfigurationError(
            f"the token of Ray in {path} is not used, because it {what}, so that another user of this machine could "
            f"have put it there; make it a file of your own with mode 0600, or give the token by {TOKEN_VARIABLE}"
        )
    if stat.S_IMODE(status.st_mode) & ~FILE_MODE and status.st_uid == os.geteuid():
        log.warning("other users could read the token of Ray in %s: its mode is now 0600", path)
        os.chmod(path, FILE_MODE)
    return path


def _unfit(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


PROBE_TIMEOUT_S = 8.0
_HOST_AND_PORT = re.compile(r"([^:/\s]+|\[[^]]+\]):([0-9]{1,5})")
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_CLIENT = "ray://"
_NO_CLIENT = (
    "Ray client (ray://) is not supported, because the program itself must be a process of the cluster: start it on a "
    "machine of the cluster, or by `ray job submit`"
)


@dataclass(frozen=True, slots=True)
class Head:
    """The answer of a Ray cluster's head node to a probe."""

    answer: Literal["open", "asks for a token", "unknown"]
    """"open" without a required token. "unknown" if the head listens, but answers only with TLS."""
    cluster: bytes = b""
    """Id of the cluster. Empty if the head did not report it."""


def refuse_ray_client(address: str | None = None) -> None:
    """Raises ConfigurationError for an address "ray://…", and for a process that is connected by Ray client."""
    if address is not None and address.startswith(_CLIENT):
        raise ConfigurationError(f"address {address!r}: {_NO_CLIENT}")
    if "ray" not in sys.modules:
        return
    import ray.util.client

    if ray.util.client.ray.is_connected():
        raise ConfigurationError(f"this process is connected to Ray by Ray client: {_NO_CLIENT}")


def probe(address: str, token: str | None = None) -> Head:
    """Probes the head node at "host:port", with a token or without one, and returns its answer.

    Takes at most `PROBE_TIMEOUT_S`. Raises ConfigurationError for an address that is not "host:port", and if no head of
    a Ray cluster answers in time.
    """
    place = _HOST_AND_PORT.fullmatch(address)
    if place is None:
        raise ConfigurationError(f"address {address!r}: name the head of a Ray cluster as host:port, such as head:6379")
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false"):
        return _listens(address, place[1].strip("[]"), int(place[2]))
    import grpc

    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        call: Any = channel.unary_unary(_CLUSTER_ID)
        try:
            return Head("open", call(b"", timeout=PROBE_TIMEOUT_S, metadata=metadata))
        except grpc.RpcError as error:
            failure: Any = error
    if failure.code() == grpc.StatusCode.UNAUTHENTICATED:
        return Head("asks for a token")
    raise ConfigurationError(
        f"cannot connect to Ray at {address}: {_why(failure)}; check the address, and that the cluster runs"
    )


def _why(failure: Any) -> str:
    import grpc

    details = " ".join(str(failure.details()).split())
    if failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {PROBE_TIMEOUT_S:g} s. Does the head run, and does no firewall stand between?"
    if failure.code() == grpc.StatusCode.UNIMPLEMENTED:
        return (
            "another service listens there. Name the port of the cluster's head (`ray start --head --port`, 6379 by "
            "default), not the port of its dashboard, of Ray client or of a node"
        )
    if "Connection refused" in details:
        return "connection refused, nothing listens there. Does the head run, and is this its port?"
    if "errors resolving" in details:
        return "the host is unknown"
    return f"{details[:300]}. Does the head of a Ray cluster run there?"


def _listens(address: str, host: str, port: int) -> Head:
    try:
        socket.create_connection((host, port), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"cannot connect to Ray at {address}: {error}. "
            "Start the head with `ray start --head`, or correct the address"
        ) from error
    return Head("unknown")


_TOKEN = "token"
_warned = False


def is_on_spark() -> bool:
    """Returns whether this driver has started a Ray cluster in Spark executors with `ray.util.spark`."""
    module = sys.modules.get("ray.util.spark.cluster_init")
    return getattr(module, "_active_ray_cluster", None) is not None


def warn_if_open(address: str, environ: Mapping[str, str], *, on_spark: bool = False) -> None:
    """Logs a warning, once in a process, if others may reach Ray at an address and Ray requires no token.

    `address` is the address of Ray's head node, with or without a port. `on_spark`: its nodes run in Spark executors.
    """
    global _warned
    reason = why_open(address, environ, on_spark=on_spark)
    if reason is not None and not _warned:
        _warned = True
        log.warning(
            "Ray at %s runs code of everyone who can reach its ports: %s. Set RAY_AUTH_MODE=token and one token on "
            "all nodes, or make sure that only you can reach them (docs/security.md)",
            address,
            reason,
        )


def why_open(address: str, environ: Mapping[str, str], *, on_spark: bool = False) -> str | None:
    """Returns why other users can reach Ray at an address, as text. None if a token prevents that, or if only this
    machine can connect.
    """
    if _is_loopback(address):
        return None
    mode = environ.get("RAY_AUTH_MODE", _TOKEN).strip().lower()
    if mode != _TOKEN:
        return f"RAY_AUTH_MODE is {mode!r}"
    if on_spark and not (environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_TOKEN_PATH")):
        return "Ray on Spark does not pass the token of this process on to the nodes in the executors"
    return None


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("ray://")
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
