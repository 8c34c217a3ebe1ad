"""Runs Spark actions, and gives them up when nothing can come of them any more.

Rules:
* An action runs in a daemon thread of its own, with the Spark properties of its caller and a job group. Its session is
  the active one there.
* It is given up when the caller's time is over, or when Spark is lost (`spark_watch.py`). Then its jobs are cancelled.
* Whatever happens before and after the action, such as cancelling its jobs, is bounded in time as well.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import InheritableThread, SparkContext
from pyspark.sql import SparkSession

from tidegate.spark_bridge.bounded_calls import Outcome, call_bounded
from tidegate.spark_bridge.errors import SparkLostError, SparkTimeoutError
from tidegate.spark_bridge.spark_watch import END_S, LOOK_S, driver_gone, watched

_logger = logging.getLogger(__name__)

CANCEL_S = 10.0
"""How long cancelling the jobs of an action may take."""

T = TypeVar("T")


class _ActionThread(InheritableThread):
    """Runs an action. Before it does, PySpark copies the caller's properties, which fails if Spark is gone."""

    def __init__(self, outcome: Outcome[Any], name: str) -> None:
        super().__init__(target=outcome.run, name=name, daemon=True)
        self._outcome = outcome

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller by `result`
            self._outcome.fail(error)


def run_spark_action(
    spark: SparkSession, action: Callable[[], T], *, timeout_s: float | None, what: str, job_group: str | None = None
) -> T:
    """Result of a Spark action. `timeout_s` None: it may take as long as Spark has what it needs.

    Its job group is `job_group`, or a new one. Ctrl-C in the caller cancels its jobs too. Raises SparkTimeoutError when
    the time is over, SparkLostError when Spark's driver or all executors are lost, and whatever the action raises.
    """
    context = spark.sparkContext
    group = job_group or f"tidegate-{uuid.uuid4().hex[:12]}"

    def in_group() -> T:
        _activate(spark)
        context.setJobGroup(group, what, interruptOnCancel=True)
        return action()

    with watched(context, what) as watch:
        outcome = Outcome(in_group)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            _ActionThread(outcome, f"tidegate {what}").start()
            while not outcome.wait(LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))):
                if reason := watch.over():
                    raise SparkLostError(reason)
                if deadline is not None and time.monotonic() >= deadline:
                    raise SparkTimeoutError(
                        f"{what} did not end within {timeout_s:g} s; its Spark jobs are cancelled. It had executors: "
                        "allow more time, or give it fewer rows or more executors."
                    )
        except BaseException:
            cancel_jobs(context, group)
            raise
        return outcome.result()


def _activate(spark: SparkSession) -> None:
    """Make a session the active one of this thread.

    Spark reads settings of the active session, such as those of ANSI casts, where an expression is made. Without one a
    new thread has Spark's defaults.
    """
    of_java = getattr(spark, "_get_j_spark_session_class", None)  # PySpark 4.
    jvm: Any = spark.sparkContext._jvm
    java_class = jvm.SparkSession if of_java is None else of_java(jvm)
    java_class.setActiveSession(spark._jsparkSession)


def cancel_jobs(context: SparkContext, group: str) -> None:
    """Cancel the jobs of a group, if Spark answers. Whoever gives them up does not need them to be over."""
    if driver_gone(context):
        return
    try:
        call_bounded(
            lambda: context.cancelJobGroup(group),
            timeout_s=CANCEL_S,
            what="cancelling Spark jobs",
            advice="Is Spark's driver alive?",
        )
    except (SparkTimeoutError, Py4JError, OSError, AttributeError) as error:
        # A context that is stopped meanwhile has lost its attributes, and its jobs with them.
        if driver_gone(context, END_S) is None:
            _logger.warning("the jobs of group %s go on: %s", group, error)
