"""`SparkGuard`: ends a job on Ray in Spark's executors when Spark is lost, and says so.

Such a job needs Spark for as long as it runs: its processes are in the executors. One executor less is a node of Ray
less, and the job restarts on the others. Without Spark's driver, or without any executor for longer than
`spark.tidegate.executorTimeout`, there is no place left, and none will come: the job would wait for room until its
restart strategy gives up, and nobody would say why.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark import SparkContext

from tidegate.actors.runtimes.companions import Companion
from tidegate.spark_bridge.errors import SparkLostError
from tidegate.spark_bridge.spark_watch import LOOK_S, SparkWatch

LEAVE_S = 10.0


class SparkGuard(Companion):
    """Guards one job."""

    def __init__(self, context: SparkContext) -> None:
        super().__init__("the watch over Spark", LEAVE_S)
        self._context = context

    def start(self, fail: Callable[[str], None]) -> None:
        """Start the thread that looks."""
        self._begin("tidegate guards a job", lambda: self._look(fail))

    def job_ended(self, status: str) -> None:
        """There is nothing to guard any more."""
        self.stop()

    @property
    def complete(self) -> bool:
        """Always."""
        return True

    def _look(self, fail: Callable[[str], None]) -> None:
        watch = SparkWatch(self._context, needs_executors=True)
        try:
            watch.begin()
            while not self._stopping.wait(LOOK_S):
                if reason := watch.over():
                    raise SparkLostError(reason)
        except SparkLostError as error:
            if not self.stopping:
                fail(
                    f"its tasks run in executors of Spark, and Spark is lost: {error}. Its checkpoints stay. Close the "
                    'environment, and execute the job in a new one with restore="latest"'
                )
        finally:
            watch.close()
