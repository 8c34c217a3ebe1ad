"""The token that a Ray cluster asks for: where it is, whether Ray sends it, and who may read it.

This module loads Ray only where its settings must be read again: whether Ray sends a token is settled by the
environment before Ray is loaded.

Rules:

- Ray keeps its token in `RAY_AUTH_TOKEN`, in the file `RAY_AUTH_TOKEN_PATH`, or in `~/.ray/auth_token`, and sends it
  only in token mode, which it does not switch on for an address that was named. Where there is a token, we do, unless
  the cluster answers without one: in token mode this process would refuse that cluster's own calls, and Ray would take
  its actors for those of a process that is gone.
- A file with a token is a file of this user's or root's, no link, and nobody else may write to it. One that others may
  only read is closed to them. Ray itself makes the file readable to all users, so before Ray starts a cluster here the
  file is made by us, with mode 0600 in a folder with mode 0700.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import sys
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tidegate.actors.ray.driver.head_probe import probe
from tidegate.storage.errors import ConfigurationError

log = logging.getLogger(__name__)

FILE_MODE, FOLDER_MODE = 0o600, 0o700
TOKEN_BYTES = 32
MODE_VARIABLE, TOKEN_VARIABLE, PATH_VARIABLE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def switch_on_token(environ: MutableMapping[str, str], address: str | None = None) -> None:
    """Have Ray send its token where there is one, and the cluster at an address does not do without.

    Raises ConfigurationError for a file that is not this user's alone.
    """
    if _is_off(environ) or (not environ.get(TOKEN_VARIABLE) and _token_file(environ) is None):
        return
    if _mode(environ):
        return
    if address is not None and answers_without_token(address):
        log.warning("Ray at %s asks for no token: whoever reaches it can run code there", address)
        return
    environ[MODE_VARIABLE] = "token"
    if "ray" in sys.modules:
        # Ray has read its environment already. No public call makes it read the environment again.
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")


def answers_without_token(address: str) -> bool:
    """Returns whether the Ray at "host:port" takes calls without a token. False where it does not answer."""
    try:
        return probe(address).answer == "open"
    except ConfigurationError as error:
        log.debug("whether Ray asks for a token is unknown: %s", error)
        return False


def make_token_file(environ: Mapping[str, str]) -> None:
    """Make the token of a cluster that Ray is about to start here, where this user has none. Closes one that is open.

    Raises ConfigurationError for a file that is not this user's alone.
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
    """Close the file with the token to other users, where Ray uses one. Raises ConfigurationError as above."""
    if not _is_off(environ) and not environ.get(TOKEN_VARIABLE):
        _token_file(environ)


def token_of_this_user(environ: Mapping[str, str]) -> str | None:
    """The token that Ray would send, None if this user has none. Raises ConfigurationError as `switch_on_token`."""
    if token := environ.get(TOKEN_VARIABLE):
        return token
    path = _token_file(environ)
    return None if path is None else Path(path).read_text().strip() or None


def token_that_is_sent(environ: Mapping[str, str]) -> str | None:
    """The token that this process sends: None outside of token mode, and where there is none."""
    return token_of_this_user(environ) if _mode(environ) == "token" else None


def default_token_path() -> str:
    """The file that Ray looks for where none is named."""
    return str(Path.home() / ".ray" / "auth_token")


def _mode(environ: Mapping[str, str]) -> str:
    return environ.get(MODE_VARIABLE, "").strip().lower()


def _is_off(environ: Mapping[str, str]) -> bool:
    return _mode(environ) not in ("", "token")


def _token_file(environ: Mapping[str, str]) -> str | None:
    """The file with the token, if there is one and it is this user's alone."""
    named = environ.get(PATH_VARIABLE)
    path = named or default_token_path()
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if named:
            raise ConfigurationError(f"{PATH_VARIABLE}={named}: there is no such file") from None
        return None
    except OSError as error:
        raise ConfigurationError(f"the token of Ray in {path} cannot be read: {error}") from error
    what = _unfit(status)
    if what is not None:
        raise ConfigurationError(
            f"the token of Ray in {path} is not used, because it {what}, so that another user of this machine could "
            f"have put it there; make it a file of your own with mode 0600, or give the token by {TOKEN_VARIABLE}"
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
