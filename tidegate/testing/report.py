"""`SimulationReport`: the result of a simulated run, with its counts, its coverage and its history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tidegate.testing.runtime.run import JobRun, Simulation
from tidegate.testing.world.faults import Faults
from tidegate.testing.world.virtual_time import START_MS, Note


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The result of one run. If an invariant is violated, it is the shortest violating run of the seed that was found.

    `order_dependence` describes how the output of the pipeline differs even without faults, or is None. If it is set,
    `ok` is False although no invariant is violated.

    `faults` are the faults of this run, without the ones that the violation does not need.

    `settled_ms` is the time from the last possible fault to the end of the (last) job, in ms. `coverage` counts the
    effects that occurred in the run.
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
    """How many runs were needed to find the shortest one."""
    notes: tuple[Note, ...] = field(repr=False, default=())

    @property
    def trace(self) -> tuple[str, ...]:
        """Returns the history as text, one line for each event, oldest first."""
        return tuple(str(note) for note in self.notes)

    def without_history(self) -> SimulationReport:
        """Returns this report without its notes, which would need too much memory for thousands of seeds."""
        return replace(self, notes=())

    def portable(self) -> SimulationReport:
        """Returns this report with a history that can be pickled."""
        return replace(self, notes=tuple(note.portable() for note in self.notes))

    def sequence(self, lines_max: int = 80) -> str:
        """Returns a sequence diagram of the last `lines_max` messages as text.

        The user, storage, the coordinator and each task have a column. Time increases downwards.
        """
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
    """Returns the report of a simulation that has ended. `runs` are its jobs in order."""
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


LANES_MAX = 12
LANE_WIDTH = 10
_FIRST = ("user", "storage", "coordinator")


def draw_sequence(notes: Iterable[Note], lines_max: int) -> str:
    """Returns a sequence diagram of the last `lines_max` messages and events as text.

    The user, storage, the coordinator and each task have a column, and time increases downwards. Consecutive data
    frames of one channel share a line. Tasks beyond `LANES_MAX` have no column.
    """
    rows = _merged(notes)
    left_out = max(0, len(rows) - lines_max)
    rows = rows[left_out:]
    seen = {str(end) for _, sender, receiver, _ in rows for end in (sender, receiver) if end is not None}
    lanes = [*(name for name in _FIRST if name in seen), *sorted(seen - set(_FIRST))]
    hidden = lanes[LANES_MAX:]
    lanes = lanes[:LANES_MAX]
    place = {name: index for index, name in enumerate(lanes)}
    lines = [f"{'ms':>8}  " + "".join(f"{_short(name):<{LANE_WIDTH}}" for name in lanes)]
    if left_out:
        lines.append(f"{'':>8}  ... {left_out} earlier lines are left out")
    if hidden:
        lines.append(f"{'':>8}  ... {len(hidden)} tasks have no lane: {', '.join(hidden)}")
    for at_ms, sender, receiver, text in rows:
        lines.append(f"{at_ms - START_MS:>8}  {_arrow(place, sender, receiver, len(lanes))}{text}".rstrip())
    return "\n".join(lines)


def _merged(notes: Iterable[Note]) -> list[tuple[int, object, object, str]]:
    """Returns the messages with their text. Consecutive frames of one channel that contain only data become one row."""
    rows: list[tuple[int, object, object, str]] = []
    counts: dict[int, tuple[int, int]] = {}
    for note in notes:
        batches = _data_only(note)
        same = rows and (rows[-1][1], rows[-1][2]) == (note.sender, note.receiver) and len(rows) - 1 in counts
        if batches and same:
            frames, total = counts[len(rows) - 1]
            counts[len(rows) - 1] = frames + 1, total + batches
            at_ms, sender, receiver, _ = rows[-1]
            rows[-1] = at_ms, sender, receiver, f"{note.what[0]} data: {total + batches} batches"
            continue
        rows.append((note.at_ms, note.sender, note.receiver, note.text))
        if batches:
            counts[len(rows) - 1] = 1, batches
            rows[-1] = note.at_ms, note.sender, note.receiver, f"{note.what[0]} data: {batches} batches"
    return rows


def _data_only(note: Note) -> int:
    elements = note.what[-1] if note.receiver is not None and note.what else None
    if not isinstance(elements, tuple) or not elements:
        return 0
    return len(elements) if all(hasattr(element, "num_rows") for element in elements) else 0


def _arrow(place: dict[str, int], sender: object, receiver: object, lanes: int) -> str:
    cells = list(("|" + " " * (LANE_WIDTH - 1)) * lanes)
    start = place.get(str(sender))
    end = place.get(str(receiver))
    if sender is None or start is None or end is None:
        return "".join(cells) if sender is None else "".join(cells) + f"{sender} -> {receiver} "
    left = min(start, end) * LANE_WIDTH
    right = max(start, end) * LANE_WIDTH
    for column in range(left, right + 1):
        cells[column] = "-"
    cells[start * LANE_WIDTH] = "o"
    cells[end * LANE_WIDTH] = ">" if end > start else "<"
    return "".join(cells)


def _short(name: str) -> str:
    return name if len(name) < LANE_WIDTH else name[: LANE_WIDTH - 2] + "~"
