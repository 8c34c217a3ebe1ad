"""What came of the runs of `chaos.py`: a table of faults, and files from which a table of several sessions is made.

A file has a line of JSON for each run, with its faults. It is written when the run is over, so that a session that is
ended has told what it had done.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_run import Outcome
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class FaultResult:
    """One fault. `still_ms`: how long rows stood still; None where it shares that with another fault."""

    kind: str
    victim: str
    on_top: bool
    still_ms: int | None


@dataclass(frozen=True)
class RunResult:
    """One run."""

    seed: int
    number: int
    configuration: str
    seconds: float
    load: float
    """Of the machine, when it was over: processes that wanted to run, over the last minute."""
    faults: tuple[FaultResult, ...]
    lost: int
    doubled: int
    hangs: tuple[str, ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, seed: int, number: int, outcome: Outcome, load: float) -> RunResult:
        """What came of a run."""
        faults = tuple(
            FaultResult(one.fault.kind, one.victim, one.fault.on_top, one.still_ms) for one in outcome.struck
        )
        return cls(
            seed,
            number,
            outcome.plan.configuration,
            outcome.seconds,
            load,
            faults,
            outcome.lost,
            outcome.doubled,
            tuple(outcome.hangs),
            tuple(outcome.problems),
        )

    @property
    def bad(self) -> bool:
        """Whether anything is not as it must be."""
        return bool(self.lost or self.doubled or self.hangs or self.problems)


def append(path: Path, run: RunResult) -> None:
    """Write down one more run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{json.dumps(asdict(run))}\n")


def read(paths: Iterable[Path]) -> list[RunResult]:
    """All runs of these files."""
    runs = []
    for path in paths:
        for line in path.read_text().splitlines():
            values = json.loads(line)
            values["faults"] = tuple(FaultResult(**fault) for fault in values["faults"])
            runs.append(RunResult(**values))
    return runs


def show(runs: Sequence[RunResult], kinds: Sequence[str], console: Console) -> None:
    """A line for each kind of fault, and one for all."""
    table = Table(title="how long rows stood still after a fault, in seconds")
    for column in ("fault", "count", "alone", "median", "worst"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    struck = [fault for run in runs for fault in run.faults]
    for kind in kinds:
        of_kind = [fault for fault in struck if fault.kind == kind]
        if of_kind:
            times = [fault.still_ms / 1_000 for fault in of_kind if fault.still_ms is not None]
            figures = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("-", "-")
            table.add_row(kind, str(len(of_kind)), str(len(times)), *figures)
    table.add_section()
    table.add_row("all", str(len(struck)), str(sum(fault.still_ms is not None for fault in struck)))
    console.print(table)
    lost, doubled = sum(run.lost for run in runs), sum(run.doubled for run in runs)
    hangs, problems = sum(len(run.hangs) for run in runs), sum(len(run.problems) for run in runs)
    loads = [run.load for run in runs] or [0.0]
    console.print(
        f"{len(runs)} runs, {len(struck)} faults: {lost} rows lost, {doubled} doubled, {hangs} hangs, {problems} other "
        f"problems; load {min(loads):.0f} to {max(loads):.0f}",
        highlight=False,
        soft_wrap=True,
    )
