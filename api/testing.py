"""Run a pipeline of your own under seeded faults, in virtual time, and see whether it stays exactly-once.

    from tidegate.testing import Faults, simulate

    def build(env):
        rows = env.from_batches(batch)
        rows.key_by("k").aggregate(n=tg.count(), emit="final").to_table("sim://out")

    report = simulate(build, seed=7, faults=Faults(crash=0.02, storage=0.05, delay="0..2s"))
    assert report.ok, report

The same pipeline is run twice from one seed: without faults, which gives the reference, and with them. Every table and
every collected stream must hold the same rows in the end (in any order; of an upsert table the newest row of each
key), and an oracle checks the invariants of the protocol all the way. The output must therefore not depend on how
rows are batched: write running aggregates (`emit="update"`) to an upsert table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.runtimes.context import DataPlaneOptions
from tidegate.actors.runtimes.coordinator_host import CoordinatorHost
from tidegate.actors.runtimes.job import RunningJob, Submission
from tidegate.actors.runtimes.task_effects import TaskEffects
from tidegate.actors.simulation.faults import Faults
from tidegate.actors.simulation.job import SimulatedJob
from tidegate.actors.simulation.oracle import InvariantViolated, Oracle
from tidegate.actors.simulation.store import SimulatedDisk, SimulatedStore
from tidegate.actors.simulation.world import World
from tidegate.actors.task.machine import TaskMachine
from tidegate.actors.task.outputs import BufferLimits
from tidegate.config import CheckpointConfig
from tidegate.environment import StreamEnvironment
from tidegate.recovery import RestartStrategy
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.store import Store
from tidegate.storage.table_files import read_table

__all__ = ["Faults", "Protocol", "SimulationReport", "simulate"]

Build = Callable[[StreamEnvironment], Any]

STORAGE = "sim://checkpoints"
STEPS_MAX = 400_000
TIME_MS_MAX = 3_600_000
INLINE_BYTES = 1_000
"""Small, so that most state goes to files of its own."""

SMALL_BUFFERS = BufferLimits(
    credit_bytes=1_000, queue_bytes_max=1_000, frame_bytes_min=100, frame_bytes_max=500, linger_ms=20
)


@dataclass(frozen=True, slots=True)
class Protocol:
    """The parts that run the protocol. Tests of the oracle put broken ones in their place."""

    task_machine: Callable[..., TaskMachine] = TaskMachine
    task_effects: Callable[..., TaskEffects] = TaskEffects
    coordinator: Callable[..., CoordinatorHost] = CoordinatorHost


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What came of one run. `trace` is the history of the run with faults, one line an event, newest last."""

    seed: int
    ok: bool
    violation: str | None
    status: str | None
    checkpoints: int
    restarts: int
    crashes: int
    coordinator_crashes: int
    steps: int
    virtual_ms: int
    trace: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"VIOLATED: {self.violation}"
        return (
            f"seed {self.seed}: {verdict} ({self.checkpoints} checkpoints, {self.restarts} restarts, "
            f"{self.crashes} task and {self.coordinator_crashes} coordinator crashes, {self.virtual_ms} ms)"
        )


def simulate(
    build: Build,
    *,
    seed: int,
    faults: Faults | None = None,
    parallelism: int = 2,
    checkpoints: CheckpointConfig | None = None,
    options: DataPlaneOptions | None = None,
    protocol: Protocol | None = None,
) -> SimulationReport:
    """Run `build`'s pipeline under faults; the seed decides everything, so the same seed gives the same run.

    `build(env)` makes streams; what it writes goes to tables under any url (they rest in the simulation) or is
    collected. Raises what `build` raises, and ConfigurationError if the pipeline does not finish without faults.
    """
    if checkpoints is None:
        checkpoints = CheckpointConfig(
            interval="100ms", timeout="10s", tolerable_failed=2, storage=STORAGE, inline_bytes=INLINE_BYTES
        )
    if options is None:
        options = DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=8)
    setting = _Setting(build, parallelism, checkpoints, options)
    reference = _run(setting, seed, Faults(), Protocol())
    if reference.violation is not None or reference.status != "finished":
        raise ConfigurationError(
            f"the pipeline does not finish without faults (seed {seed}): {reference.violation or reference.status}"
        )
    run = _run(setting, seed, faults or Faults(), protocol or Protocol())
    violation = run.violation
    if violation is None and run.status != "finished":
        violation = f"invariant 7: the job {run.status} although every fault was survivable: {run.reason}"
    if violation is None:
        violation = _difference(reference.rows, run.rows)
    job = run.job
    return SimulationReport(
        seed=seed,
        ok=violation is None,
        violation=violation,
        status=run.status,
        checkpoints=run.completed,
        restarts=run.restarts,
        crashes=job.crashes,
        coordinator_crashes=job.coordinator_crashes,
        steps=job.world.steps,
        virtual_ms=run.virtual_ms,
        trace=tuple(job.world.trace),
    )


@dataclass(frozen=True, slots=True)
class _Setting:
    build: Build
    parallelism: int
    checkpoints: CheckpointConfig
    options: DataPlaneOptions


@dataclass(slots=True)
class _Run:
    job: SimulatedJob
    violation: str | None
    status: str | None
    reason: str | None
    completed: int
    restarts: int
    virtual_ms: int
    rows: dict[str, Counter[str]]


class _PlanOnly:
    """Stands for the runtime while a pipeline is planned: a simulation runs submissions itself."""

    def check(self, graph: JobGraph, urls: Sequence[str]) -> None:
        """Nothing to refuse."""

    def submit(self, submission: Submission) -> RunningJob:
        """Never reached."""
        raise ConfigurationError("simulate() runs the pipeline: build(env) makes streams and does not execute them")

    def stop(self) -> None:
        """Nothing to stop."""


def _run(setting: _Setting, seed: int, faults: Faults, protocol: Protocol) -> _Run:
    world = World(seed, faults)
    disk = SimulatedDisk(world)

    def open_store(url: str) -> Store:
        return SimulatedStore(disk, url)

    env = StreamEnvironment(_PlanOnly(), setting.parallelism, options=setting.options, open_store=open_store)
    setting.build(env)
    disk.reliable = True
    submission = env.plan(
        "simulated",
        checkpoints=setting.checkpoints,
        restart=RestartStrategy.fixed_delay(10_000, "100ms"),
        suffix="00000000",
        seed=seed,
    )
    disk.reliable = False
    oracle = Oracle(disk, submission.spec.root, submission.context.layout, submission.spec.tasks)
    job = SimulatedJob(
        submission,
        world,
        disk,
        oracle,
        protocol.task_machine,
        protocol.task_effects,
        protocol.coordinator,
    )
    violation: str | None = None
    status: str | None = None
    reason: str | None = None
    restarts = 0
    start_ms = world.now_ms
    try:
        state = job.run(STEPS_MAX, TIME_MS_MAX)
        status, reason, restarts = state.status.value, state.ending_reason, max(0, state.attempt)
    except (InvariantViolated, AssertionError) as error:
        violation = f"{type(error).__name__}: {error}" if isinstance(error, AssertionError) else str(error)
    disk.reliable = True
    rows = {}
    if violation is None:
        for vertex in submission.context.graph.vertices:
            for spec in vertex.operators:
                if spec.table is not None:
                    rows[spec.table] = _rows(read_table(open_store(spec.table)))
    return _Run(job, violation, status, reason, oracle.completed, restarts, world.now_ms - start_ms, rows)


def _rows(table: pa.Table) -> Counter[str]:
    return Counter(repr(tuple(row.values())) for row in table.to_pylist())


def _difference(expected: dict[str, Counter[str]], found: dict[str, Counter[str]]) -> str | None:
    for table, rows in expected.items():
        missing, extra = rows - found[table], found[table] - rows
        if missing:
            row = next(iter(missing))
            return f"invariant 6: {table} lacks {missing.total()} rows, {row} among them"
        if extra:
            row = next(iter(extra))
            return f"invariant 6: {table} has {extra.total()} rows too many, {row} among them"
    return None
