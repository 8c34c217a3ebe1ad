"""What Ray is told, so that it has workers started by the fork server (`launch.py`).

Ray replaces the name of Python by a text for the shell. It is the same on all nodes, so the shell there looks up the
Python of its own Ray, and does without the server where this file's folder is missing. Processes that a worker has Ray
start inherit the text: tasks from their coordinator, and what a user's function starts. Where that asks for packages
of its own, it gets its own Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import ray

from tidegate.actors.runtimes.ray.fork_server import launch

_PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")
"""Paths that a shell takes as they are."""
_SAME_PYTHON = {"env_vars", "working_dir", "py_modules", "excludes", "config", "worker_process_setup_hook"}
"""Parts of a runtime environment that leave it to Ray which Python a worker has."""


def actor_options(wanted: bool) -> dict[str, Any]:
    """Options of an actor whose process, and whose actors' processes, are to be forked; none where that cannot be."""
    if not wanted:
        return {}
    command = worker_command(sys.platform, ray.get_runtime_context().runtime_env, launch.__file__, sys.executable)
    return {} if command is None else {"runtime_env": {"py_executable": command}}


def worker_command(platform: str, runtime_env: Mapping[str, Any], file: str, python: str) -> str | None:
    """The text for the shell. `file`: that of `launch.py`. `python`: where Ray's cannot be found out."""
    if platform != "linux" or not runtime_env.keys() <= _SAME_PYTHON or not all(map(_PLAIN.fullmatch, (file, python))):
        return None
    return (
        "$(case $VIRTUAL_ENV$CONDA_PREFIX in */runtime_resources/*) echo python; exit;; esac; "
        r"p=$(tr '\0' '\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'); "
        f'[ -x "$p" ] || p={python}; [ -f {file} ] && echo "$p -I -S {file}" || echo "$p")'
    )
