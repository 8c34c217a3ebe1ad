"""A Spark session without Spark: its driver is a process that does nothing, and its executors are a number."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext

from tidegate.spark_bridge import spark_calls

LOOK_S = 0.001


class FakeJvm:
    """What PySpark reaches in Java: the active session, and levels of loggers."""

    def __init__(self) -> None:
        self.active: Any = None
        self.levels: dict[str, Any] = {}
        self.SparkSession = SimpleNamespace(setActiveSession=self._activate)
        logging = SimpleNamespace(
            LogManager=SimpleNamespace(getLogger=lambda name: SimpleNamespace(getLevel=lambda: self.levels.get(name))),
            Level=SimpleNamespace(OFF="OFF"),
            core=SimpleNamespace(
                config=SimpleNamespace(Configurator=SimpleNamespace(setLevel=self.levels.__setitem__))
            ),
        )
        self.org = SimpleNamespace(apache=SimpleNamespace(logging=SimpleNamespace(log4j=logging)))

    def _activate(self, session: Any) -> None:
        self.active = session


class FakeScalaContext:
    """What Spark's driver says of itself."""

    def __init__(self, context: FakeContext) -> None:
        self._context = context

    def isStopped(self) -> bool:
        """Whether the context was stopped by Spark itself."""
        self._context.answers.wait()
        return self._context.stopped

    def isLocal(self) -> bool:
        """Whether the driver does all the work."""
        return self._context.local

    def getExecutorMemoryStatus(self) -> Any:
        """A map with an entry for each executor, and one for the driver."""
        return SimpleNamespace(size=lambda: self._context.executors + 1)


class FakeContext:
    """A `SparkContext`. While `answers` is not set, calls do not return."""

    def __init__(self, driver: subprocess.Popen[bytes]) -> None:
        self.driver = driver
        self._gateway = SimpleNamespace(proc=driver)
        self._jvm = FakeJvm()
        self.master = "fake"
        self._jsc: Any = SimpleNamespace(sc=lambda: FakeScalaContext(self))
        self.settings: dict[str, str] = {}
        self.executors = 2
        self.local = self.stopped = False
        self.answers = threading.Event()
        self.answers.set()
        self.groups: list[str] = []
        self.cancelled: list[str] = []

    def getConf(self) -> Any:
        """The configuration."""
        return SimpleNamespace(get=self.settings.get)

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool) -> None:
        """Of the actions of a thread."""
        self.groups.append(group)

    def cancelJobGroup(self, group: str) -> None:
        """Ends actions."""
        self.answers.wait()
        self.cancelled.append(group)

    def kill_driver(self) -> None:
        """The Java process is gone."""
        self.driver.kill()
        self.driver.wait()


@contextmanager
def fake_context() -> Iterator[FakeContext]:
    """A session whose driver lives, looked at a thousand times a second."""
    driver = subprocess.Popen(["sleep", "600"])
    context = FakeContext(driver)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spark_calls, "LOOK_S", LOOK_S)
            patch.setattr(spark_calls, "CANCEL_S", 10 * LOOK_S)
            # PySpark keeps the gateway of a real session that has ended in this process, and its threads would use it.
            patch.setattr(SparkContext, "_gateway", None)
            yield context
    finally:
        context.answers.set()
        context.kill_driver()
