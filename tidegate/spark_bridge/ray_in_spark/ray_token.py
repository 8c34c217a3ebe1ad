"""The token of a Ray cluster that runs in Spark's executors: one for driver, head and executors.

Rules:
* A token that this user has is used (`RAY_AUTH_TOKEN`, the file `RAY_AUTH_TOKEN_PATH`, or `~/.ray/auth_token`). Where
  there is none, one is made for this cluster alone, and nothing is written down.
* It is in the environment of this process as long as the cluster lives, because Ray looks for it there.
* Where `RAY_AUTH_MODE` says that there is to be none, there is none.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tidegate.actors.ray.driver.auth_token import token_of_this_user

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_TOKEN_BYTES = 32


def token_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process of the cluster needs; none where the mode is switched off."""
    mode = environ.get(_MODE, "").strip().lower()
    if mode and mode != "token":
        return {_MODE: mode}
    return {_MODE: "token", _TOKEN: token_of_this_user(environ) or secrets.token_hex(_TOKEN_BYTES)}


@contextmanager
def token_of_cluster(environ: MutableMapping[str, str]) -> Iterator[dict[str, str]]:
    """Within this context this process has the token of the cluster. Gives the variables for the other processes."""
    settings = token_settings(environ)
    before = {name: environ.get(name) for name in settings}
    environ.update(settings)
    _read_again()
    try:
        yield settings
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        _read_again()


def environment_of_nodes(token: Mapping[str, str], path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What every node of the cluster gets. `path`: where executors find `ray`; the head looks there after its own."""
    own = [os.path.dirname(sys.executable), environ.get("PATH", "")]
    return {**token, "PATH": os.pathsep.join(entry for entry in (*own, path) if entry)}


def _read_again() -> None:
    """Have Ray read mode and token again; there is no public word for it."""
    if "ray" in sys.modules:
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
