"""How Ray's head node is started beside Spark's driver."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray.util.spark import cluster_init, utils

from tidegate.spark_bridge.ray_on_spark import head_waited_for

NAMES = (
    "_RAY_HEAD_STARTUP_TIMEOUT",
    "_RAY_CONNECT_CLUSTER_POLL_PROGRESS_TIMEOUT",
    "_start_ray_head_node",
    "is_port_in_use",
    "get_all_interfaces_ip",
)


@pytest.fixture
def port() -> Iterator[int]:
    """A port where nobody listens."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also of who listens there
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


def test_names_of_ray_are_replaced_for_the_start_alone() -> None:
    """All of them exist in this version of Ray, and are there again afterwards."""
    before = [getattr(cluster_init, name) for name in NAMES]
    with head_waited_for("127.0.0.1", 1.0):
        assert all(now is not old for now, old in zip((getattr(cluster_init, n) for n in NAMES), before, strict=True))
        assert cluster_init.get_all_interfaces_ip() == "127.0.0.1"  # type: ignore[attr-defined]
        assert ray_constants.RAY_LOG_TO_DRIVER is False
    assert [getattr(cluster_init, name) for name in NAMES] == before
    assert ray_constants.RAY_LOG_TO_DRIVER is True


def test_a_head_that_ends_is_not_waited_for(tmp_path: Path, port: int) -> None:
    """Its last words go into Ray's error."""
    command = [sys.executable, "-c", "print('no room'); exit(3)", f"--temp-dir={tmp_path}"]
    with head_waited_for("127.0.0.1", 600.0):
        process, tail = cluster_init._start_ray_head_node(command, False, {"A": "b"})
        assert not cluster_init.is_port_in_use("127.0.0.1", port)  # type: ignore[attr-defined]
    assert process.wait() == 3
    assert "failed with return code 3" in utils.gen_cmd_exec_failure_msg(["ray"], 3, tail)
    assert "no room" in utils.gen_cmd_exec_failure_msg(["ray"], 3, tail)


def test_a_head_is_waited_for_until_it_answers(tmp_path: Path, port: int) -> None:
    """However long it takes; it has the environment that Ray gives it, and a group of its own."""
    program = (
        "import os, socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
        "s.bind(('127.0.0.1', int(os.environ['THE_PORT']))); s.listen(); assert os.getpgid(0) == os.getpid();"
        "s.accept(); s.accept()"
    )
    command = [sys.executable, "-c", program, f"--temp-dir={tmp_path}"]
    with head_waited_for("127.0.0.1", 600.0):
        process, _ = cluster_init._start_ray_head_node(command, False, {"THE_PORT": str(port)})
        assert cluster_init.is_port_in_use("127.0.0.1", port)  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", port)):
        assert process.wait() == 0


def test_a_head_that_never_answers_is_given_up(tmp_path: Path, port: int) -> None:
    """When the time of the caller is over."""
    command = ["sleep", "600", f"--temp-dir={tmp_path}"]
    with head_waited_for("127.0.0.1", 0.0):
        process, _ = cluster_init._start_ray_head_node(command, False, {})
        answered = cluster_init.is_port_in_use("127.0.0.1", port)  # type: ignore[attr-defined]
        process.kill()
    assert not answered
