"""Where a driver finds a running Ray cluster, and which addresses it refuses before Ray connects."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import ray
from heads import head

from tidegate.actors.runtimes.ray.driver import connection
from tidegate.actors.runtimes.ray.driver.connection import cluster_of_this_user, connect
from tidegate.storage.errors import ConfigurationError


def process(processes: Path, number: int, *words: str) -> None:
    """An entry of `/proc`."""
    (processes / str(number)).mkdir()
    (processes / str(number) / "cmdline").write_bytes("\0".join(words).encode() + b"\0")


def test_the_one_cluster_of_this_user_is_found(tmp_path: Path) -> None:
    """By the processes that each of its nodes has."""
    process(tmp_path, 1, "/bin/sh", "--gcs-address=10.0.0.9:1")
    for number in (2, 3):
        process(tmp_path, number, "/x/ray/raylet", "--raylet_socket=y", "--gcs-address=10.0.0.1:6379")
    (tmp_path / "4").mkdir()
    assert cluster_of_this_user(tmp_path) == "10.0.0.1:6379"
    process(tmp_path, 5, "raylet", "--gcs-address=10.0.0.1:7000")
    with pytest.raises(
        ConfigurationError, match=r"several Ray clusters.*10\.0\.0\.1:6379, 10\.0\.0\.1:7000.*--address"
    ):
        cluster_of_this_user(tmp_path)


def test_where_no_cluster_runs_one_is_told_how_to_name_one(tmp_path: Path) -> None:
    """Also where the only one is that of another user."""
    with pytest.raises(ConfigurationError, match=r"no Ray cluster of this user.*RAY_ADDRESS"):
        cluster_of_this_user(tmp_path)


def test_a_dead_address_is_refused_before_ray_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the call and from the environment; the error names the address and the cause."""
    monkeypatch.delitem(connection.sys.modules, "ray", raising=False)
    with head(grpc.StatusCode.OK) as address:
        pass
    with pytest.raises(ConfigurationError, match=rf"cannot connect to Ray at {address}: connection refused"):
        connect(address)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ConfigurationError, match="name the head of a Ray cluster as host:port"):
        connect()


def test_another_token_is_refused_before_ray_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster asks for a token, and does not take this user's."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    monkeypatch.delitem(connection.sys.modules, "ray", raising=False)
    with (
        head(grpc.StatusCode.UNAUTHENTICATED) as address,
        pytest.raises(ConfigurationError, match="it asks for another token than this user's"),
    ):
        connect(address)


@pytest.mark.slow
def test_a_connected_process_takes_the_address_of_its_own_cluster(plain_ray: None) -> None:
    """In whatever form; that of another cluster is refused, and names both."""
    own = ray.get_runtime_context().gcs_address
    port = own.rpartition(":")[2]
    for address in (None, own, "auto", f"localhost:{port}", f"127.0.0.1:{port}"):
        joined = connect(address)
        assert not joined.owned
        joined.close()
        assert ray.is_initialized()
    with head(grpc.StatusCode.OK) as other, pytest.raises(ConfigurationError) as refused:
        connect(other)
    assert f"'{other}' is not that of the Ray cluster at {own}" in str(refused.value)
