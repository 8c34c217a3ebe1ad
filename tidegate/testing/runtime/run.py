"""`Simulation`: runs pipelines in one simulated world, from the plan to the rows of the tables.

`simulate` and our own random jobs are built on it.

A `Simulation` has one world with one disk. Jobs run in it one after the other, so that a later job can be restored from
files that an earlier one has stored. Messages that were in flight when a job ended arrive while the next one runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.running_job import JobCard, JobOverview, RunningJob, SilentJob, Submission
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.connectors.source import MasterHook, Source
from tidegate.operators.local_aggregation import CombiningMode
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SavepointFormat, SnapshotKind, read_metadata
from tidegate.storage.errors import ConfigurationError, CorruptionError, ProtocolError
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.job_observer import Watch
from tidegate.testing.oracle.job_oracle import Oracle
from tidegate.testing.oracle.output_tables import REPORT, Covered, MergedFiles, TableLosses
from tidegate.testing.runtime.ports import WatchedEffects
from tidegate.testing.runtime.simulated_job import SimulatedJob
from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore
from tidegate.testing.world.faults import Faults
from tidegate.testing.world.ledger import Ledger
from tidegate.testing.world.replication_slot import ReplicationSlot
from tidegate.testing.world.virtual_time import World

STORAGE = "sim://checkpoints"
SAVEPOINTS = "sim://savepoints"
COPIES = "copies"
"""The folder of local copies on the disk of each node."""
JOB_NAME = "simulated"
STEPS_MAX = 400_000
DEPLOY_TIMEOUT_MS = 120_000
"""Longest time for a deployment in ms. Functions open quickly here, and a run must end."""

Build = Callable[[StreamEnvironment], Any]
Slots = Literal["shared", "halves", "apart"]
Rows = dict[str, Counter[str]]
"""The rows of each table, with the number of each, by URL."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The classes that run the protocol in a simulation. Tests of the oracle replace some by classes with errors."""

    task_machine: Callable[..., TaskMachine] = TaskMachine
    task_effects: Callable[..., TaskEffects] = WatchedEffects
    coordinator: Callable[..., CoordinatorDriver] = CoordinatorDriver


@dataclass(frozen=True, slots=True)
class Action:
    """A request of a user `at_ms` after the start of the job: a snapshot of this kind, or (None) a cancellation."""

    at_ms: int
    kind: SnapshotKind | None
    savepoint_format: SavepointFormat = SavepointFormat.CANONICAL


@dataclass(frozen=True, slots=True)
class JobSetting:
    """The settings of one job in a simulation."""

    build: Build
    parallelism: int
    checkpoints: CheckpointConfig
    options: DataPlaneOptions
    restart: RestartStrategy = field(default_factory=lambda: RestartStrategy.fixed_delay(10_000, "100ms"))
    hooks: tuple[MasterHook, ...] = ()
    actions: tuple[Action, ...] = ()
    restore: str | None = None
    allow_non_restored_state: bool = False
    settle_ms_max: int = 3_600_000
    adoption_timeout_ms: int | None = None
    """The setting with the same name in `JobSpec`."""
    sources: Callable[[Source], Source] | None = None
    """Replaces each source before the job starts. None: sources are not replaced."""
    log_entries: int | None = None
    """After how many log entries a snapshot of the event log is stored. None: the default."""
    local_aggregation: CombiningMode = "auto"
    """Mode of local aggregation, which combines rows before they are sent."""
    local_copies: bool = False
    """True: tasks keep copies of their state on the disks of their nodes."""
    slots: Slots = "shared"
    """Which subtasks share a process.

    `shared`: subtask i of all steps. `halves`: subtask i of every other step. `apart`: each subtask has its own
    process.
    """
    hurries: bool = False
    """True: slow tasks become fast after the last fault, because no later checkpoint is restored.

    That makes runs shorter.
    """


@dataclass(frozen=True, slots=True)
class JobRun:
    """The result of one job. `rows` is None if the job did not finish."""

    job: SimulatedJob
    violation: str | None
    status: str | None
    reason: str | None
    completed: int
    restarts: int
    virtual_ms: int
    settled_ms: int
    """The time from the last possible fault to the end, in ms."""
    rows: Rows | None
    answers: dict[str, do.CompleteRequest]
    lost_entries: bool = False
    """True if the log of a table has lost entries by the end of the job."""
    cut_short: bool = False
    """True if a stop has ended the input early. Its answer may be lost with a coordinator that dies."""

    @property
    def reports_loss(self) -> bool:
        """Returns whether the job has failed with the report that the log of a table has lost entries."""
        return self.lost_entries and self.status == "failed" and REPORT in (self.reason or "")


class Simulation:
    """A simulation: virtual world, disk, and the jobs that run on it."""

    def __init__(self, seed: int, faults: Faults, protocol: Protocol | None = None) -> None:
        self.seed = seed
        self.world = World(seed, faults)
        self.disk = SimulatedDisk(self.world)
        self.coverage = Coverage()
        self._protocol = protocol if protocol is not None else Protocol()
        self._jobs = 0
        self._covered: Covered = {}
        self._ledgers: dict[str, Ledger] = {}
        """Systems that sinks of the jobs commit to, by name."""
        self._replication_slots: dict[str, ReplicationSlot] = {}
        """Systems that delete rows when sources of the jobs have confirmed them, by name."""
        self._merged = MergedFiles(self.disk, self.coverage)
        self.losses = TableLosses(self.disk)
        self.losses.listeners.append(self._merged.lost)

    def open_store(self, url: str) -> Store:
        """Returns the store at a URL of this world."""
        return SimulatedStore(self.disk, url)

    def ledger(self, name: str) -> Ledger:
        """Returns the ledger with this name, and creates it at the first call."""
        return self._ledgers.setdefault(name, Ledger(self.world))

    def replication_slot(self, name: str, data: pa.Table, splits: int) -> ReplicationSlot:
        """Returns the replication slot with this name. The first call creates it with the rows of `data`."""
        return self._replication_slots.setdefault(name, ReplicationSlot(data, splits))

    def run(self, setting: JobSetting) -> JobRun:
        """Runs one job to its end. Raises the errors of `build` and of planning."""
        return self.finish(self.prepare(setting), setting.settle_ms_max)

    def prepare(self, setting: JobSetting) -> SimulatedJob:
        """Returns a job that is planned and not yet started. Raises the errors of `build` and of planning."""
        world = self.world
        if self._jobs:
            world.faults_again()
            self.losses.between_jobs()
        submission, restored = self._plan(setting)
        self._jobs += 1
        context = submission.context
        oracle = Oracle(
            self.disk,
            submission.spec,
            context.graph,
            self.coverage,
            self._covered,
            self._merged,
            context.histories,
            restored,
        )
        self.losses.listeners.append(oracle.tables.lost)
        watch = Watch(oracle, self.coverage, restored)
        parts = self._protocol
        job = SimulatedJob(
            submission,
            world,
            self.disk,
            watch,
            parts.task_machine,
            parts.task_effects,
            parts.coordinator,
            setting.log_entries,
            setting.hurries,
        )
        for number, action in enumerate(setting.actions):
            world.after(action.at_ms, _asking(job, action, f"request {number} of job {self._jobs}"))
        return job

    def finish(self, job: SimulatedJob, settle_ms_max: int) -> JobRun:
        """Runs a prepared job to its end."""
        world = self.world
        oracle = job.watch.oracle
        violation = status = reason = None
        restarts = 0
        start_ms = world.now_ms
        try:
            state = job.run(STEPS_MAX, settle_ms_max)
            status = state.status.value
            reason = state.ending_reason
            restarts = max(0, state.attempt)
            if job.gave_up is not None:
                status = "failed"
                reason = job.gave_up
        except InvariantViolated as error:
            violation = str(error)
        except AssertionError as error:
            violation = f"an assertion failed: {str(error) or _place(error)}"
        except ProtocolError as error:
            # An error of a task fails its attempt. This one was raised by the coordinator.
            violation = f"the coordinator cannot continue: {error}"
        self.disk.reliable = True
        rows = None if violation is not None else self._rows(job.context)
        self._covered = oracle.tables.covered
        settled_ms = world.now_ms - world.faulty_until_ms
        return JobRun(
            job=job,
            violation=violation,
            status=status,
            reason=reason,
            completed=oracle.completed,
            restarts=restarts,
            virtual_ms=world.now_ms - start_ms,
            settled_ms=settled_ms,
            rows=rows,
            answers=dict(job.watch.answers),
            lost_entries=bool(self.losses.tables),
            cut_short=any(job.watch.cut_short.values()),
        )

    def _plan(self, setting: JobSetting) -> tuple[Submission, CheckpointMetadata | None]:
        env = _Environment(_PlanOnly(self.open_store), setting.parallelism, options=setting.options)
        env.changed = setting.sources
        env.ledger = self.ledger
        env.replication_slot = self.replication_slot
        setting.build(env)
        self.disk.reliable = True
        submission = env.plan(
            JOB_NAME,
            checkpoints=setting.checkpoints,
            restart=setting.restart,
            restore=setting.restore,
            allow_non_restored_state=setting.allow_non_restored_state,
            suffix=f"{self._jobs:08d}",
            seed=self.seed,
            hooks=setting.hooks,
            local_aggregation=setting.local_aggregation,
        )
        spec = submission.spec
        limit_ms = min(spec.deploy_timeout_ms, DEPLOY_TIMEOUT_MS)
        spec = replace(spec, adoption_timeout_ms=setting.adoption_timeout_ms, deploy_timeout_ms=limit_ms)
        copies = COPIES if setting.local_copies else None
        # Writing never pauses: the length of a pause would depend on the load of this machine.
        options = replace(submission.context.options, local_copies=copies, paused_ms_max=0)
        graph = _in_slots(submission.context.graph, setting.slots)
        context = replace(submission.context, options=options, graph=graph)
        submission = replace(submission, spec=spec, context=context)
        restore = spec.restore
        restored = None
        if restore is not None:
            store = self.open_store(restore.root)
            restored = read_metadata(store, restore.job_id, restore.checkpoint_id, savepoint=restore.savepoint)
        self.disk.reliable = False
        return submission, restored

    def _rows(self, context: JobContext) -> Rows:
        ledgers = {name: ledger.rows for name, ledger in self._ledgers.items()}
        return {table: self._rows_of(table) for table in context.table_urls} | ledgers

    def _rows_of(self, table: str) -> Counter[str]:
        try:
            return _counted(read_table(self.open_store(table)))
        except CorruptionError as error:
            if self.losses.tables and REPORT in str(error):
                return Counter()  # Readers report the loss as well.
            raise


def _in_slots(graph: JobGraph, slots: Slots) -> JobGraph:
    """Returns the graph with the slot sharing of this setting."""
    if slots == "halves":
        vertices = (replace(v, slot_group=f"half {number % 2}") for number, v in enumerate(graph.vertices))
        return replace(graph, vertices=tuple(vertices))
    return replace(graph, slot_sharing=False) if slots == "apart" else graph


def difference(expected: Rows, found: Rows, *, at_least: bool = False, at_most: bool = False) -> str | None:
    """Returns a text that describes how the rows of a job differ from the expected ones, or None if they are equal.

    With `at_least`, rows may exist more often than expected. With `at_most`, rows may be missing.
    """
    for table, rows in expected.items():
        missing = rows - found[table]
        extra = found[table] - rows
        if missing and not at_most:
            return f"invariant 6: {table} lacks {missing.total()} rows, {min(missing)} among them"
        if extra and not (at_least and extra.keys() <= rows.keys()):
            return f"invariant 6: {table} has {extra.total()} rows too many, {min(extra)} among them"
    return None


def counted(rows: Sequence[Sequence[object]]) -> Counter[str]:
    """Returns how often each row occurs, with rows as text so that they can be compared."""
    return Counter(repr(tuple(row)) for row in rows)


def _counted(table: pa.Table) -> Counter[str]:
    return counted(list(zip(*(column.to_pylist() for column in table.columns), strict=True)))


def _asking(job: SimulatedJob, action: Action, request: str) -> Callable[[], None]:
    def ask() -> None:
        now_ms = job.world.now_ms
        if action.kind is None:
            job.ask(co.CancelRequested(now_ms))
        else:
            target = SAVEPOINTS if action.kind.is_savepoint else None
            job.ask(co.CheckpointRequested(now_ms, request, action.kind, target, action.savepoint_format))

    return ask


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno}"


class _Environment(StreamEnvironment):
    """An environment that replaces the sources of a pipeline."""

    changed: Callable[[Source], Source] | None = None
    ledger: Callable[[str], Ledger]
    """Returns the ledger with this name in the simulated world."""
    replication_slot: Callable[[str, pa.Table, int], ReplicationSlot]
    """Returns the slot with this name in the simulated world, with these rows in this number of splits."""

    def from_source(
        self,
        source: Source,
        *,
        name: str = "source",
        uid: str | None = None,
        parallelism: int | None = None,
        slot_sharing_group: str | None = None,
    ) -> Stream:
        """Returns a stream over the source that replaces `source` in the simulation."""
        changed = source if self.changed is None else self.changed(source)
        return super().from_source(
            changed, name=name, uid=uid, parallelism=parallelism, slot_sharing_group=slot_sharing_group
        )


class _PlanOnly:
    """Replaces the runtime while a pipeline is planned. A simulation runs submissions itself."""

    memory_url = "simulated-memory:"
    sends_functions = False

    def __init__(self, open_store: OpenStore) -> None:
        self.open_store = open_store

    def check(self, graph: JobGraph, urls: Mapping[str, str]) -> None:
        """Accepts every graph without a check."""

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """Accepts everything, because `submit` raises an error in any case."""

    def overviews(self) -> list[tuple[str, JobOverview | SilentJob]]:
        """Returns an empty list."""
        return []

    def attach(self, name: str) -> tuple[JobCard, RunningJob]:
        """Raises ConfigurationError, because no jobs run here."""
        raise ConfigurationError(
            "simulate() runs the pipeline after build(env), so there is no job to attach to; remove attach from build"
        )

    def submit(self, submission: Submission) -> RunningJob:
        """Raises ConfigurationError, because `build` must not execute the pipeline."""
        raise ConfigurationError(
            "simulate() runs the pipeline: build(env) makes streams and does not execute them; remove execute"
        )

    def stop(self) -> None:
        """Does nothing, because no jobs run here."""
