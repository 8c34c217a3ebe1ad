"""Compares two ways of running within one job: both take turns of some seconds, and each job's processor time is taken.

Two runs of the same job differ by more than what is looked for here: by how memory lies, by what else the machine does.
Within one run neighbouring turns have all of that in common. So a pair of turns gives one ratio of processor time for
each row, in the order A B B A, and the median of many pairs says what B costs. Processor time is that of all processes
below the driver, by their threads, so that a machine that others use as well says nearly the same.

Rules: a turn counts from a settling time on, so that what one turn has left to do is not counted for the next. Rows
are those that a function in the job has seen and written into a `Board`, a few bytes of shared memory, which also says
whose turn it is.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from common import ENDED

import tidegate as tg

SETTLE_S, FIRST_ROWS_S, WARM_S = 0.3, 60.0, 3.0
RESAMPLES = 2_000
ROWS_MAX = 2**50
"""More than any run reads."""


class Board:
    """Whose turn it is, and how many rows a function has seen; every process that opens the file shares it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 16)

    @property
    def turn(self) -> int:
        """0 or 1."""
        return self._bytes[0]

    @turn.setter
    def turn(self, turn: int) -> None:
        self._bytes[0] = turn

    @property
    def rows(self) -> int:
        """Rows so far. One process writes them."""
        return int(struct.unpack_from("<q", self._bytes, 8)[0])

    @rows.setter
    def rows(self, rows: int) -> None:
        struct.pack_into("<q", self._bytes, 8, rows)


class SeenRows(tg.BatchFunction):
    """Passes batches on, and writes down how many rows it has seen."""

    def __init__(self, board: Path) -> None:
        self.path = board

    def open(self, context: tg.BatchContext) -> None:
        """The job begins."""
        self.board = Board(self.path)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Some more."""
        self.board.rows += batch.num_rows
        return batch


@contextmanager
def running(job: tg.Job, board: Board) -> Iterator[tg.Job]:
    """As long as the block runs, the job does: rows come, and what there is to load and to compile is there."""
    try:
        deadline_s = time.monotonic() + FIRST_ROWS_S
        while not board.rows:
            assert job.status() not in ENDED, job.progress().reason
            assert time.monotonic() < deadline_s, "no rows came"
            time.sleep(0.05)
        time.sleep(WARM_S)
        yield job
        assert job.status() == "running", job.progress().reason
    finally:
        job.cancel()


@dataclass(frozen=True)
class Turn:
    """What was seen of one turn. `cpu_s`: by kind of process."""

    seconds: float
    rows: int
    cpu_s: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds

    def ns_a_row(self, kinds: Sequence[str]) -> float:
        """Processor time of these kinds of processes for each row."""
        return sum(self.cpu_s.get(kind, 0.0) for kind in kinds) * 1e9 / self.rows


@dataclass(frozen=True)
class Ratio:
    """B to A: the median of the pairs, and where it lies in 95 of 100 random choices of as many pairs."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Ratio:
        """Of the ratios of all pairs."""
        choose = random.Random(7)
        medians = sorted(statistics.median(choose.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
        return Ratio(statistics.median(ratios), medians[RESAMPLES // 40], medians[-RESAMPLES // 40])

    def __str__(self) -> str:
        return f"{self.median - 1:+.2%} ({self.low - 1:+.2%} to {self.high - 1:+.2%})"


def take_turns(
    board: Board, pairs: int, turn_s: float, switch: Callable[[int], None] | None = None
) -> list[tuple[Turn, Turn]]:
    """Let A (0) and B (1) take turns. `switch` is called as well when one begins."""
    found = []
    for pair in range(pairs):
        turns: dict[int, Turn] = {}
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            board.turn = which
            if switch is not None:
                switch(which)
            time.sleep(SETTLE_S)
            turns[which] = _watch(board, turn_s)
        found.append((turns[0], turns[1]))
    return found


def _watch(board: Board, turn_s: float) -> Turn:
    rows, cpu, begun_s = board.rows, cpu_by_kind(), time.monotonic()
    time.sleep(turn_s)
    after = cpu_by_kind()
    seconds, passed = time.monotonic() - begun_s, board.rows - rows
    used: Counter[str] = Counter()
    for (kind, thread), ns in after.items():
        used[kind] += ns - cpu.get((kind, thread), 0)
    return Turn(seconds, passed, {kind: ns / 1e9 for kind, ns in used.items()})


def report(pairs: Sequence[tuple[Turn, Turn]], names: tuple[str, str]) -> list[str]:
    """Lines: processor time for each row, by kind of process, and the rate, which counts for less on a busy machine."""
    kinds = sorted({kind for pair in pairs for turn in pair for kind in turn.cpu_s})
    rows = [sum(pair[which].rows for pair in pairs) for which in (0, 1)]
    lines = []
    for kind in kinds:
        used = (sum(pair[which].cpu_s.get(kind, 0.0) for pair in pairs) * 1e9 / rows[which] for which in (0, 1))
        lines.append(f"{kind}: " + ", ".join(f"{ns:.3f} ns a row {name}" for ns, name in zip(used, names, strict=True)))
    return [*lines, f"rows a second, {names[1]}: {Ratio.of([b.rate / a.rate for a, b in pairs])}"]


def processor_time(pairs: Sequence[tuple[Turn, Turn]], kinds: Sequence[str] | None = None) -> Ratio:
    """B to A: the processor time of these kinds of processes for each row, of all without a choice."""
    chosen = kinds or sorted({kind for pair in pairs for turn in pair for kind in turn.cpu_s})
    return Ratio.of([b.ns_a_row(chosen) / a.ns_a_row(chosen) for a, b in pairs])


def processes_of(kind: str) -> list[int]:
    """The processes below this one of a kind."""
    found = []
    for pid in _descendants():
        try:
            if _kind_of((Path("/proc") / str(pid) / "cmdline").read_bytes()) == kind:
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended meanwhile.
    return found


def cpu_by_kind() -> dict[tuple[str, int], int]:
    """Nanoseconds that each thread of each process below this one has run so far, by kind of process."""
    found = {}
    for pid in _descendants():
        try:
            kind = _kind_of((Path("/proc") / str(pid) / "cmdline").read_bytes())
            for thread in os.listdir(f"/proc/{pid}/task"):
                run_ns = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]
                found[kind, int(thread)] = int(run_ns)
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended meanwhile.
    return found


def _kind_of(command: bytes) -> str:
    """The name of the program, or of the class of an actor."""
    words = command.rstrip(b"\0 ").split(b"\0")
    program = words[0].decode(errors="replace").split(" ")[0]
    if program.startswith("ray::"):
        return program.removeprefix("ray::").partition(".")[0]
    agents = (word for word in words if word.endswith((b"agent/main.py", b"agent.py")))
    return next((Path(os.fsdecode(agent)).parent.name for agent in agents), Path(program).name)


def _descendants() -> list[int]:
    """This process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # The name in parentheses may have spaces in it.
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found
