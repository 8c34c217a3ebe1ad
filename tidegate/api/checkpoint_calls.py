"""`CheckpointCalls` calls the function of `Stream.for_each_checkpoint` in the driver, once for each checkpoint with
rows.

The job writes the rows to a table, and each checkpoint commits its rows. `StreamEnvironment.execute` creates this
service from a `CheckpointFunction`. One thread of the service reads the log of the table, and pauses the sources of the
job while too many commits wait. The other thread calls the function. Both threads use `HandedRows`, which records which
commits wait and which are done.

Rules:

- The function is called with one commit after the other. After a call the commit is marked as done in the table, and
  the next call begins when this mark is durable.
- A call that raises an Exception is repeated a limited number of times, after growing pauses. Any other error of the
  function fails the job at once.
- While more than `max_behind` commits wait, the sources of the job read nothing. They continue once half that number
  waits.
- With Spark, a call fails when Spark's driver or all of its executors are lost, because its actions would never end.
- When the job has ended by itself, all committed rows are still passed to the function. When the job was cancelled, or
  another job has taken over its table, no call begins after the running one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.tables.output_tables import CollectedRows
from tidegate.protocol.failures import error_text, log_failure
from tidegate.storage.argument_checks import check_call, check_runs_at_once
from tidegate.storage.errors import ConfigurationError, FencedError, JobFailedError, StorageError
from tidegate.storage.files.retrying_store import retrying
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.storage.tables.handed_rows import HandedRows, WaitingCommit
from tidegate.storage.tables.table_files import read_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

RETRIES_MAX, BEHIND_MAX = 1_000, 100_000
PAUSE_S_FIRST, PAUSE_S_MAX = 0.5, 60.0
"""First and longest pause, in seconds, before a failed call is repeated with the same rows. Each pause is twice as long
as the one before.
"""
LOOK_S_FIRST, LOOK_S_MAX = 0.02, 0.5
"""Shortest and longest pause, in seconds, between two reads of the table's log. The pause grows while the log has no
new entry.
"""
LEAVE_WAIT_S = 10.0
"""How many seconds the end of a cancelled job waits for a call of the function that is still running."""
_MARK_PAUSES_S = (0.1, 0.4, 1.6, 6.4)

FunctionOfRows = Callable[[Any, int], object]
"""The function that the user passed to `for_each_checkpoint`. Its arguments are the rows of a checkpoint and the id of
the checkpoint.
"""
MakeCall = Callable[[FunctionOfRows, HandedRows, WaitingCommit, str], None]
"""A function that calls the user's function with the rows of one commit.

The string argument describes the call in logs and errors.
"""


@dataclass(frozen=True, slots=True)
class CheckpointFunction:
    """The arguments of `for_each_checkpoint`: the function, how often a failed call is repeated (`retries`), and how
    many commits may wait for the function (`max_behind`). `rows` identifies the table with the rows that the function
    gets.
    """

    fn: FunctionOfRows
    rows: CollectedRows
    retries: int
    max_behind: int

    @property
    def text(self) -> str:
        """Returns the name of the function in logs and errors."""
        return f"for_each_checkpoint (uid {self.rows.uid!r})"


def check_function(fn: object, retries: object, max_behind: object, name: str) -> None:
    """Raises ConfigurationError if `fn` cannot be called as `fn(df, checkpoint_id)`, or if `retries` or `max_behind` is
    out of range.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"{name}: {fn!r} is not a function; give a function that can be called as fn(df, checkpoint_id)"
        )
    check_runs_at_once(fn, f"{name}: fn")
    check_call(fn, name, "df", "checkpoint_id")
    for setting, value, least, most in (
        ("retries", retries, 0, RETRIES_MAX),
        ("max_behind", max_behind, 1, BEHIND_MAX),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigurationError(f"{name}: {setting}={value!r}: give a whole number from {least} to {most:,}")


def check_functions(functions: Sequence[CheckpointFunction], config: CheckpointConfig, *, detached: bool) -> None:
    """Raises ConfigurationError if a job with `for_each_checkpoint` is detached, or deletes its checkpoints when it
    ends. Such a job would outlive the driver that calls the function, or lose rows that wait for the function.
    """
    for function in functions[:1]:
        if detached:
            raise ConfigurationError(
                f"{function.text}: fn is called in the driver, so the job cannot continue without its driver. Remove "
                "detached=True, or write to a table with to_table and read that table elsewhere"
            )
        if config.retention != "retain_on_cancellation":
            raise ConfigurationError(
                f"{function.text}: with retention={config.retention!r} rows that wait for fn would be lost when the "
                'job ends, because its checkpoints are deleted; set retention="retain_on_cancellation"'
            )


def call_with_arrow(fn: FunctionOfRows, rows: HandedRows, commit: WaitingCommit, what: str) -> None:
    """Calls a user's function with the rows of a commit as an Arrow table.

    `what` is not used, but other `MakeCall` functions need it.
    """
    fn(read_files(rows.store, rows.info, commit.files), commit.number)


def calling_with_spark(spark: SparkSession) -> MakeCall:
    """Returns a function that calls the user's function with the rows of a commit as a Spark DataFrame.

    A call raises SparkLostError if Spark is lost.
    """
    from tidegate.spark_bridge import files_to_dataframe
    from tidegate.spark_bridge.spark_calls import run_spark_action

    def call(fn: FunctionOfRows, rows: HandedRows, commit: WaitingCommit, what: str) -> None:
        def with_rows() -> None:
            fn(files_to_dataframe(spark, rows.store.url, rows.info.arrow_schema, commit.files), commit.number)

        run_spark_action(spark, with_rows, timeout_s=None, what=what)

    return call


class CheckpointCalls(DriverService):
    """Calls a function with the rows of each checkpoint, in the driver, while the job runs.

    `make_call` makes a single call.
    """

    def __init__(self, function: CheckpointFunction, job_id: JobId, make_call: MakeCall, open_store: OpenStore) -> None:
        super().__init__(function.text, LEAVE_WAIT_S)
        self._function = function
        self._make_call = make_call
        self._job_id = job_id
        self._open_store = retrying(open_store, self._pause)
        self._rows: HandedRows
        self._job_over = threading.Event()
        self._ended = False
        """True when the log has been read to its end after the job has ended."""

    def start(self, fail: Callable[[str], None]) -> None:
        """Starts the two threads.

        `fail` fails the job with a reason. Raises TidegateError if the log of the table cannot be read.
        """
        self._rows = HandedRows(self._open_store(self._function.rows.url), self._job_id)
        self._look()
        name = f"tidegate-{self._function.rows.uid}"
        self._begin(f"{name}-log", partial(self._guarded, fail, self._follow))
        self._begin(f"{name}-calls", partial(self._guarded, fail, self._call_all))

    def job_ended(self, status: str) -> None:
        """Records that the job has ended with `status`.

        Rows that were committed are still passed to the function, unless the job was cancelled.
        """
        if status == "cancelled":
            self.stop()
        self._job_over.set()

    @property
    def complete(self) -> bool:
        """Returns True if the function has received all committed rows."""
        return not self._rows.waiting()

    def _pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def _guarded(self, fail: Callable[[str], None], action: Callable[[], None]) -> None:
        try:
            action()
        except FencedError as error:
            log.warning("%s: nothing is called any more: %s", self.text, error)
            self.stop()
        except BaseException as error:  # noqa: BLE001 (code of the user: whatever it raises has failed the job)
            reason = str(error) if isinstance(error, JobFailedError) else f"{self.text}: {error_text(error)}"
            log_failure(log, self.text, error)
            fail(reason)
        finally:
            self._release()

    def _release(self) -> None:
        """Lets the sources of the job continue to read.

        Both threads call this method when they end, so that the sources do not stay paused.
        """
        try:
            self._rows.hold(False)
        except StorageError as error:
            log.warning("%s: the mark that holds the job back stays: %s", self.text, error)

    # --- the log --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause_s = LOOK_S_FIRST
        while not self._stopping.is_set():
            over = self._job_over.wait(pause_s)
            pause_s = LOOK_S_FIRST if self._look() else min(2 * pause_s, LOOK_S_MAX)
            if over:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return

    def _look(self) -> bool:
        """Reads new entries of the table's log. Returns whether there were any. Raises FencedError if another job has
        taken over the table.
        """
        found = self._rows.refresh()
        if not self._rows.owned:
            raise FencedError(
                "a newer job has taken over, and makes the pending calls; this job makes no more, so let it end"
            )
        self._hold()
        if found:
            with self._changed:
                self._changed.notify_all()
        return found

    def _hold(self) -> None:
        behind, most = len(self._rows.waiting()), self._function.max_behind
        if behind > most and not self._rows.held:
            log.info("%s: %d checkpoints wait, so the job reads no more input", self.text, behind)
            self._rows.hold(True)
        elif behind <= most // 2:
            self._rows.hold(False)

    # --- the calls ------------------------------------------------------------------------------------------------

    def _call_all(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                ended, waiting = self._ended, self._rows.waiting()
                if not waiting and not ended:
                    self._changed.wait()
                    continue
            if not waiting:
                return
            if self._call(waiting[0]):
                self._mark(waiting[0])
                self._hold()
        left = len(self._rows.waiting())
        if left:
            log.warning(
                "%s: %d checkpoints still wait; a job that is restored from this one hands them out",
                self.text, left,
            )  # fmt: skip

    def _call(self, commit: WaitingCommit) -> bool:
        """Calls the function with the rows of a commit until it succeeds. Returns False if the service was stopped
        before it succeeded.

        Raises JobFailedError after the last retry.
        """
        calls, pause_s = 0, PAUSE_S_FIRST
        what = f"{self.text}: checkpoint {commit.number}"
        while not self._stopping.is_set():
            calls += 1
            try:
                self._make_call(self._function.fn, self._rows, commit, what)
            except BaseException as error:
                if self._stopping.is_set():
                    log_failure(log, f"{what}, while the job was being cancelled", error)
                    return False
                if calls > self._function.retries or not isinstance(error, Exception):
                    times = "once" if calls == 1 else f"{calls} times"
                    raise JobFailedError(
                        f"{what}: fn was called {times}, and failed: {error_text(error)}"
                        '. Correct fn, and execute the job again with restore="latest"'
                    ) from error
                log_failure(log, f"{what}: fn failed, and is called again in {pause_s:g} s", error)
            else:
                return True
            self._pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        return False

    def _mark(self, commit: WaitingCommit) -> None:
        """Records in the table that the function has received a commit.

        After a StorageError it is unknown whether that was recorded, so it is tried again.
        """
        for pause_s in (*_MARK_PAUSES_S, None):
            try:
                self._rows.done(commit)
            except StorageError as error:
                if pause_s is None:
                    raise
                log.warning("%s: checkpoint %d is marked again: %s", self.text, commit.number, error)
                self._pause(pause_s)
            else:
                return
