"""Which fork server a worker belongs to, and what Ray is told so that it has workers started by it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.actors.runtimes.ray.fork_server import launch
from tidegate.actors.runtimes.ray.fork_server.worker_command import why_no_command, worker_command

SOCKET = "--raylet-name="


def _listening(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen()
    return listening


def test_a_server_is_for_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, packages, folder and Ray tell servers apart, and the job of Ray: its C++ has read that already."""
    arguments, environment = ["worker.py", f"{SOCKET}/ray/raylet"], {"RAY_RAYLET_PID": "7", "RAY_JOB_ID": "1"}

    def path(folder: str = "/site", at: str = "/ray/raylet", **variables: str) -> str | None:
        return launch.socket_path(["worker.py", f"{SOCKET}{at}"], environment | variables, folder)

    assert path() is not None
    assert path() == path(SHLVL="2", PWD="/elsewhere")
    variables = [path(RAY_JOB_ID="2"), path(PYTHONPATH="/mine"), path(RAY_RAYLET_PID="8")]
    here = {path(), *variables, path(folder="/other"), path(at="/ray2/raylet")}
    monkeypatch.chdir(tmp_path)
    assert len(here | {path()}) == 7
    assert path(at="/" + "long" * 30 + "/raylet") is None
    assert launch.socket_path(arguments, {}, "/site") is None


def test_a_node_has_few_servers(tmp_path: Path) -> None:
    """What is left of servers that were killed does not count, and is cleared away."""
    paths = [str(tmp_path / f"{launch.PREFIX}{number}") for number in range(launch.SERVERS_MAX)]
    listening = [_listening(path) for path in paths]
    assert not launch.may_serve(str(tmp_path / f"{launch.PREFIX}new"))
    listening[0].close()
    assert launch.may_serve(str(tmp_path / f"{launch.PREFIX}new"))
    assert not os.path.exists(paths[0])
    for each in listening[1:]:
        each.close()


def test_the_shell_finds_the_python_of_its_own_ray(tmp_path: Path) -> None:
    """It is that of the command with which Ray there starts workers; without this package there is no server."""

    def said(file: str, raylet_says: str, **variables: str) -> str:
        command = worker_command(file, "/given/python")
        ray = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", raylet_says], stdin=subprocess.PIPE
        )
        environment = {"PATH": os.environ["PATH"], "RAY_RAYLET_PID": str(ray.pid), **variables}
        try:
            return subprocess.check_output(["bash", "-c", f"echo {command} x"], env=environment, text=True).strip()
        finally:
            ray.communicate()

    python = f"--python_worker_command={sys.executable} setup.py worker.py"
    assert said(launch.__file__, python) == f"{sys.executable} -I -S {launch.__file__} x"
    assert said("/nowhere/launch.py", python) == f"{sys.executable} x"
    assert said("/nowhere/launch.py", "--other") == "/given/python x"
    assert said(launch.__file__, python, VIRTUAL_ENV="/s/runtime_resources/pip/1/virtualenv") == "python x"


def test_an_environment_with_a_python_of_its_own_has_no_server() -> None:
    """Nor has another system, or a path that a shell would not take as it is."""
    fits = {"env_vars": {"A": "1"}, "working_dir": "."}
    assert why_no_command("linux", fits, "/launch.py", "/python") is None
    for part in ("pip", "conda", "uv", "py_executable", "image_uri", "container"):
        assert f"by {part} what" in str(why_no_command("linux", {part: "x"}, "/launch.py", "/python"))
    assert "darwin" in str(why_no_command("darwin", {}, "/launch.py", "/python"))
    assert "'/with space/launch.py'" in str(why_no_command("linux", {}, "/with space/launch.py", "/python"))
