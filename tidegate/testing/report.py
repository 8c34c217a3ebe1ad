"""`SimulationReport`: the verdict of a simulated run, its numbers, what it exercised, and how to see it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tidegate.testing.runtime.run import JobRun, Simulation
from tidegate.testing.world.faults import Faults
from tidegate.testing.world.sequence_diagram import draw_sequence
from tidegate.testing.world.virtual_time import Note


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What came of one run. Of a violated one it is the shortest run of the seed that was found to show it.

    `order_dependence`: how the pipeline's output differs without any fault, if it does. Then the run is not `ok`, and
    no invariant is violated.
    `faults` are those of this run: what was left out of the faults that were asked for is not needed to show it.
    `settled_ms`: from the last possible fault to the end of the (last) job. `coverage` counts what it exercised.
    """

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
    settled_ms: int
    faults: Faults
    faults_happened: int
    coverage: Counter[str]
    scenario: str | None = None
    order_dependence: str | None = None
    runs: int = 1
    """Runs that were made to find the shortest one."""
    notes: tuple[Note, ...] = field(repr=False, default=())

    @property
    def trace(self) -> tuple[str, ...]:
        """The history, one line an event, newest last."""
        return tuple(str(note) for note in self.notes)

    def without_history(self) -> SimulationReport:
        """The same report without its notes, to be kept or sent by the thousands."""
        return replace(self, notes=())

    def portable(self) -> SimulationReport:
        """The same report with a history that can be sent to another process."""
        return replace(self, notes=tuple(note.portable() for note in self.notes))

    def sequence(self, lines_max: int = 80) -> str:
        """The last messages as a drawing: a lane for the user, storage, the coordinator and each task."""
        return draw_sequence(self.notes, lines_max)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"VIOLATED: {self.violation}"
        if self.order_dependence is not None:
            verdict = f"YOUR OUTPUT DEPENDS ON THE ORDER OF ROWS: {self.order_dependence}"
        shown = "" if self.scenario is None else f" [{self.scenario}]"
        return (
            f"seed {self.seed}: {verdict} ({self.checkpoints} checkpoints, {self.restarts} restarts, "
            f"{self.crashes} task and {self.coordinator_crashes} coordinator crashes, {self.virtual_ms} ms, "
            f"{self.faults_happened} faults){shown}"
        )


def report_of(
    seed: int,
    faults: Faults,
    simulation: Simulation,
    runs: Sequence[JobRun],
    violation: str | None,
    scenario: str | None = None,
    order_dependence: str | None = None,
) -> SimulationReport:
    """The report of a simulation that is over."""
    world = simulation.world
    return SimulationReport(
        seed=seed,
        ok=violation is None and order_dependence is None,
        violation=violation,
        status=runs[-1].status,
        checkpoints=sum(run.completed for run in runs),
        restarts=sum(run.restarts for run in runs),
        crashes=sum(run.job.crashes for run in runs),
        coordinator_crashes=sum(run.job.coordinator_crashes for run in runs),
        steps=world.steps,
        virtual_ms=sum(run.virtual_ms for run in runs),
        settled_ms=max(run.settled_ms for run in runs),
        faults=faults,
        faults_happened=world.faults_happened,
        coverage=simulation.coverage.counts,
        scenario=scenario,
        order_dependence=order_dependence,
        notes=tuple(world.trace),
    )
