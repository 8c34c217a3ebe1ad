"""Tells whether something that waits for Spark can still end: `SparkRules` decides, `SparkWatch` looks.

Spark waits for an executor for as long as it takes, and Python waits for Spark's driver (a Java process) in the same
way. So an action that has lost one of them never ends. Rules:
* If the driver's process has ended, or the session was stopped, it is over at once.
* If the driver has not answered for `driver_s`, it is over.
* If there has been no executor for `executors_s`, it is over. Each executor that registers begins that time anew.
* As long as there are executors, it may take as long as its caller allows.
* Time counts only while this process runs: one that was stopped for an hour hears the answers first.

`spark.tidegate.executorTimeout` and `spark.tidegate.driverTimeout` in the configuration of Spark set the two times.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext

from tidegate.spark_bridge.bounded_calls import call_bounded
from tidegate.spark_bridge.errors import SparkLostError, SparkTimeoutError
from tidegate.storage.units import parse_duration_ms

EXECUTOR_TIMEOUT, DRIVER_TIMEOUT = "spark.tidegate.executorTimeout", "spark.tidegate.driverTimeout"
EXECUTOR_TIMEOUT_DEFAULT, DRIVER_TIMEOUT_DEFAULT = "2min", "1min"
LOOK_S = 1.0
"""Seconds between two looks at Spark."""
STEP_S_MAX = 5.0
"""What two looks can be apart while this process runs: more than that does not count."""
END_S = 2.0
"""A connection breaks a moment before the process at its other end is seen to have ended."""

_NEW_SESSION = '. Close the environment, and execute the job again in a new one with restore="latest"'


_SESSION_STOPPED = "the Spark session was stopped"


@dataclass(frozen=True, slots=True)
class SparkLimits:
    """How long Spark may be without what it needs. `executors_s` None: for as long as it takes."""

    driver_s: float
    executors_s: float | None


@dataclass(frozen=True, slots=True)
class SparkLook:
    """What Spark's driver has said. `executors` None: Spark runs in the driver's process alone, and needs none."""

    executors: int | None
    stopped: bool = False


class SparkRules:
    """Whether something that waits for Spark can still end. It has no clock: `now_s` comes from outside."""

    def __init__(self, limits: SparkLimits, now_s: float) -> None:
        self._limits = limits
        self._now_s = now_s
        self._silent_s = 0.0
        self._without_executors_s = 0.0

    def over(self, now_s: float, answer: SparkLook | None) -> str | None:
        """Why it cannot end any more; None while it can. `answer`: what Spark has said since the last call."""
        self._silent_s += min(max(0.0, now_s - self._now_s), STEP_S_MAX)
        self._now_s = now_s
        if answer is None:
            if self._silent_s <= self._limits.driver_s:
                return None
            return (
                f"Spark's driver has not answered for {self._limits.driver_s:g} s ({DRIVER_TIMEOUT}). Is its Java "
                "process stopped, or short of memory?"
            )
        passed_s, self._silent_s = self._silent_s, 0.0
        if answer.stopped:
            return _SESSION_STOPPED
        if answer.executors != 0 or self._limits.executors_s is None:
            self._without_executors_s = 0.0
            return None
        self._without_executors_s += passed_s
        if self._without_executors_s <= self._limits.executors_s:
            return None
        return (
            f"Spark has had no executor for {self._limits.executors_s:g} s ({EXECUTOR_TIMEOUT}). Executors that died "
            "were not replaced: has the cluster room for them, and does their Java start?"
        )


class SparkWatch:
    """Looks at a Spark session from a thread of its own, from the first question on, until it is closed."""

    def __init__(self, context: SparkContext, *, needs_executors: bool, clock: Callable[[], float] = time.monotonic):
        """`needs_executors`: whether it matters that there is none."""
        self._context = context
        self._needs_executors = needs_executors
        self._clock = clock
        self._rules: SparkRules | None = None
        self._answer: SparkLook | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Ask Spark for the first time, and wait for the answer. SparkLostError if there is none."""
        if gone := driver_gone(self._context):
            raise SparkLostError(gone)
        default_s = parse_duration_ms(DRIVER_TIMEOUT_DEFAULT) / 1_000
        try:
            limits = call_bounded(self._limits, timeout_s=default_s, what="asking Spark", advice="")
        except SparkTimeoutError as error:
            raise SparkLostError(f"Spark's driver has not answered for {default_s:g} s") from error
        except (Py4JError, OSError) as error:
            if gone := driver_gone(self._context, END_S):
                raise SparkLostError(gone) from error
            raise
        self._rules = SparkRules(limits, self._clock())
        threading.Thread(target=self._look_on, name="tidegate looks at Spark", daemon=True).start()

    def over(self) -> str | None:
        """Why what waits for Spark cannot end any more; None while it can. Never waits."""
        assert self._rules is not None, "it was begun"
        if gone := driver_gone(self._context):
            return gone
        with self._lock:
            answer, self._answer = self._answer, None
        return self._rules.over(self._clock(), answer)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _limits(self) -> SparkLimits:
        return limits_of(self._context, self._needs_executors)

    def _look_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                answer = look_at(self._context)
            except (Py4JError, OSError, AttributeError):
                # No answer is what the rules are about. The context loses its attributes when it is stopped.
                continue
            with self._lock:
                self._answer = answer


@contextmanager
def watched(context: SparkContext, what: str, *, needs_executors: bool = True) -> Iterator[SparkWatch]:
    """A watch for the block. An error that comes of a lost driver is raised as SparkLostError, which says `what`."""
    watch = SparkWatch(context, needs_executors=needs_executors)
    try:
        watch.begin()
        yield watch
    except SparkLostError as error:
        advice = _NEW_SESSION if driver_gone(context) else ""
        raise SparkLostError(f"{what} was given up: {error}{advice}") from error
    except Exception as error:
        broken = isinstance(error, Py4JError | OSError | EOFError)
        if gone := driver_gone(context, END_S if broken else 0.0):
            raise SparkLostError(f"{what} was given up: {gone}{_NEW_SESSION}") from error
        raise
    finally:
        watch.close()


def limits_of(context: SparkContext, needs_executors: bool) -> SparkLimits:
    """The limits that Spark's configuration sets. ConfigurationError for a value that is no time."""
    conf = context.getConf()
    driver_s, executors_s = (
        parse_duration_ms(conf.get(key) or default, setting=key) / 1_000
        for key, default in ((DRIVER_TIMEOUT, DRIVER_TIMEOUT_DEFAULT), (EXECUTOR_TIMEOUT, EXECUTOR_TIMEOUT_DEFAULT))
    )
    return SparkLimits(driver_s, executors_s if needs_executors else None)


def look_at(context: SparkContext) -> SparkLook:
    """What Spark's driver says now. Waits for it, for ever if need be."""
    scala: Any = context._jsc.sc()
    if scala.isStopped():
        return SparkLook(0, stopped=True)
    return SparkLook(None if scala.isLocal() else registered_executors(context))


def registered_executors(context: SparkContext) -> int:
    """How many executors Spark's scheduler knows. Its list has the driver too, which is not counted."""
    status = context._jsc.sc().getExecutorMemoryStatus()
    return int(status.size()) - 1


def driver_gone(context: SparkContext, within_s: float = 0.0) -> str | None:
    """What has become of Spark's driver; None if it lives, or goes on living for `within_s`."""
    gateway: Any = context._gateway
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if process is not None:
        try:
            code = process.wait(within_s) if within_s else process.poll()
        except subprocess.TimeoutExpired:
            code = None
        if code is not None:
            return f"Spark's driver (Java process {process.pid}) has ended, {_how(code)}"
    if gateway is None or context._jsc is None:
        return _SESSION_STOPPED
    return None


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
