"""Spark actions that end, and those that are given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_spark import FakeContext, fake_context
from pyspark import InheritableThread

from tidegate.spark_bridge.errors import SparkLostError, SparkTimeoutError
from tidegate.spark_bridge.spark_calls import DRIVER_TIMEOUT, EXECUTOR_TIMEOUT, run_spark_action

FOR_EVER = threading.Event()
"""Nobody sets it."""


@pytest.fixture
def context() -> Iterator[FakeContext]:
    """A session whose driver lives."""
    with fake_context() as context:
        yield context


def run(context: FakeContext, action: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """An action in a group of its own."""
    spark: Any = SimpleNamespace(sparkContext=context, _jsparkSession="its session")
    return run_spark_action(spark, action, timeout_s=timeout_s, what="counting", job_group="group")


def test_an_action_gives_its_result(context: FakeContext) -> None:
    """In its job group, with its session as the active one; nothing is cancelled."""
    assert run(context, lambda: 17) == 17
    assert context._jvm.active == "its session"
    assert (context.groups, context.cancelled) == (["group"], [])


def test_an_error_of_an_action_is_raised(context: FakeContext) -> None:
    """As it is."""

    def fail() -> None:
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        run(context, fail)


def test_an_action_that_takes_too_long_is_cancelled(context: FakeContext) -> None:
    """The caller had given it a time."""
    with pytest.raises(SparkTimeoutError, match=r"counting did not end within 0\.002 s"):
        run(context, FOR_EVER.wait, timeout_s=0.002)
    assert context.cancelled == ["group"]


def test_an_action_without_executors_is_given_up(context: FakeContext) -> None:
    """However long its caller would wait. Its jobs are cancelled, so that they do not begin when one comes."""
    context.settings[EXECUTOR_TIMEOUT] = "5ms"
    context.executors = 0
    with pytest.raises(SparkLostError, match="counting was given up: Spark has had no executor"):
        run(context, FOR_EVER.wait)
    assert context.cancelled == ["group"]


def test_an_action_whose_driver_dies_is_given_up(context: FakeContext) -> None:
    """At once, also when its thread hears nothing of that. There is nobody who could cancel its jobs."""

    def killed() -> None:
        context.kill_driver()
        FOR_EVER.wait()

    with pytest.raises(SparkLostError, match=r"counting was given up: Spark's driver .* has ended, by SIGKILL"):
        run(context, killed, timeout_s=600)
    assert context.cancelled == []


@pytest.mark.slow
def test_a_driver_that_does_not_answer_holds_nobody_up(context: FakeContext) -> None:
    """Neither the action nor the cancelling of its jobs."""
    context.settings[DRIVER_TIMEOUT] = "5ms"

    def silent() -> None:
        context.answers.clear()
        FOR_EVER.wait()

    with pytest.raises(SparkLostError, match="counting was given up: Spark's driver has not answered"):
        run(context, silent)


def test_an_action_that_cannot_begin_is_an_error(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark copies the properties of the caller first. What goes wrong there ends the action; nobody waits for it."""

    def fail(self: InheritableThread) -> None:
        raise RuntimeError("no properties")

    monkeypatch.setattr(InheritableThread, "run", fail)
    with pytest.raises(RuntimeError, match="no properties"):
        run(context, lambda: 17)
