"""A pipeline of windows. The rules are in `topologies.py`.

The number of rows selects the windows, their lateness, what they emit, and how rows reach them (`_MANNERS`):

- timely: by several channels, and each row is ahead of the watermark of its split. All rows are timely, because even
  the slowest channel is not ahead of them.
- in order: by one channel, with late rows among them. The data determines which rows are late.
- apart: by several channels, with late rows among them. The order of reading decides which rows are late.

Where the data does not determine the late rows, they are taken from the late side, and everything else must be
consistent with them (`given_windowed`). Two cases are not drawn: rows of a split that is found later would be behind
the watermark, and with at-least-once, rows that arrive again may be late by then.

The data determines only the number of count windows, not which rows are together. Of processing-time windows it
determines how often each row counts.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from random_jobs.pieces import SPLITS, Data, grouped, table_of
from random_jobs.window_models import (
    Judged,
    Row,
    Sums,
    Window,
    bounds_of_results,
    full_counts,
    gap_of,
    judged,
    late_in_split,
    read_in_order,
    sums_so_far,
    without_late,
)
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.operators.aggregates.aggregate import count, sum
from tidegate.operators.state.keyed_state import MapState, ValueState
from tidegate.operators.windows.process_windows import ProcessWindowContext, ProcessWindowFunction
from tidegate.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling
from tidegate.testing.runtime.run import Rows, counted

_BOUND_MS = 5
_STEP_MS = 5
_TIMELY_MS = _STEP_MS + _BOUND_MS
"""A row may be this far behind its place, in ms, without being behind the watermark."""
_BOUNDS = ("window_start", "window_end")
_MANNERS = ("timely", "in order", "apart")

_SUMS = pa.schema([("n", pa.int64()), ("total", pa.int64())])


@dataclass(frozen=True, slots=True)
class Program:
    """Windows, and how a program uses them."""

    spec: Tumbling | Sliding | Cumulating | Session | Count
    lateness_ms: int = 0
    emit: Literal["final", "update", "changes"] = "final"
    by_clock: bool = False
    applied: bool = False
    """True if a function receives the rows of each window."""
    punctuated: bool = False
    """True if only some rows advance event time."""
    remembers: bool = False
    """True if the function adds each window of a key to the windows before it."""
    watches: bool = False
    """True if the function has state of each window, and emits it by a timer when the window is over."""

    @property
    def updates(self) -> bool:
        """True if results replace each other or are retracted."""
        return self.emit != "final" or self.lateness_ms > 0


PROGRAMS = (
    Program(Tumbling(20)),
    Program(Sliding(40, 10)),
    Program(Cumulating(10, 40), emit="update"),
    Program(Session(12)),
    Program(Sliding(30, 10), lateness_ms=20),
    Program(Cumulating(10, 30)),
    Program(Count(3)),
    Program(Session(25)),
    Program(Tumbling(15, 5), lateness_ms=15, emit="update"),
    Program(Session(9), lateness_ms=25),
    Program(Session(14), emit="changes"),
    Program(Sliding(60, 20), by_clock=True),
    Program(Session(30), by_clock=True),
    Program(Sliding(35, 15), applied=True),
    Program(Session(11), applied=True),
    Program(Count(4), applied=True),
    Program(Tumbling(12), remembers=True),
    Program(Tumbling(15), punctuated=True),
    Program(Sliding(45, 15), lateness_ms=20, applied=True),
    Program(Tumbling(16), lateness_ms=25, watches=True),
    Program(Session(13), lateness_ms=22, applied=True),
)
"""The number of rows selects one."""
SESSIONS = tuple(
    number for number, program in enumerate(PROGRAMS) if isinstance(program.spec, Session) and not program.applied
)
"""Programs whose sessions are stored in the state, merged."""


def windowed(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds windows, and writes their results and the late rows to a table each."""
    program = _program(inputs[0])
    manner = _manner(inputs[0])
    rows = _rows(inputs[0])
    table = pa.table(
        {name: pa.array(column, pa.int64()) for name, column in zip("kvt", zip(*rows, strict=True), strict=True)}
    )
    if program.punctuated:
        table = table.append_column("p", pa.array([_moves(row) for row in rows]))
    splits = _splits(inputs[0])
    source = env.from_batches(table, splits=splits, uid="source0", parallelism=splits)
    stream = source.assign_timestamps(
        "t", _BOUND_MS, punctuated_by="p" if program.punctuated else None, uid="source0-timestamps", parallelism=splits
    ).select("k", "v", "t", uid="columns", parallelism=splits)
    if program.by_clock:
        windows = stream.key_by("k").window(program.spec, time="processing", fire_at_end=True)
        sums = windows.aggregate(n=count(), total=sum("v"), uid="windowed", parallelism=width[1])
        totals = sums.key_by("k").aggregate(
            n=sum("n"), total=sum("total"), emit="final", uid="totals", parallelism=width[2]
        )
        table_of(totals, "results", width[3])
        return
    results = _results(program, stream, width[1])
    if manner != "timely" and not isinstance(program.spec, Count):
        table_of(results.late_rows().rebalance(), "late", width[2])
    if isinstance(program.spec, Count):
        table_of(results.select("k", "n", uid="numbers", parallelism=width[1]).rebalance(), "results", width[3])
    elif program.updates:
        table_of(results, "running", width[1], keys=("k", *_BOUNDS))
    else:
        table_of(results.rebalance(), "results", width[3])


def _results(program: Program, stream: Stream, width: int) -> Stream:
    """Returns the results of the windows of a program."""
    windows = stream.key_by("k").window(program.spec)
    if program.lateness_ms:
        windows = windows.allowed_lateness(program.lateness_ms)
    if program.watches:
        return windows.process(Watching(program.lateness_ms), schema=_SUMS, uid="windowed", parallelism=width)
    if program.remembers:
        return windows.process(SumsSoFar(), schema=_SUMS, uid="windowed", parallelism=width)
    if program.applied:
        return windows.apply(_summed, schema=_SUMS, uid="windowed", parallelism=width)
    if isinstance(program.spec, Count):
        return windows.aggregate(n=count(), uid="windowed", parallelism=width)
    return windows.aggregate(n=count(), total=sum("v"), emit=program.emit, uid="windowed", parallelism=width)


def expect_windowed(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Computes the output where the data determines which rows are late."""
    program = _program(inputs[0])
    if program.by_clock:
        times = program.spec.size_ms // program.spec.slide_ms if isinstance(program.spec, Sliding) else 1
        return {"sim://results": grouped([(key, value) for key, value, _ in _rows(inputs[0]) for _ in range(times)])}
    if isinstance(program.spec, Count):
        return {"sim://results": counted(full_counts(program.spec, _rows(inputs[0])))}
    rows = _judged(inputs[0])
    if _manner(inputs[0]) == "timely":
        return {_table(program): _counted(program, read_in_order(program.spec, 0, [(row, None) for row, _ in rows]))}
    late = {"sim://late": counted(late_in_split(program.spec, program.lateness_ms, rows))}
    return late | {_table(program): _counted(program, read_in_order(program.spec, program.lateness_ms, rows))}


def given_windowed(inputs: Sequence[Data], found: Rows | None) -> Rows:
    """Computes the required output, given the rows that were emitted as late."""
    program = _program(inputs[0])
    if _manner(inputs[0]) != "apart" or program.by_clock or isinstance(program.spec, Count):
        return expect_windowed(inputs, ())
    if found is None:
        return {"sim://late": counted(late_in_split(program.spec, program.lateness_ms, _judged(inputs[0])))}
    late, rows = without_late(program.spec, program.lateness_ms, _judged(inputs[0]), found["sim://late"])
    table = _table(program)
    plain = [(row, None) for row, _ in rows]
    expected = {"sim://late": counted(late), table: _counted(program, read_in_order(program.spec, 0, plain))}
    if isinstance(program.spec, Tumbling):
        return expected
    there = [ast.literal_eval(row) for row in found[table].elements()]
    if isinstance(program.spec, Session):
        return expected | {table: _fitting_sessions(program.spec, [row for row, _ in rows], there) or expected[table]}
    sure, possible = bounds_of_results(program.spec, program.lateness_ms, rows)
    return expected | {table: _fitting(sure, possible, there)}


def _fitting(
    sure: dict[Window, Sums], possible: dict[Window, Sums], found: Sequence[tuple[int, int, int, int, int]]
) -> Counter[str]:
    """Returns the found results as far as they are possible, and otherwise the certain ones."""
    sums: dict[Window, list[Sums]] = {}
    for key, start, end, number, total in found:
        sums.setdefault((key, start, end), []).append((number, total))
    rows = []
    for window, most in possible.items():
        least = sure.get(window, (0, 0))
        of = sums.get(window, [])
        if len(of) == 1 and all(low <= each <= high for low, each, high in zip(least, of[0], most, strict=True)):
            rows.append((*window, *of[0]))
        elif of or least != (0, 0):
            rows.append((*window, *(least if least != (0, 0) else most)))
    return counted(rows)


def _fitting_sessions(
    spec: Session, rows: Sequence[Row], found: Sequence[tuple[int, int, int, int, int]]
) -> Counter[str] | None:
    """Returns the found sessions if each has rows at its start and end, and each row is in one session of its key."""
    times = {(key, time_ms) for key, _, time_ms in rows}
    of_keys = grouped([(key, value) for key, value, _ in rows])
    sums: dict[int, list[int]] = {}
    for key, start, end, number, total in found:
        if (key, start) not in times or (key, end - gap_of(spec)) not in times:
            return None
        of_key = sums.setdefault(key, [0, 0])
        of_key[0] = of_key[0] + number
        of_key[1] = of_key[1] + total
    return counted(found) if of_keys == counted([(key, *of) for key, of in sums.items()]) else None


def _counted(program: Program, results: dict[Window, list[Sums]]) -> Counter[str]:
    if program.remembers:
        return counted(sums_so_far(results))
    return counted([(*window, *sums) for window, of in results.items() for sums in of])


def _table(program: Program) -> str:
    return "sim://running" if program.updates else "sim://results"


class SumsSoFar(ProcessWindowFunction):
    """Emits the sum of a window plus the sums of earlier windows of its key."""

    def open(self, context: ProcessWindowContext) -> None:
        """Binds the sum."""
        self.total = context.state(ValueState("total", pa.int64()))

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> dict[str, int]:
        """Adds a window."""
        found = _summed(rows)
        self.total.update((self.total.value() or 0) + found["total"])
        return {**found, "total": self.total.value()}


class Watching(ProcessWindowFunction):
    """Emits the sums of a window only by a timer for the moment at which the window is over."""

    def __init__(self, lateness_ms: int) -> None:
        self._lateness_ms = lateness_ms

    def open(self, context: ProcessWindowContext) -> None:
        """Binds a state of the window."""
        self.sums = context.window_state(MapState("sums", pa.string(), pa.int64()))

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> None:
        """Stores the sums of the window, and registers the timer."""
        assert context.window is not None, "windows without bounds"
        self.sums.put_all(_summed(rows))
        context.timer_service.register_event_time_timer(context.window.end_ms - 1 + self._lateness_ms)

    def on_timer(self, timestamp: int, context: ProcessWindowContext) -> dict[str, int]:
        """Emits the sums."""
        return dict(self.sums.items())


def _summed(rows: pa.Table) -> dict[str, int]:
    """Returns the sums that the aggregates of other programs compute."""
    return {"n": rows.num_rows, "total": builtins.sum(rows.column("v").to_pylist())}


def _moves(row: Row) -> bool:
    """Returns whether a row advances event time, where only some rows do."""
    return row[1] % 3 == 0


def _program(data: Data) -> Program:
    return PROGRAMS[len(data) % len(PROGRAMS)]


def _manner(data: Data) -> str:
    return _MANNERS[len(data) // len(PROGRAMS) % len(_MANNERS)]


def _splits(data: Data) -> int:
    return 1 if _manner(data) == "in order" else SPLITS


def _rows(data: Data) -> list[Row]:
    """Returns rows with event times.

    Times advance by a window in a few rows of a split. Every third row is behind, by a multiple of its value.
    """
    splits = _splits(data)
    most_ms = _TIMELY_MS if _manner(data) == "timely" else 1_000
    found = []
    for split in range(splits):
        for place, number in enumerate(_numbers(data, split, splits)):
            key, value = data[number]
            behind_ms = min(7 * value, most_ms) if number % 3 == 2 else 0
            found.append((key, value, _STEP_MS * place - behind_ms))
    return found


def _judged(data: Data) -> list[Judged]:
    """Returns the rows, each with the watermark of its split before it."""
    rows = _rows(data)
    splits = _splits(data)
    punctuated = _program(data).punctuated
    found = list[Judged]()
    for split in range(splits):
        of_split = [rows[number] for number in _numbers(data, split, splits)]
        found += judged(of_split, _BOUND_MS, [not punctuated or _moves(row) for row in of_split])
    return found


def _numbers(data: Data, split: int, splits: int) -> range:
    return range(len(data) * split // splits, len(data) * (split + 1) // splits)
