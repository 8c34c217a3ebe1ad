"""Runs your pipeline in virtual time with random faults, and checks that its results are exactly-once.

    from tidegate.testing import Faults, simulate

    def build(env):
        rows = env.from_batches(batch)
        rows.key_by("k").aggregate(n=tg.count(), emit="final").to_table("sim://out")

    report = simulate(build, seed=7, faults=Faults(crash=0.02, storage=0.05, delay="0..2s"))
    assert report.ok, report

The pipeline runs twice: first without faults, as the reference, and then with them. Both runs must leave the same rows
in every table and collected stream. The order of rows does not matter. In an upsert table only the newest row of each
key counts. During the runs an oracle checks the invariants of the protocol.

The output must therefore not depend on how rows are batched. Write running aggregates (`emit="update"`) to an upsert
table. If rows differ, the pipeline also runs without faults under other schedules. If its rows differ there too, the
report has `order_dependence` and no violation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa

from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.graph.job_graph import JobGraph, JobVertex, OperatorSpec
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.storage.errors import ConfigurationError
from tidegate.testing.report import SimulationReport, report_of
from tidegate.testing.runtime.run import (
    STORAGE,
    Build,
    JobRun,
    JobSetting,
    Protocol,
    Rows,
    Simulation,
    counted,
    difference,
)
from tidegate.testing.world.faults import FAULT_KINDS, Faults

INLINE_BYTES = 1_000
"""The inlining threshold in bytes. It is small, so that most state is stored in separate files."""

SMALL_BUFFERS = BufferLimits(
    credit_bytes=1_000, queue_bytes_max=1_000, frame_bytes_min=100, frame_bytes_max=500, linger_ms=20
)
SETTLE_MS_MIN = 300_000
SETTLE_FACTOR = 20
"""A job must end within this many times the duration of the reference run after the last fault.

It always gets at least SETTLE_MS_MIN. Its tasks may be up to 40 times slower, and it may have to start again from the
beginning.
"""


class SimulatedPipeline:
    """Runs a pipeline with many seeds. The reference run without faults happens only once."""

    def __init__(
        self,
        build: Build,
        *,
        parallelism: int = 2,
        checkpoints: CheckpointConfig | None = None,
        options: DataPlaneOptions | None = None,
    ) -> None:
        if checkpoints is None:
            checkpoints = CheckpointConfig(
                interval="100ms",
                timeout="10s",
                tolerable_failed_checkpoints=2,
                storage=STORAGE,
                inline_threshold=INLINE_BYTES,
            )
        if options is None:
            options = DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=8)
        self._setting = JobSetting(build, parallelism, checkpoints, options)
        self._reference: JobRun | None = None
        self._order: tuple[str | None] | None = None
        """Result of `order_dependence` in a tuple, or None before the first call."""

    def run(self, seed: int, faults: Faults | None = None, protocol: Protocol | None = None) -> SimulationReport:
        """Runs one seed and returns its report. If an invariant is violated, that is the shortest run that shows the
        violation.

        Output that differs even without faults is not a violation. The report then has `order_dependence`.

        Raises the errors of `build`, and ConfigurationError if the pipeline does not finish without faults.
        """
        faults = faults if faults is not None else Faults()
        report = self._run(seed, faults, protocol)
        if report.violation is None:
            return report
        return shortest(report, faults, lambda tried: self._run(seed, tried, protocol))

    def _run(self, seed: int, faults: Faults, protocol: Protocol | None) -> SimulationReport:
        expected, virtual_ms = self._expected(seed)
        simulation = Simulation(seed, faults, protocol)
        settle_ms_max = max(SETTLE_MS_MIN, SETTLE_FACTOR * virtual_ms)
        run = simulation.run(replace(self._setting, settle_ms_max=settle_ms_max))
        violation = run.violation
        order = None
        if violation is None and run.reports_loss:
            return report_of(seed, faults, simulation, (run,), None)
        if violation is None and run.status != "finished":
            violation = f"invariant 7: the job {run.status} although every fault was survivable: {run.reason}"
        if violation is None and run.rows is not None:
            violation = difference(expected, run.rows)
            if violation is not None and (order := self._order_dependence()) is not None:
                violation = None
        return report_of(seed, faults, simulation, (run,), violation, order_dependence=order)

    def _order_dependence(self) -> str | None:
        if self._order is None:
            self._order = (order_dependence(self._setting),)
        return self._order[0]

    def _expected(self, seed: int) -> tuple[Rows, int]:
        if self._reference is None:
            run = Simulation(seed, Faults()).run(self._setting)
            if run.violation is not None or run.status != "finished" or run.rows is None:
                raise ConfigurationError(
                    f"the pipeline does not finish without faults (seed {seed}): {run.violation or run.status}. Run it "
                    "with StreamEnvironment.local first to find the cause; its sources must end"
                )
            self._reference = run
        assert self._reference.rows is not None
        return self._reference.rows, self._reference.virtual_ms


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
    """Runs the pipeline of `build` under faults and returns a report.

    The same seed gives the same run. `build(env)` creates the streams. They end in tables, which exist only in the
    simulation, under any URL, or they are collected. To try many seeds, use a `SimulatedPipeline`, which needs the
    reference run only once.

    Raises the errors of `build`, and ConfigurationError if the pipeline does not finish without faults.
    """
    pipeline = SimulatedPipeline(build, parallelism=parallelism, checkpoints=checkpoints, options=options)
    return pipeline.run(seed, faults, protocol)


SCHEDULES = (
    (8, "0ms..1s"),
    (1, "0ms..5ms"),
    (3, "0ms..2s"),
    (8, "0ms..100ms"),
    (2, "0ms..1s"),
    (5, "0ms..10s"),
)
"""How many rows a source emits at a time and the range of message delays, for each schedule."""
_ROWS_SHOWN_MAX = 3

_RowsByEdge = dict[int, Counter[str]]


def order_dependence(setting: JobSetting) -> str | None:
    """Compares the output of runs without faults under several schedules.

    Faults change when rows arrive and how they are batched. If the output depends on that, it also differs without
    faults under other delays and batch sizes, and then the pipeline is the cause, not tidegate.

    Returns a text that names the table and the step from which the difference comes, or None if all runs agree. Runs
    that violate an invariant or do not finish are skipped.
    """
    first = _run(setting, 0, None)
    if first is None:
        return None
    for number, schedule in enumerate(SCHEDULES, 1):
        other = _run(setting, number, schedule)
        if other is not None and (text := _difference(first, other)) is not None:
            return text
    return None


def _run(setting: JobSetting, number: int, schedule: tuple[int, str] | None) -> tuple[JobRun, _RowsByEdge] | None:
    rows: defaultdict[int, Counter[str]] = defaultdict(Counter)

    class Recording(TaskMachine):
        """A task machine that counts the rows that it sends on each edge."""

        def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
            instructions = super().handle(event)
            for instruction in instructions:
                if isinstance(instruction, do.SendFrame):
                    for element in instruction.elements:
                        if isinstance(element, pa.RecordBatch):
                            rows[instruction.channel.edge] += counted([tuple(row.values()) for row in _rows(element)])
            return instructions

    faults = Faults()
    if schedule is not None:
        rows_max, delay = schedule
        faults = Faults(delay=delay)
        setting = replace(setting, options=replace(setting.options, source_rows_max=rows_max))
    run = Simulation(number, faults, Protocol(task_machine=Recording)).run(setting)
    return (run, rows) if run.violation is None and run.status == "finished" and run.rows is not None else None


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows of a batch. Columns have numbers as names, because two columns may have the same name."""
    names = [str(number) for number in range(batch.num_columns)]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(batch.columns, names).to_pylist()
    return rows


def _difference(first: tuple[JobRun, _RowsByEdge], other: tuple[JobRun, _RowsByEdge]) -> str | None:
    (run1, edges1), (run2, edges2) = first, other
    assert run1.rows is not None
    assert run2.rows is not None
    for table, rows in run1.rows.items():
        only1 = rows - run2.rows[table]
        only2 = run2.rows[table] - rows
        if not only1 and not only2:
            continue
        graph = run1.job.context.graph
        differing = {edge.index for edge in graph.edges if edges1.get(edge.index) != edges2.get(edge.index)}
        step = _first_step(graph, _writer(graph, table), differing)
        return (
            f"{table} differs between two runs without any fault: {_shown(only1)} in one, {_shown(only2)} in the "
            f"other. The rows that go into {_names(step)} are the same, and those that come out are not: its result "
            "depends on the order of its rows, on how they are batched, or on something outside of the pipeline"
        )
    return None


def _first_step(graph: JobGraph, vertex: JobVertex, differing: set[int]) -> JobVertex:
    """Returns the vertex that causes a difference: the edges into it do not differ.

    `differing` are indices of edges.
    """
    seen = {vertex.vertex}
    while True:
        before = [
            edge.upstream
            for edge in graph.edges
            if edge.downstream == vertex.vertex and edge.index in differing and edge.upstream not in seen
        ]
        if not before:
            return vertex
        seen.add(before[0])
        vertex = graph.vertex(before[0])


def _writer(graph: JobGraph, table: str) -> JobVertex:
    return next(vertex for vertex in graph.vertices if any(spec.table == table for spec in vertex.operators))


def _names(vertex: JobVertex) -> str:
    return ", ".join(f"{name!r} (uid {uid!r})" for name, uid in _steps(vertex))


def _steps(vertex: JobVertex) -> Iterator[tuple[str, str]]:
    sinks: list[OperatorSpec] = [spec for spec in vertex.operators if spec.table is not None]
    steps = [spec for spec in vertex.operators if spec not in sinks] or sinks
    if vertex.source is not None:
        yield vertex.source.name, vertex.source.uid
    for spec in steps:
        yield spec.name, spec.uid


def _shown(rows: Counter[str]) -> str:
    if not rows:
        return "no further rows"
    shown = ", ".join(sorted(rows)[:_ROWS_SHOWN_MAX])
    return f"{rows.total()} rows only, such as {shown}"


RUNS_MAX = 40


def shortest(report: SimulationReport, faults: Faults, run: Callable[[Faults], SimulationReport]) -> SimulationReport:
    """Returns the shortest violating run of a seed that could be found.

    First, whole kinds of faults are removed. Then the faults after the first k are removed, with k by bisection. A run
    with fewer faults is a different run from the first removed fault on. So each candidate is run, and kept only if it
    also violates an invariant. At most `RUNS_MAX` runs are made. `run` runs the seed with other faults.
    """
    best = report
    runs = report.runs

    def fails(tried: Faults) -> bool:
        nonlocal best, runs
        if runs >= RUNS_MAX:
            return False
        runs += 1
        found = run(tried)
        if found.violation is None:
            return False
        best = found
        return True

    for kind in FAULT_KINDS:
        if getattr(faults, kind) > 0 and fails(_without(faults, kind)):
            faults = best.faults
    low = 0
    high = best.faults_happened
    while low < high:
        middle = (low + high) // 2
        if fails(replace(faults, faults_max=middle)):
            high = min(middle, best.faults_happened)
        else:
            low = middle + 1
    return replace(best, runs=runs)


def _without(faults: Faults, kind: str) -> Faults:
    """Returns a copy of the faults in which one kind never happens."""
    values = {field.name: getattr(faults, field.name) for field in fields(Faults)}
    return Faults(**{**values, kind: 0.0})
