"""Bounds the time of calls into Ray and Spark, whatever the cluster does.

A Spark action may never return after an executor's node has died, and neither may `raydp.stop_spark` on a dead cluster.
Rules:
* Every such call runs in a daemon thread of its own, which cannot keep the process alive.
* The caller waits for a bounded time.
* If the call is a Spark action and the time is over, its jobs are cancelled.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from tidegate.spark_bridge.errors import SparkTimeoutError

T = TypeVar("T")


class _Outcome(Generic[T]):
    """What a call in a thread came to: a value or an error, and an event that says it is there."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Body of the thread. Keeps any error for the caller."""
        try:
            self._values.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller by `result`
            self._error = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the call ended within the time."""
        return self._done.wait(timeout_s)

    def result(self) -> T:
        """The value. If the call raised, raises its error in the caller."""
        if self._error is not None:
            raise self._error
        return self._values[0]


def call_bounded(call: Callable[[], T], *, timeout_s: float, what: str, advice: str) -> T:
    """Result of `call`, run in a daemon thread. SparkTimeoutError after `timeout_s` seconds.

    Errors of `call` pass through. After a timeout the thread goes on alone. `what` and `advice` go into the message.
    """
    outcome = _Outcome(call)
    threading.Thread(target=outcome.run, name=f"tidegate {what}", daemon=True).start()
    if not outcome.wait(timeout_s):
        raise SparkTimeoutError(f"{what} did not end within {timeout_s:g} s. {advice}")
    return outcome.result()


def run_spark_action(
    spark: SparkSession, action: Callable[[], T], *, timeout_s: float, what: str, job_group: str | None = None
) -> T:
    """Result of a Spark action. After `timeout_s` seconds its jobs are cancelled: SparkTimeoutError.

    The action runs in a thread with the caller's Spark properties. Its job group is `job_group`, or a new one. Ctrl-C
    in the caller cancels the jobs too.
    """
    group = job_group or f"tidegate-{uuid.uuid4().hex[:12]}"
    context = spark.sparkContext

    def in_group() -> T:
        context.setJobGroup(group, what, interruptOnCancel=True)
        return action()

    outcome = _Outcome(in_group)
    InheritableThread(target=outcome.run, name=f"tidegate {what}", daemon=True).start()
    try:
        ended = outcome.wait(timeout_s)
    except BaseException:
        context.cancelJobGroup(group)
        raise
    if not ended:
        context.cancelJobGroup(group)
        raise SparkTimeoutError(
            f"{what} did not end within {timeout_s:g} s; its Spark jobs are cancelled. Check that the "
            "executors are alive (a lost node leaves Spark actions waiting), or allow more time."
        )
    return outcome.result()
