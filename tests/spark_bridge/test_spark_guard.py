"""A job in Spark's executors ends with Spark, and Ray is not started where that cannot work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from fake_spark import FakeContext, fake_context
from pyspark.sql import SparkSession

from tidegate.spark_bridge import ray_on_spark
from tidegate.spark_bridge.ray_on_spark import RayOnSparkSession, SparkGuard
from tidegate.spark_bridge.spark_calls import EXECUTOR_TIMEOUT
from tidegate.storage.errors import ConfigurationError


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeContext]:
    """A session whose driver lives, on a cluster."""
    monkeypatch.setattr(ray_on_spark, "LOOK_S", 0.001)
    with fake_context() as context:
        yield context


class Failures:
    """What a guard reports."""

    def __init__(self) -> None:
        self.reason = ""
        self._there = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self._there.set()

    def wait(self) -> str:
        """The reason, once there is one."""
        assert self._there.wait(240)
        return self.reason


def session_of(context: FakeContext, master: str) -> Any:
    """A SparkSession over a context that is none."""
    context.master = master  # type: ignore[attr-defined]
    session: Any = SparkSession.__new__(SparkSession)
    session._sc = context
    return session


def test_a_driver_that_is_killed_ends_the_job(context: FakeContext) -> None:
    """The reason says what has become of it, and how to go on."""
    guard, failures = SparkGuard(context), Failures()  # type: ignore[arg-type]
    guard.start(failures)
    context.kill_driver()
    reason = failures.wait()
    assert "Spark is lost: Spark's driver (Java process" in reason
    assert "ended, by SIGKILL" in reason
    assert 'restore="latest"' in reason
    assert guard.wait(240)
    assert guard.complete


def test_a_session_that_is_stopped_ends_the_job(context: FakeContext) -> None:
    """Also where its process lives on."""
    guard, failures = SparkGuard(context), Failures()  # type: ignore[arg-type]
    guard.start(failures)
    context.stopped = True
    assert "the Spark session was stopped" in failures.wait()


def test_without_executors_the_job_ends(context: FakeContext) -> None:
    """After the time that Spark's configuration allows."""
    context.settings[EXECUTOR_TIMEOUT] = "1ms"
    guard, failures = SparkGuard(context), Failures()  # type: ignore[arg-type]
    guard.start(failures)
    context.executors = 0
    assert "Spark has had no executor for" in failures.wait()


def test_a_job_that_is_over_is_not_guarded(context: FakeContext) -> None:
    """Spark may go then."""
    guard, failures = SparkGuard(context), Failures()  # type: ignore[arg-type]
    guard.start(failures)
    guard.job_ended("finished")
    assert guard.wait(240)
    context.kill_driver()
    assert failures.reason == ""


@pytest.mark.parametrize(
    ("master", "settings", "text"),
    [
        ("local[*]", {}, "runs in the driver alone"),
        ("spark://a:7077", {"spark.dynamicAllocation.enabled": "true"}, "releases them"),
    ],
)
def test_a_spark_without_room_for_ray_is_refused(
    context: FakeContext, monkeypatch: pytest.MonkeyPatch, master: str, settings: dict[str, str], text: str
) -> None:
    """Before anything starts."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    context.settings |= settings
    context.getConf().get("x")
    with pytest.raises(ConfigurationError, match=text):
        RayOnSparkSession.start(session_of(context, master))


def test_a_ray_that_is_connected_is_refused(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ConfigurationError, match="connected to Ray already"):
        RayOnSparkSession.start(session_of(context, "spark://a:7077"))


def test_a_session_that_is_gone_is_refused(context: FakeContext) -> None:
    """And what is none."""
    context.kill_driver()
    with pytest.raises(ConfigurationError, match=r"on_spark: Spark's driver .* has ended"):
        RayOnSparkSession.start(session_of(context, "spark://a:7077"))
    with pytest.raises(ConfigurationError, match="give the SparkSession of this process"):
        RayOnSparkSession.start(object())  # type: ignore[arg-type]


def test_what_has_a_parameter_is_not_given_otherwise(context: FakeContext) -> None:
    """Two words for one thing would contradict each other."""
    with pytest.raises(ConfigurationError, match="num_cpus_worker_node in cluster_options is set by executors="):
        RayOnSparkSession.start(session_of(context, "yarn"), cluster_options={"num_cpus_worker_node": 2})
