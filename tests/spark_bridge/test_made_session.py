"""The SparkSession that a configuration asks for: a master that cannot be reached is reported before Spark starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import tidegate as tg
from tidegate.spark_bridge.program_session import check_master
from tidegate.storage.errors import ConfigurationError


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of something that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    """A port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("form", ["spark://127.0.0.1:{}", "k8s://https://127.0.0.1:{}", "k8s://127.0.0.1:{}"])
def test_a_dead_master_is_named(form: str, closed: int) -> None:
    """With the reason, and the setting to correct."""
    master = form.format(closed)
    with pytest.raises(ConfigurationError, match=rf"{master} cannot be reached .*refused.*correct spark\.master"):
        check_master(master)


def test_one_living_master_of_several_is_enough(closed: int, listening: int) -> None:
    """As Spark itself takes the one that answers."""
    check_master(f"spark://127.0.0.1:{closed},127.0.0.1:{listening}")
    with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{closed}: .*; 127\.0\.0\.1:{closed}: "):
        check_master(f"spark://127.0.0.1:{closed},127.0.0.1:{closed}")


def test_a_name_that_is_not_resolved_in_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving a name has no limit of its own."""
    monkeypatch.setattr("tidegate.spark_bridge.program_session.REACH_TIMEOUT_S", 0.05)
    waiting = socket.socketpair()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: waiting[0].recv(1))
    with pytest.raises(ConfigurationError, match=r"no answer within 0\.05 s"):
        check_master("spark://nowhere:7077")
    for end in waiting:
        end.close()


@pytest.mark.parametrize("master", ["spark://host", "spark://host:x", "spark://a:7077,", "k8s://https://host"])
def test_an_address_without_a_port_is_refused(master: str) -> None:
    """Spark itself fails with a trace."""
    with pytest.raises(ConfigurationError, match="host:port is needed"):
        check_master(master)


@pytest.mark.parametrize("master", ["", "local", "local[2]", "local-cluster[1,1,1024]", "yarn"])
def test_a_master_without_an_address_is_not_checked(master: str) -> None:
    """Spark finds it by other means."""
    check_master(master)


@pytest.mark.slow
def test_no_java_starts_for_a_dead_master(closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_config` reports it at once, and Spark Connect too, whether its address is alive or not."""
    monkeypatch.setattr("tidegate.spark_bridge.program_session.ensure_java", lambda: pytest.fail("too late"))
    # Tests on Ray and Spark that ran in this process before may have left it connected, and their session active.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    target = {"execution.target": "on_spark"}
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        tg.StreamEnvironment.from_config(target | {"spark.master": f"spark://127.0.0.1:{closed}"})
    with pytest.raises(ConfigurationError, match="Spark Connect is not supported"):
        tg.StreamEnvironment.from_config(target | {"spark.remote": f"sc://127.0.0.1:{closed}"})
    monkeypatch.setenv("SPARK_REMOTE", f"sc://127.0.0.1:{closed}")
    with pytest.raises(ConfigurationError, match=r"SPARK_REMOTE='sc://127\.0\.0\.1"):
        tg.StreamEnvironment.from_config(target)


_PROGRAM = """
from tidegate.spark_bridge import spark_session
spark = spark_session("quiet", {"spark.master": "local[1]", "spark.ui.enabled": "false"})
print(spark.range(3).count(), spark.sparkContext.appName)
"""


@pytest.mark.slow
def test_spark_starts_without_notices() -> None:
    """No NativeCodeLoader, no note on Java's options, and no hint at log levels."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 quiet\n", "")
