"""Where a driver finds a running Ray cluster, and which addresses it refuses before Ray connects."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path

import cloudpickle
import grpc
import pytest
import ray
from heads import head

from tidegate.actors.ray import connection
from tidegate.actors.ray.connection import check_runtime_env, cluster_of_this_user, connect
from tidegate.actors.ray.ray_job import share_modules_by_value
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
        pytest.raises(ConfigurationError, match="it requires another token than this user's"),
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
    assert f"'{other}' is not an address of the Ray cluster at {own}" in str(refused.value)


def test_a_wrong_runtime_environment_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray would ignore an unknown name; plugins may have any. What Ray refuses is refused with its reason."""
    check_runtime_env({"env_vars": {"A": "b"}, "working_dir": str(tmp_path), "pip": ["numpy"]})
    with pytest.raises(ConfigurationError, match=r"runtime_env: Ray has no field envvars; give one of .*env_vars"):
        check_runtime_env({"envvars": {"A": "b"}})
    with pytest.raises(ConfigurationError, match=r"runtime_env: Ray has no field 1, pips; give one of"):
        check_runtime_env({1: 2, "pips": []})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"runtime_env: runtime_env\['env_vars'\] must be of type"):
        check_runtime_env({"env_vars": {"A": 1}})
    with pytest.raises(ConfigurationError, match=r"runtime_env: .*is not a valid path"):
        check_runtime_env({"working_dir": str(tmp_path / "none")})
    with pytest.raises(ConfigurationError, match=r"runtime_env='env.yaml' is not a mapping; give one such as"):
        connect(None, runtime_env="env.yaml")  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", "[]")
    check_runtime_env({"of_a_plugin": 1})


def test_a_connected_process_takes_no_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have no effect on a connection that is made already."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(connection, "check_same_cluster", lambda address: None)
    with pytest.raises(ConfigurationError, match=r"connected to Ray already. Give it to ray\.init"):
        connect(None, runtime_env={"env_vars": {"A": "b"}})


def test_ray_pickles_by_value_what_cloudpickle_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has a registry of its own: a module of `tidegate run FILE.py:FUNC` does not exist in other processes."""
    module = types.ModuleType("of_a_file")
    exec("def function():\n    return 7", module.__dict__)
    monkeypatch.setitem(sys.modules, "of_a_file", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert b"of_a_file" in ray.cloudpickle.dumps(module.function)
        share_modules_by_value()
        pickled = ray.cloudpickle.dumps(module.function)
        monkeypatch.delitem(sys.modules, "of_a_file")
        assert pickle.loads(pickled)() == 7
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        ray.cloudpickle.unregister_pickle_by_value(module)
