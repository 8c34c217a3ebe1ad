"""One run of `chaos.py --spark`: two jobs beside the executors of Spark on Ray, and Spark is struck.

Rules:

- A process is found by what started it: an executor by its actor (Ray knows its process), the driver by PySpark's
  handle. It is killed or stopped by its id.
- The job whose rows are staged must not notice anything: no failure, no restart, rows all the time.
- The job that follows a query of Spark must go on with rows that came after the fault, by itself, as long as Spark's
  driver lives. When that is lost, it must fail, and say so. Then the session is closed and another one begun, in
  which both jobs go on with `restore="latest"`.
- Whatever asks Spark for something ends, well or with an error that says what is lost.
- Every wait has a limit; what takes longer is a hang.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import polars as pl
import ray
from chaos_cluster import end_of
from chaos_job import Plan, reference, rows_came_since, stood_still_ms
from chaos_run import GONE, POLL_S, Fault, Hang, Outcome, Struck
from chaos_spark_jobs import EXECUTORS, STAGING_ROWS, Feeder, Jobs, Received, session, stage_another, start
from common import ENDED

import tidegate as tg
from tidegate.actors.ray.health_endpoint import state_of
from tidegate.spark_bridge import SparkBridgeError
from tidegate.spark_bridge.errors import SparkTimeoutError
from tidegate.spark_bridge.spark_calls import call_bounded, registered_executors

EXECUTOR_NAME = "raydp-executor"
STAGES_S = 1.0
"""An executor is killed so long after a submission at most, while it stages rows."""
WORDS_OF_LOSS = ("Spark's driver", "session was stopped", "SparkContext")

T = TypeVar("T")


@dataclass
class SparkRun:
    """One session after the other, its two jobs, and its faults."""

    plan: Plan
    rng: random.Random
    interval_s: float
    limit_s: float
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._staged = self._part("staged", replace(self.plan, parts=1))
        # How many rows are streamed is not known before the end; one part holds them all.
        self._streamed = self._part("streamed", replace(self.plan, parts=1))
        self._feeder = Feeder(self._streamed)
        self._received = Received()
        self._env: tg.StreamEnvironment
        self._jobs: Jobs
        self.outcome = Outcome(self.plan)
        self._seen: dict[int, str] = {}
        self._stopped: set[int] = set()

    def _part(self, name: str, plan: Plan) -> Plan:
        local = plan.local / name
        local.mkdir()
        return replace(plan, name=f"{plan.name}-{name}", local=local, storage=f"{plan.storage}/{name}")

    def play(self, faults: list[Fault]) -> Outcome:
        """Start the jobs, let the faults strike, end the jobs, and compare."""
        began = time.monotonic()
        try:
            self._start()
            for fault in faults:
                self._strike(fault)
            self._end()
            self._compare()
        except Hang as hang:
            self.outcome.hangs.append(str(hang))
        except (tg.TidegateError, RuntimeError) as error:
            self.outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._close()
            self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # --- jobs -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._env = session(self.plan.standbys)
        self._jobs = self._bounded(
            "starting both jobs",
            lambda: start(self._env, self._staged, self._streamed, self._feeder, self._received),
        )
        self._steady(time.time_ns(), self._feeder.rows)

    def _steady(self, since_ns: int, rows: int) -> None:
        """Both jobs run, staged rows came since a moment, and more than so many streamed ones are in the table."""
        self._until(
            "rows of the staged job",
            lambda: self._running(self._jobs.staged) and rows_came_since(self._staged, since_ns),
        )
        self._until_streamed(rows + 1)

    def _until_streamed(self, rows: int) -> None:
        """So many streamed rows are in the table. On a busy machine that is a matter of time: only none at all hang."""
        table = self._jobs.tables["streamed"]["rows"]
        while (there := table.rows_committed()) < rows:
            self._until(f"more than {there} streamed rows of {rows}", partial(self._more, table, there))
        self._until("the streamed job", lambda: self._running(self._jobs.streamed))

    def _more(self, table: tg.OutputTable, rows: int) -> bool:
        """Whether a table of the streamed job has more rows. JobFailedError if none can come."""
        self._running(self._jobs.streamed)
        return table.rows_committed() > rows

    def _running(self, job: tg.Job) -> bool:
        progress = job.progress()
        if progress.status in ENDED:
            raise tg.JobFailedError(f"{job!r} {progress.status}: {progress.reason}")
        self._seen |= {process.pid: f"{process.task}" for process in job.processes()}
        return progress.status == "running"

    # --- faults ---------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        time.sleep(fault.part * self.interval_s)
        restarts = self._restarts()
        struck = Struck(fault, "", time.time_ns())
        self.outcome.struck.append(struck)
        lost = _STRIKES[fault.kind](self, struck)
        rows, struck_ns = self._feeder.rows, struck.at_ns
        if lost:
            self._tell_of_loss(struck, restarts)
        else:
            self._steady(time.time_ns(), rows)
            self._expect_no_restart(restarts)
        struck.still_ms = stood_still_ms(self._streamed, struck_ns, time.time_ns())
        staged = "" if lost else f", staged ones for {stood_still_ms(self._staged, struck_ns, time.time_ns())} ms"
        self.say(f"  {fault.kind} ({struck.victim}): streamed rows stood still for {struck.still_ms} ms{staged}")
        if not lost:
            self._read()
            self._end_stopped()
            self._until_executors()

    def _restarts(self) -> tuple[int, int]:
        return self._jobs.staged.progress().restarts, self._jobs.streamed.progress().restarts

    def _expect_no_restart(self, before: tuple[int, int]) -> None:
        if (now := self._restarts()) != before:
            self.outcome.problems.append(f"restarts of the staged and the streamed job: {before} before, {now} after")

    def _tell_of_loss(self, struck: Struck, restarts: tuple[int, int]) -> None:
        """The streamed job fails with the cause, the staged one goes on; then another session begins."""
        streamed = self._jobs.streamed
        self._until("the end of the streamed job", lambda: streamed.progress().status in ENDED)
        end = streamed.progress()
        told_s = (time.time_ns() - struck.at_ns) / 1e9
        self.say(f"  after {told_s:.1f} s: {end.status}: {end.reason}")
        if end.status != "failed" or not any(words in str(end.reason) for words in WORDS_OF_LOSS):
            self.outcome.problems.append(f"the streamed job does not say what is lost: {end.status}: {end.reason}")
        since_ns = time.time_ns()
        self._until(
            "rows of the staged job without Spark",
            lambda: self._running(self._jobs.staged) and rows_came_since(self._staged, since_ns),
        )
        if self._jobs.staged.progress().restarts != restarts[0]:
            self.outcome.problems.append("the staged job has restarted")
        self._refuse()
        self._bounded("closing a session that was lost", self._env.close)
        self._start()

    def _refuse(self) -> None:
        """What is asked of a Spark that is lost is refused, and says why."""
        table = self._jobs.tables["streamed"]["rows"]
        try:
            self._bounded("reading a table with Spark", lambda: table.read(self._env.spark))
        except SparkBridgeError as error:
            self.say(f"  reading with Spark: {error}")
        else:
            self.outcome.problems.append("a table was read with a Spark that is lost")

    def _read(self) -> None:
        """Spark reads what the table shows."""
        table = self._jobs.tables["streamed"]["rows"]
        number = table.history()[-1].number
        spark = self._env.spark
        found = self._bounded("reading a table with Spark", lambda: table.read(spark, as_of=number).count())
        if found != (expected := table.to_arrow(as_of=number).num_rows):
            self.outcome.problems.append(f"Spark reads {found} rows of {expected}")

    def _until_executors(self) -> None:
        """As many as in the beginning."""
        context = self._env.spark.sparkContext
        began = time.monotonic()
        self._until(
            f"{EXECUTORS} executors",
            lambda: self._bounded("asking for executors", lambda: registered_executors(context)) >= EXECUTORS,
        )
        self.say(f"  all executors are there {time.monotonic() - began:.1f} s after that")

    def _executors(self) -> list[tuple[str, int]]:
        """Name and process of each executor that lives."""
        table: dict[str, Any] = ray._private.state.actors()
        return sorted(
            (str(actor["Name"]), int(actor["Pid"]))
            for actor in table.values()
            if str(actor["Name"]).startswith(EXECUTOR_NAME)
            and actor["State"] == "ALIVE"
            and state_of(int(actor["Pid"])) not in GONE
        )

    def _end_executors(self, struck: Struck, number: signal.Signals, everyone: bool = False) -> bool:
        self._until("an executor", lambda: bool(self._executors()))
        executors = self._executors()
        victims = executors if everyone else [self.rng.choice(executors)]
        struck.victim = ", ".join(f"{name}, pid {pid}" for name, pid in victims)
        struck.at_ns = time.time_ns()
        for _, pid in victims:
            end_of(pid, number)
            if number == signal.SIGSTOP:
                self._stopped.add(pid)
        return False

    def _end_stopped(self) -> None:
        """RayDP tells an executor that is lost to end, and one that is stopped does not hear it."""
        for pid in self._stopped:
            end_of(pid, signal.SIGKILL)
        self._stopped.clear()

    def _while_staging(self, struck: Struck) -> bool:
        """A DataFrame is staged for another job meanwhile; that job has all rows, once."""

        def strike() -> None:
            time.sleep(after_s)
            self._end_executors(struck, signal.SIGKILL)

        after_s = self.rng.random() * STAGES_S
        thread = threading.Thread(target=strike, daemon=True)
        thread.start()
        ids = self._bounded("staging for another job", lambda: stage_another(self._jobs, self._staged))
        thread.join(self.limit_s)
        expected = pl.DataFrame({"id": range(STAGING_ROWS)}, schema={"id": pl.Int64})
        self.outcome.note("another", pl.DataFrame({"id": ids}, schema={"id": pl.Int64}), expected, self.say)
        return False

    def _driver(self, struck: Struck) -> bool:
        gateway: Any = self._env.spark.sparkContext._gateway
        struck.victim = f"pid {gateway.proc.pid}"
        struck.at_ns = time.time_ns()
        end_of(gateway.proc.pid, signal.SIGKILL)
        return True

    def _session(self, struck: Struck) -> bool:
        struck.victim = "spark.stop()"
        struck.at_ns = time.time_ns()
        self._bounded("stopping Spark", self._env.spark.stop)
        return True

    # --- the end --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._staged.gate.touch()
        self._feeder.stop()
        self._until_streamed(self._feeder.rows)
        savepoint = str(self.plan.local / "savepoints")
        self._bounded("stopping the streamed job", lambda: self._jobs.streamed.stop(savepoint=savepoint))
        for job in (self._jobs.staged, self._jobs.streamed):
            limit_ms = int(self.limit_s * 1_000)
            try:
                job.wait(limit_ms)
            except tg.JobTimeoutError as error:
                raise Hang(str(error)) from error
        self.outcome.end = self._jobs.streamed.progress()

    def _compare(self) -> None:
        for name, plan, rows in (
            ("staged", self._staged, None),
            ("streamed", self._streamed, self._feeder.rows),
        ):
            for table, expected in reference(plan, rows).items():
                found = pl.DataFrame(self._jobs.tables[name][table].to_arrow())
                self.outcome.note(f"{name}/{table}", found, expected, self.say)
        received = pl.DataFrame({"id": self._received.ids}, schema={"id": pl.Int64})
        expected = pl.DataFrame({"id": range(self._feeder.rows)}, schema={"id": pl.Int64})
        self.outcome.note("received", received, expected, self.say)

    def _close(self) -> None:
        self._feeder.stop()
        self._end_stopped()
        if hasattr(self, "_env"):
            try:
                self._bounded("closing the environment", self._env.close)
            except Hang as hang:
                self.outcome.hangs.append(str(hang))
        deadline = time.monotonic() + self.limit_s
        while left := {pid: what for pid, what in self._seen.items() if state_of(pid) not in GONE}:
            if time.monotonic() > deadline:
                self.outcome.problems.append(f"processes are left behind: {left}")
                return
            time.sleep(POLL_S)

    def _bounded(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call_bounded(call, timeout_s=self.limit_s, what=what, advice="")
        except SparkTimeoutError as error:
            if str(error).startswith(what):
                raise Hang(str(error)) from error
            raise

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.limit_s
        while not condition():
            if time.monotonic() > deadline:
                told = f"{self._jobs.staged.progress()}; {self._jobs.streamed.progress()}"
                raise Hang(f"{self.limit_s:g} s without {what}: {told}")
            time.sleep(POLL_S)


_STRIKES: dict[str, Callable[[SparkRun, Struck], bool]] = {
    "Spark executor killed": lambda run, struck: run._end_executors(struck, signal.SIGKILL),
    "Spark executor killed while it stages": SparkRun._while_staging,
    "all Spark executors killed": lambda run, struck: run._end_executors(struck, signal.SIGKILL, everyone=True),
    "Spark executor stopped": lambda run, struck: run._end_executors(struck, signal.SIGSTOP),
    "Spark's driver killed": SparkRun._driver,
    "Spark session stopped": SparkRun._session,
}
"""Each returns whether Spark is lost with it."""
SPARK_KINDS = tuple(_STRIKES)
