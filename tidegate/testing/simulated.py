"""Run a pipeline of your own under seeded faults, in virtual time, and see whether it stays exactly-once.

    from tidegate.testing import Faults, simulate

    def build(env):
        rows = env.from_batches(batch)
        rows.key_by("k").aggregate(n=tg.count(), emit="final").to_table("sim://out")

    report = simulate(build, seed=7, faults=Faults(crash=0.02, storage=0.05, delay="0..2s"))
    assert report.ok, report

The pipeline runs twice: once without faults, as the reference, and once with them. Both runs must leave the same rows
in every table and collected stream. Their order does not matter; of an upsert table the newest row of each key counts.
Meanwhile an oracle checks the invariants of the protocol. So the output must not depend on how rows are batched: write
running aggregates (`emit="update"`) to an upsert table. Where rows differ, the pipeline runs without faults under other
schedules. If its rows differ there as well, the report has `order_dependence` and no violation.
"""

from __future__ import annotations

from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.storage.errors import ConfigurationError
from tidegate.testing.order_dependence import order_dependence
from tidegate.testing.report import SimulationReport, report_of
from tidegate.testing.runtime.run import STORAGE, Build, JobRun, JobSetting, Protocol, Rows, Simulation, difference
from tidegate.testing.shrink import shortest
from tidegate.testing.world.faults import Faults

INLINE_BYTES = 1_000
"""Small, so that most state goes to files of its own."""

SMALL_BUFFERS = BufferLimits(
    credit_bytes=1_000, queue_bytes_max=1_000, frame_bytes_min=100, frame_bytes_max=500, linger_ms=20
)
SETTLE_MS_MIN = 300_000
SETTLE_FACTOR = 20
"""After the last fault a job has this many times as long as the undisturbed run, and at least SETTLE_MS_MIN, to end.
It may have tasks that are up to 40 times slower, and may have to start again from the beginning."""


class SimulatedPipeline:
    """A pipeline to run with many seeds. The undisturbed run that all are compared to is made once."""

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
        """What `order_dependence` has found, once it was asked for."""

    def run(self, seed: int, faults: Faults | None = None, protocol: Protocol | None = None) -> SimulationReport:
        """Run one seed. If an invariant is violated, shrink it to the shortest run that shows the violation.

        Output that differs without any fault is no violation: then the report has `order_dependence`.

        Raises what `build` raises, and ConfigurationError if the pipeline does not finish without faults.
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
        setting = self._setting
        run = simulation.run(
            JobSetting(
                setting.build, setting.parallelism, setting.checkpoints, setting.options, settle_ms_max=settle_ms_max
            )
        )
        violation, order = run.violation, None
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
                    f"the pipeline does not finish without faults (seed {seed}): {run.violation or run.status}"
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
    """Run `build`'s pipeline under faults. The seed decides everything: the same seed gives the same run.

    `build(env)` makes the streams. They end in tables, which live in the simulation under any URL, or are collected.
    To try many seeds make a `SimulatedPipeline`: it makes the undisturbed run only once. Raises what `build` raises,
    and ConfigurationError if the pipeline does not finish without faults.
    """
    pipeline = SimulatedPipeline(build, parallelism=parallelism, checkpoints=checkpoints, options=options)
    return pipeline.run(seed, faults, protocol)
