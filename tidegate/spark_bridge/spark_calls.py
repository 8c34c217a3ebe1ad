"""Calls to Spark and Ray with a time limit, and Spark actions that end when Spark is lost.

`SparkRules` decides whether a call that waits for Spark can still end. `SparkWatch` checks Spark for it. Rules:

* A call runs in a daemon thread, which does not keep the process alive, and the caller waits for a limited time:
  `raydp.stop_spark`, for example, may never return in a dead cluster.
* A Spark action has the Spark properties and the session of its caller, and a job group. When its time limit has
  passed, or Spark is lost, its jobs are cancelled. Cancelling has a time limit, too.
* Spark waits without limit for an executor, and Python for Spark's driver, which is a Java process. So a call that
  needs a lost one would never end. Spark is lost when the driver's process has ended or the session was stopped, when
  the driver has not answered for `driver_s`, or when there has been no executor for `executors_s`. Each executor that
  registers restarts that time. While there are executors, an action may take as long as its caller allows.
* Time counts only while this process runs: a process that was suspended for an hour receives the answers first.

`spark.tidegate.executorTimeout` and `spark.tidegate.driverTimeout` in Spark's configuration set the two times.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import InheritableThread, SparkContext
from pyspark.sql import SparkSession

from tidegate.spark_bridge.errors import SparkLostError, SparkTimeoutError
from tidegate.storage.units import parse_duration_ms

_logger = logging.getLogger(__name__)

CANCEL_S = 10.0
"""Time limit for cancelling the jobs of an action, in seconds."""

T = TypeVar("T")


class _ActionThread(InheritableThread):
    """The thread that runs a Spark action.

    Before the thread starts, PySpark copies the caller's properties, which fails if Spark is gone.
    """

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
    """Returns the result of a Spark action. If `timeout_s` is None, it has no time limit while Spark is alive.

    Its job group is `job_group`, or a new one. Ctrl-C in the caller cancels its jobs, too. Raises SparkTimeoutError
    after the time limit, SparkLostError when Spark's driver or all executors are lost, and the errors of the action.
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
    """Makes a session the active one of this thread.

    When an expression is created, Spark reads settings of the active session, such as the mode of ANSI casts. A new
    thread without an active session would use Spark's defaults.
    """
    of_java = getattr(spark, "_get_j_spark_session_class", None)  # PySpark 4.
    jvm: Any = spark.sparkContext._jvm
    java_class = jvm.SparkSession if of_java is None else of_java(jvm)
    java_class.setActiveSession(spark._jsparkSession)


def cancel_jobs(context: SparkContext, group: str) -> None:
    """Cancels the jobs of a group, if Spark answers. Does not wait until they have ended."""
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
            _logger.warning("the jobs of group %s continue: %s", group, error)


class Outcome(Generic[T]):
    """The result of a call in another thread: a value or an error."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Runs the call in this thread, and stores its value or error."""
        try:
            self._values.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller by `result`
            self._error = error
        finally:
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Stores the error with which the thread could not start the call."""
        self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds. Returns whether the call has ended."""
        return self._done.wait(timeout_s)

    def result(self) -> T:
        """Returns the value of the call, or raises its error."""
        if self._error is not None:
            raise self._error
        return self._values[0]


def call_bounded(call: Callable[[], T], *, timeout_s: float, what: str, advice: str) -> T:
    """Runs `call` in a daemon thread and returns its result. Raises SparkTimeoutError after `timeout_s` seconds.

    Errors of `call` are raised unchanged. After a timeout the thread continues. The message contains `what` and
    `advice`.
    """
    outcome = Outcome(call)
    threading.Thread(target=outcome.run, name=f"tidegate {what}", daemon=True).start()
    if not outcome.wait(timeout_s):
        raise SparkTimeoutError(f"{what} did not end within {timeout_s:g} s. {advice}")
    return outcome.result()


EXECUTOR_TIMEOUT = "spark.tidegate.executorTimeout"
DRIVER_TIMEOUT = "spark.tidegate.driverTimeout"
EXECUTOR_TIMEOUT_DEFAULT = "2min"
DRIVER_TIMEOUT_DEFAULT = "1min"
LOOK_S = 1.0
"""Seconds between two checks of Spark."""
STEP_S_MAX = 5.0
"""Longest time between two checks that counts, in seconds. If more has passed, this process was suspended meanwhile."""
END_S = 2.0
"""How many seconds to wait for the end of a process after its connection has broken, because that happens first."""

_NEW_SESSION = '. Close the environment, and execute the job again in a new one with restore="latest"'


_SESSION_STOPPED = "the Spark session was stopped"


@dataclass(frozen=True, slots=True)
class SparkLimits:
    """Time limits in seconds: how long the driver may be silent, and how long Spark may be without executors.

    `executors_s` is None for no limit.
    """

    driver_s: float
    executors_s: float | None


@dataclass(frozen=True, slots=True)
class SparkLook:
    """An answer of Spark's driver about its state. `executors` is the number of executors, or None if Spark runs only
    in the driver's process.
    """

    executors: int | None
    stopped: bool = False


class SparkRules:
    """Decides whether a call that waits for Spark can still return. It has no clock: the caller passes `now_s`."""

    def __init__(self, limits: SparkLimits, now_s: float) -> None:
        self._limits = limits
        self._now_s = now_s
        self._silent_s = 0.0
        self._without_executors_s = 0.0

    def over(self, now_s: float, answer: SparkLook | None) -> str | None:
        """Returns why a call can no longer return, as text, or None if it can.

        `answer` is the newest answer of Spark's driver since the last call, or None.
        """
        self._silent_s += min(max(0.0, now_s - self._now_s), STEP_S_MAX)
        self._now_s = now_s
        if answer is None:
            if self._silent_s <= self._limits.driver_s:
                return None
            return (
                f"Spark's driver has not answered for {self._limits.driver_s:g} s ({DRIVER_TIMEOUT}). Is its Java "
                "process stopped, or short of memory?"
            )
        passed_s = self._silent_s
        self._silent_s = 0.0
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
    """Checks a Spark session from its own thread, from `begin` until `close`."""

    def __init__(self, context: SparkContext, *, needs_executors: bool) -> None:
        """Creates the watch. `needs_executors`: whether Spark without executors counts as lost."""
        self._context = context
        self._needs_executors = needs_executors
        self._rules: SparkRules | None = None
        self._answer: SparkLook | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Requests the state of Spark for the first time and waits for the answer.

        Raises SparkLostError if there is none.
        """
        if gone := driver_gone(self._context):
            raise SparkLostError(gone)
        default_s = parse_duration_ms(DRIVER_TIMEOUT_DEFAULT) / 1_000
        try:
            limits = call_bounded(self._limits, timeout_s=default_s, what="asking Spark", advice="")
        except SparkTimeoutError as error:
            raise SparkLostError(
                f"Spark's driver has not answered for {default_s:g} s; read its log, and make a new SparkSession"
            ) from error
        except (Py4JError, OSError) as error:
            if gone := driver_gone(self._context, END_S):
                raise SparkLostError(gone) from error
            raise
        self._rules = SparkRules(limits, time.monotonic())
        threading.Thread(target=self._look_on, name="tidegate looks at Spark", daemon=True).start()

    def over(self) -> str | None:
        """Returns why a call to Spark can no longer return, as text, or None if it can. Never waits."""
        assert self._rules is not None, "it was begun"
        if gone := driver_gone(self._context):
            return gone
        with self._lock:
            answer = self._answer
            self._answer = None
        return self._rules.over(time.monotonic(), answer)

    def close(self) -> None:
        """Stops the checks."""
        self._closed.set()

    def _limits(self) -> SparkLimits:
        return limits_of(self._context, self._needs_executors)

    def _look_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                answer = look_at(self._context)
            except (Py4JError, OSError, AttributeError):
                # The rules handle missing answers. A context loses its attributes when it is stopped.
                continue
            with self._lock:
                self._answer = answer


@contextmanager
def watched(context: SparkContext, what: str, *, needs_executors: bool = True) -> Iterator[SparkWatch]:
    """Checks Spark during the block.

    Converts an error that a lost driver has caused to SparkLostError, with `what` in its text.
    """
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
    """Returns the time limits in Spark's configuration. Raises ConfigurationError for an invalid duration."""
    conf = context.getConf()
    driver_s, executors_s = (
        parse_duration_ms(conf.get(key) or default, setting=key) / 1_000
        for key, default in ((DRIVER_TIMEOUT, DRIVER_TIMEOUT_DEFAULT), (EXECUTOR_TIMEOUT, EXECUTOR_TIMEOUT_DEFAULT))
    )
    return SparkLimits(driver_s, executors_s if needs_executors else None)


def look_at(context: SparkContext) -> SparkLook:
    """Requests the state of Spark's driver. Waits for the answer without a time limit."""
    scala: Any = context._jsc.sc()
    if scala.isStopped():
        return SparkLook(0, stopped=True)
    return SparkLook(None if scala.isLocal() else registered_executors(context))


def registered_executors(context: SparkContext) -> int:
    """Returns the number of registered executors, without the driver."""
    status = context._jsc.sc().getExecutorMemoryStatus()
    return int(status.size()) - 1


def driver_gone(context: SparkContext, within_s: float = 0.0) -> str | None:
    """Returns why Spark's driver is gone, or None if it is still alive after `within_s` seconds."""
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


_lock = threading.Lock()
_silenced: Counter[str] = Counter()
_levels: dict[str, object] = {}


@contextmanager
def without_logs_of(context: SparkContext, names: Sequence[str]) -> Iterator[None]:
    """Returns a context that silences some loggers of the JVM.

    Blocks may overlap: the end of the last one restores the level of a logger.
    """
    jvm: Any = context._jvm
    log4j = jvm.org.apache.logging.log4j
    with _lock:
        for name in names:
            if not _silenced[name]:
                _levels[name] = log4j.LogManager.getLogger(name).getLevel()
                log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
            _silenced[name] += 1
    try:
        yield
    finally:
        with _lock:
            for name in names:
                _silenced[name] -= 1
                if not _silenced[name]:
                    log4j.core.config.Configurator.setLevel(name, _levels.pop(name))
