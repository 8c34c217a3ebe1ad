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
_OURS = "/fork_server/launch.py"
_SAME_PYTHON = {"env_vars", "working_dir", "py_modules", "excludes", "config", "worker_process_setup_hook"}
"""Parts of a runtime environment that leave it to Ray which Python a worker has."""


def actor_options() -> dict[str, Any]:
    """Options of an actor whose process, and whose actors' processes, are to be forked; none where that cannot be."""
    if not_possible() is not None:
        return {}
    return {"runtime_env": {"py_executable": worker_command(launch.__file__, sys.executable)}}


def why_not_forked(environ: Mapping[str, str]) -> str | None:
    """Why this process, which was to be forked, was not; None: it was. `environ`: its own."""
    if launch.USED_BEFORE in environ:
        return None
    if (why_not := environ.get(launch.WHY_NOT)) is not None:
        return why_not
    return not_possible() or "tidegate does not lie here where it lies for the program"


def _environment() -> dict[str, Any]:
    """Parts of the runtime environment of this process that are not ours."""
    found: dict[str, Any] = ray.get_runtime_context().runtime_env
    return {name: value for name, value in found.items() if name != "py_executable" or _OURS not in str(value)}


def not_possible() -> str | None:
    """Why nothing can be forked in this environment; None: Ray is told to."""
    return why_no_command(sys.platform, _environment(), launch.__file__, sys.executable)


def why_no_command(platform: str, runtime_env: Mapping[str, Any], file: str, python: str) -> str | None:
    """Why Ray is told nothing, if it is not. `file`, `python`: as for `worker_command`."""
    if platform != "linux":
        return f"processes are not forked on {platform}"
    if others := sorted(runtime_env.keys() - _SAME_PYTHON):
        return f"the runtime environment of Ray decides by {', '.join(others)} what a process runs"
    if unclear := [path for path in (file, python) if not _PLAIN.fullmatch(path)]:
        return f"a shell does not take the path {unclear[0]!r} as it is"
    return None


def worker_command(file: str, python: str) -> str:
    """The text for the shell. `file`: that of `launch.py`. `python`: where Ray's cannot be found out."""
    return (
        "$(case $VIRTUAL_ENV$CONDA_PREFIX in */runtime_resources/*) echo python; exit;; esac; "
        r"p=$(tr '\0' '\n' < /proc/$RAY_RAYLET_PID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'); "
        f'[ -x "$p" ] || p={python}; [ -f {file} ] && echo "$p -I -S {file}" || echo "$p")'
    )
