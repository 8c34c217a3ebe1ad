"""Bounds the time of calls into Ray and Spark, whatever the cluster does.

`raydp.stop_spark` may never return on a dead cluster, for example. Rules:
* Every such call runs in a daemon thread of its own, which cannot keep the process alive.
* The caller waits for a bounded time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tidegate.spark_bridge.errors import SparkTimeoutError

T = TypeVar("T")


class Outcome(Generic[T]):
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

    def fail(self, error: BaseException) -> None:
        """The thread could not even begin with the call."""
        self._error = error
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
    outcome = Outcome(call)
    threading.Thread(target=outcome.run, name=f"tidegate {what}", daemon=True).start()
    if not outcome.wait(timeout_s):
        raise SparkTimeoutError(f"{what} did not end within {timeout_s:g} s. {advice}")
    return outcome.result()
