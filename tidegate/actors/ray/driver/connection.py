"""Connects a driver to a Ray cluster that runs already.

This module loads Ray only when it connects: whether Ray sends a token is settled by the environment before that.

Rules:

- The address is the one that was named, else that of `RAY_ADDRESS`, else that of the one cluster whose processes on
  this machine are this user's. Where there are several, nobody guesses.
- A process has one connection. A process that is connected keeps it: an address of the same cluster is accepted, an
  address of another cluster is refused.
- Nothing is left to Ray that Ray would try for minutes: the head is asked first (`head_probe.py`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.actors.ray.driver.auth_token import (
    PATH_VARIABLE,
    TOKEN_VARIABLE,
    close_token_file,
    default_token_path,
    switch_on_token,
    token_that_is_sent,
)
from tidegate.actors.ray.driver.driver_signals import clean_end_at_sigterm
from tidegate.actors.ray.driver.head_probe import probe, refuse_ray_client
from tidegate.storage.errors import ConfigurationError

_ADDRESS = "RAY_ADDRESS"
_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
_FLAG = "--gcs-address="
_FIND, _START_ONE = "auto", "local"


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of this process. `owned`: it was made here, and ends with `close`."""

    address: str | None
    owned: bool

    def close(self) -> None:
        """Disconnect; the cluster goes on."""
        if self.owned:
            import ray

            ray.shutdown()


def connect(
    address: str | None = None, show_log: bool = False, runtime_env: Mapping[str, Any] | None = None
) -> Connection:
    """Connect this process to Ray, unless it is connected.

    `show_log`: print the lines of tidegate's processes, whatever their level, where Ray prints lines of processes here.
    `runtime_env`: that of all processes which this one has Ray start, as with `ray.init`.
    Raises ConfigurationError where no cluster, another cluster or a cluster with another token answers, and for a
    `runtime_env` that Ray does not take, or of a process that is connected already.
    """
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise ConfigurationError(f"runtime_env={runtime_env!r} is not a mapping such as {{'env_vars': {{'A': 'b'}}}}")
    with clean_end_at_sigterm():
        return _connect(address, show_log, dict(runtime_env or {}))


def _connect(address: str | None, show_log: bool, runtime_env: dict[str, Any]) -> Connection:
    if "ray" in sys.modules:
        import ray

        refuse_ray_client(address)
        if ray.is_initialized():
            close_token_file(os.environ)
            check_same_cluster(address)
            if runtime_env:
                raise ConfigurationError(
                    "runtime_env has no effect: this process is connected to Ray already. Give it to ray.init, or do "
                    "not call ray.init, and close the environment that has connected this process"
                )
            _filter_output(show_log)
            return Connection(None, False)
    where = address or os.environ.get(_ADDRESS) or _FIND
    if where == _FIND:
        where = cluster_of_this_user()
    prepare_connection(where)
    import ray
    from ray.exceptions import RayError

    from tidegate.actors.ray.process.calls import NAMESPACE

    check_runtime_env(runtime_env)
    _filter_output(show_log)
    try:
        ray.init(
            address=where,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=runtime_env or None,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"cannot connect to Ray at {where}: {' '.join(str(error).split())[:500]}. Does it run, and has "
            f"this user its token ({TOKEN_VARIABLE}, {PATH_VARIABLE} or {default_token_path()})?"
        ) from error
    return Connection(where, True)


def check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a runtime environment that Ray does not take. A name that Ray lacks is one.

    Ray itself ignores such names with a warning, because they may be those of plugins.
    """
    from ray.runtime_env import RuntimeEnv

    unknown = sorted(map(str, set(runtime_env) - set(RuntimeEnv.known_fields)))
    if unknown and _PLUGINS not in os.environ:
        known = ", ".join(sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_")))
        raise ConfigurationError(f"runtime_env: Ray does not know {', '.join(unknown)}; it knows {known}")
    try:
        RuntimeEnv(**runtime_env)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"runtime_env: {error}") from error


def _filter_output(show_log: bool) -> None:
    # This import loads Ray.
    from tidegate.actors.ray.driver.worker_output import filter_worker_output

    filter_worker_output(show_log)


def prepare_connection(address: str) -> None:
    """Settle whether Ray sends a token to the head at an address, and check that the head takes it.

    Raises ConfigurationError where no head answers there within seconds, or it asks for another token.
    """
    refuse_ray_client(address)
    if address == _START_ONE:
        return
    probe(address)
    switch_on_token(os.environ, address)
    token = token_that_is_sent(os.environ)
    if probe(address, token).answer == "asks for a token":
        which = "a token, and this user has none" if token is None else "another token than this user's"
        raise ConfigurationError(
            f"cannot connect to Ray at {address}: it asks for {which} ({TOKEN_VARIABLE}, {PATH_VARIABLE} or "
            f"{default_token_path()})"
        )


def check_same_cluster(address: str | None) -> None:
    """Refuse the address of another cluster than the one that this process is connected to. ConfigurationError."""
    import ray

    own = ray.get_runtime_context().gcs_address
    if address is None or address in (own, _FIND):
        return
    token = token_that_is_sent(os.environ)
    given, connected = probe(address, token), probe(own, token)
    if not given.cluster or given.cluster != connected.cluster:
        raise ConfigurationError(
            f"address {address!r} is not that of the Ray cluster at {own}, to which this process is connected: leave "
            "the address out, or call ray.shutdown first"
        )


def cluster_of_this_user(processes: Path = Path("/proc")) -> str:
    """The address of the one Ray cluster of this user on this machine. ConfigurationError for none, or several."""
    found = set()
    for folder in processes.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            own = folder.stat().st_uid == os.geteuid()
        except OSError:
            continue  # It has ended meanwhile, or is not to be read by this user.
        if own and words[0].endswith("raylet"):
            found |= {word.removeprefix(_FLAG) for word in words if word.startswith(_FLAG)}
    if len(found) == 1:
        return found.pop()
    if found:
        raise ConfigurationError(
            f"several Ray clusters of this user run on this machine ({', '.join(sorted(found))}): choose one by "
            f"--address or {_ADDRESS}"
        )
    raise ConfigurationError(
        f"no Ray cluster of this user runs on this machine: name one by --address host:port or {_ADDRESS}"
    )
