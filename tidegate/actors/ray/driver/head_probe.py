"""Asks the head of a Ray cluster whether it is there, before Ray itself connects.

Ray retries a dead address for minutes (`ray.init` for more than ten) and reports nothing meanwhile. One call to the
head with a time limit tells within seconds whether something listens there, whether that is the head of a Ray cluster,
whether it asks for a token, and which cluster it is.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass
from typing import Any, Literal

from tidegate.storage.errors import ConfigurationError

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
    """What the head of a cluster has answered."""

    answer: Literal["open", "asks for a token", "unknown"]
    """`unknown`: it listens, and cannot be asked without TLS."""
    cluster: bytes = b""
    """Different for each cluster; empty where it was not answered."""


def refuse_ray_client(address: str | None = None) -> None:
    """Raise ConfigurationError for an address of Ray client, and for a process that is connected by Ray client."""
    if address is not None and address.startswith(_CLIENT):
        raise ConfigurationError(f"address {address!r}: {_NO_CLIENT}")
    if "ray" not in sys.modules:
        return
    import ray.util.client

    if ray.util.client.ray.is_connected():
        raise ConfigurationError(f"this process is connected to Ray by Ray client: {_NO_CLIENT}")


def probe(address: str, token: str | None = None) -> Head:
    """Asks the head at "host:port", with a token or without one. Takes at most `PROBE_TIMEOUT_S`.

    Raises ConfigurationError for what is no "host:port", and where no head of a Ray cluster answers in time.
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
    raise ConfigurationError(f"cannot connect to Ray at {address}: {_why(failure)}")


def _why(failure: Any) -> str:
    import grpc

    details = " ".join(str(failure.details()).split())
    if failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {PROBE_TIMEOUT_S:g} s. Does the head run, and does no firewall stand between?"
    if failure.code() == grpc.StatusCode.UNIMPLEMENTED:
        return (
            "another service listens there. Name the port of the cluster's head (`ray start --head --port`, 6379 by "
            "default), not that of its dashboard, of Ray client or of a node"
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
        raise ConfigurationError(f"cannot connect to Ray at {address}: {error}. Does the head run?") from error
    return Head("unknown")
