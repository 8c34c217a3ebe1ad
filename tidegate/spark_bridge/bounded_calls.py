"""Makes calls into Ray and Spark end in time, whatever the cluster does.

A Spark action issued after an executor's node died may never return, and neither may `raydp.stop_spark` on a
dead cluster. Rules kept here: every such call runs in a daemon thread of its own (which cannot keep the
process alive); the caller waits for a bounded time; a Spark action that is given up on has its job group
cancelled.
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
    """What a thread left behind: a value or an error, and the signal that it is there."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Body of the thread. The error is kept for the waiting caller."""
        try:
            self._values.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller by `result`
            self._error = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the call has ended within the time."""
        return self._done.wait(timeout_s)

    def result(self) -> T:
        """The value, or the call's own error raised in the caller."""
        if self._error is not None:
            raise self._error
        return self._values[0]


def call_bounded(call: Callable[[], T], *, timeout_s: float, what: str, advice: str) -> T:
    """Result of `call`, run in a daemon thread, or SparkTimeoutError after `timeout_s` seconds.

    Errors of `call` pass through. On a timeout the thread is left behind; the message says `what` did not end
    and gives the `advice`.
    """
    outcome = _Outcome(call)
    threading.Thread(target=outcome.run, name=f"tidegate {what}", daemon=True).start()
    if not outcome.wait(timeout_s):
        raise SparkTimeoutError(f"{what} did not end within {timeout_s:g} s. {advice}")
    return outcome.result()


def run_spark_action(
    spark: SparkSession, action: Callable[[], T], *, timeout_s: float, what: str, job_group: str | None = None
) -> T:
    """Result of a Spark action, or SparkTimeoutError after `timeout_s` seconds with its jobs cancelled.

    The action runs in a thread with the caller's Spark properties and a job group of its own, or in the one that is
    named. An interrupt of the caller (Ctrl-C) cancels the jobs too.
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
