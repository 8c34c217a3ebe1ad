"""Connects a driver to a Ray cluster that runs already: where it is, and the token that it asks for.

This module loads Ray only when it connects: whether Ray sends a token is settled by the environment before that.

Rules:

- The address is the one that was named, else that of `RAY_ADDRESS`, else that of the one cluster whose processes on
  this machine are this user's. Where there are several, nobody guesses.
- Ray keeps its token in `RAY_AUTH_TOKEN`, in the file `RAY_AUTH_TOKEN_PATH`, or in `~/.ray/auth_token`, and sends it
  only in token mode, which it does not switch on for an address that was named. Where there is a token, we do, unless
  the cluster answers without one: in token mode this process would refuse that cluster's own calls, and Ray would take
  its actors for those of a process that is gone.
- A file with a token is a file of this user's or root's, no link, and nobody else may write to it. One that others may
  only read is closed to them: Ray itself leaves it open.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)

FILE_MODE = 0o600
_MODE, _TOKEN, _TOKEN_PATH, _ADDRESS = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FLAG = "--gcs-address="
_ASK_S = 10


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


def connect(address: str | None = None) -> Connection:
    """Connect this process, unless it is connected. ConfigurationError where that cannot be, saying what to do."""
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            if address is not None:
                raise ConfigurationError(f"address {address!r}: this process is connected to Ray already; leave it out")
            return Connection(None, False)
    where = address or os.environ.get(_ADDRESS) or cluster_of_this_user()
    switch_on_token(os.environ, where)
    import ray
    from ray.exceptions import RayError

    from tidegate.actors.runtimes.ray.process.calls import NAMESPACE

    try:
        ray.init(address=where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"cannot connect to Ray at {where}: {' '.join(str(error).split())[:500]}. Does it run, and has "
            f"this user its token ({_TOKEN}, {_TOKEN_PATH} or {_default_token()})?"
        ) from error
    return Connection(where, True)


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


def switch_on_token(environ: MutableMapping[str, str], address: str | None = None) -> None:
    """Have Ray send its token where there is one, and the cluster at an address does not do without.

    ConfigurationError for a file that is not this user's alone.
    """
    mode = environ.get(_MODE, "").strip().lower()
    if mode and mode != "token":
        return
    if not environ.get(_TOKEN) and _token_file(environ) is None:
        return
    if not mode:
        if address is not None and answers_without_token(address):
            log.warning("Ray at %s asks for no token: whoever reaches it can run code there", address)
            return
        environ[_MODE] = "token"
        if "ray" in sys.modules:
            # Ray has read its environment already; there is no public word for reading it again.
            raylet: Any = import_module("ray._raylet")
            raylet.Config.initialize("")


def answers_without_token(address: str) -> bool:
    """Whether the Ray at "host:port" takes calls without a token. Not where it does not answer, or refuses."""
    place = re.fullmatch(r"([^:/]+|\[[^]]+\]):([0-9]+)", address)
    if place is None:
        return False
    raylet: Any = import_module("ray._raylet")
    try:
        # Where nobody listens Ray would try for most of a minute.
        socket.create_connection((place[1].strip("[]"), int(place[2])), _ASK_S).close()
        # The mode is still off, so this call has no token.
        raylet.GcsClient(address=address).internal_kv_exists(b"tidegate", b"tidegate", timeout=_ASK_S)
    except Exception as error:  # noqa: BLE001 (Ray's errors of all kinds; whoever connects then will say what is wrong)
        log.debug("Ray at %s does not answer without a token: %s", address, error)
        return False
    return True


def token_of_this_user(environ: Mapping[str, str]) -> str | None:
    """The token that Ray would send; None if this user has none. ConfigurationError as for `switch_on_token`."""
    if token := environ.get(_TOKEN):
        return token
    path = _token_file(environ)
    return None if path is None else Path(path).read_text().strip() or None


def _token_file(environ: Mapping[str, str]) -> str | None:
    """The file with the token, if there is one and it is this user's alone."""
    named = environ.get(_TOKEN_PATH)
    path = named or _default_token()
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if named:
            raise ConfigurationError(f"{_TOKEN_PATH}={named}: there is no such file") from None
        return None
    except OSError as error:
        raise ConfigurationError(f"the token of Ray in {path} cannot be read: {error}") from error
    what = _unfit(status)
    if what is not None:
        raise ConfigurationError(
            f"the token of Ray in {path} is not used, because it {what}, so that another user of this machine could "
            f"have put it there; make it a file of your own with mode 0600, or give the token by {_TOKEN}"
        )
    if stat.S_IMODE(status.st_mode) & ~FILE_MODE and status.st_uid == os.geteuid():
        log.warning("others could read the token of Ray in %s: it is closed to them now (mode 0600)", path)
        os.chmod(path, FILE_MODE)
    return path


def _unfit(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _default_token() -> str:
    return str(Path.home() / ".ray" / "auth_token")
