"""Warns when whoever reaches the ports of a Ray cluster can run code there.

Rules: Ray runs what it is sent, so without a token a port that others reach is theirs. On loopback only users of this
machine reach it, and nothing is said. Elsewhere one warning a process says what is open and what to do; it is no error,
because a network may be closed by other means.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Mapping

_TOKEN = "token"
_warned = False

_logger = logging.getLogger(__name__)


def is_on_spark() -> bool:
    """Whether the Ray cluster of this driver was started in Spark executors by `ray.util.spark`."""
    module = sys.modules.get("ray.util.spark.cluster_init")
    return getattr(module, "_active_ray_cluster", None) is not None


def warn_if_open(address: str, environ: Mapping[str, str], *, on_spark: bool = False) -> None:
    """Warn, once a process, where Ray listens at an address that others may reach, and asks for no token.

    `address` is that of Ray's head node, with or without a port; `on_spark`: whether its nodes run in Spark executors.
    """
    global _warned
    reason = why_open(address, environ, on_spark=on_spark)
    if reason is not None and not _warned:
        _warned = True
        _logger.warning(
            "Ray at %s runs code for everybody who can reach its ports: %s. Set RAY_AUTH_MODE=token and one token on "
            "all nodes, or see that nobody else reaches them (docs/security.md)",
            address,
            reason,
        )


def why_open(address: str, environ: Mapping[str, str], *, on_spark: bool = False) -> str | None:
    """Why no token keeps others out of Ray at an address; None where one does, or only this machine reaches it."""
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
