"""A pipeline of windows for random simulations. Rules: as of `topologies.py`.

The data chooses the windows, their lateness and what they emit. Each subtask of the source has one split, and takes out
the rows that are late for a window of theirs by the rows before them there. The watermark of the windows is that of the
slowest split, so no row that is left is late for any. A split that is found later would be behind that watermark, and
with at-least-once rows come again that are late by then: neither is drawn. Of windows of so many rows only their number
follows from the data: which rows are together does not. Of windows by the clock it is how often each row counts.
"""

from __future__ import annotations

import builtins
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.operators.aggregates.aggregate import count, sum
from tidegate.actors.operators.state.keyed_state import MapState, ValueState
from tidegate.actors.operators.window_functions.process_windows import ProcessWindowContext, ProcessWindowFunction
from tidegate.actors.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling, floored
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.late_rows import in_time
from tidegate.simulation.pipelines.pieces import SPLITS, Data, grouped, table_of
from tidegate.simulation.runtime.run import Rows, counted

_BOUND_MS = 5
_NEVER_MS = 1 << 40
_BOUNDS = ("window_start", "window_end")

_SUMS = pa.schema([("n", pa.int64()), ("total", pa.int64())])

Row = tuple[int, int, int]
"""Key, value, event time."""


@dataclass(frozen=True, slots=True)
class Program:
    """Windows, and how they are asked for."""

    spec: Tumbling | Sliding | Cumulating | Session | Count
    lateness_ms: int = 0
    emit: Literal["final", "update", "changes"] = "final"
    by_clock: bool = False
    applied: bool = False
    """Whether a function gets the rows of each window."""
    punctuated: bool = False
    """Whether only some rows move event time on."""
    remembers: bool = False
    """Whether the function adds each window of a key to those before it."""
    watches: bool = False
    """Whether the function has state of each window, and tells of it when a timer says that the window is over."""

    @property
    def updates(self) -> bool:
        """Whether results replace each other, or are taken back."""
        return self.emit != "final" or self.lateness_ms > 0

    def over_ms(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """The end of the first window of rows of these times: later ones change what has come out.

        A row at a session's end still prolongs it, so there it is the moment before the row. So many rows have none.
        """
        match self.spec:
            case Tumbling():
                return floored(times, self.spec.size_ms, self.spec.offset_ms) + self.spec.size_ms
            case Sliding():
                # Where the slide does not divide the size, windows end between the starts of others.
                size_ms, slide_ms = self.spec.size_ms, self.spec.slide_ms
                return floored(times - size_ms, slide_ms, self.spec.offset_ms) + slide_ms + size_ms
            case Cumulating():
                return floored(times, self.spec.step_ms, 0) + self.spec.step_ms
            case Session():
                return times
            case Count():
                return times + _NEVER_MS


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
"""The number of rows chooses one."""
SESSIONS = tuple(
    number for number, program in enumerate(PROGRAMS) if isinstance(program.spec, Session) and not program.applied
)
"""Those whose sessions lie in the state, merged."""


def windowed(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """The results of windows, and the rows that were late for them, each to a table."""
    program, rows = _program(inputs[0]), _rows(inputs[0])
    table = pa.table(
        {name: pa.array(column, pa.int64()) for name, column in zip("kvt", zip(*rows, strict=True), strict=True)}
    )
    if program.punctuated:
        table = table.append_column("p", pa.array([_moves(row) for row in rows]))
    source = env.from_batches(table, splits=SPLITS, uid="source0", parallelism=SPLITS)
    stream = source.assign_timestamps(
        "t", _BOUND_MS, punctuated_by="p" if program.punctuated else None, uid="source0-timestamps", parallelism=SPLITS
    ).select("k", "v", "t", uid="columns", parallelism=SPLITS)
    if program.by_clock:
        windows = stream.key_by("k").window(program.spec, time="processing", fire_at_end=True)
        sums = windows.aggregate(n=count(), total=sum("v"), uid="windowed", parallelism=width[1])
        totals = sums.key_by("k").aggregate(
            n=sum("n"), total=sum("total"), emit="final", uid="totals", parallelism=width[2]
        )
        table_of(totals, "results", width[3])
        return
    timely = in_time(stream, program.over_ms, program.lateness_ms, uid="windows")
    table_of(timely.side_output("late").rebalance(), "late", width[2])
    windows = timely.key_by("k").window(program.spec)
    if program.lateness_ms:
        windows = windows.allowed_lateness(program.lateness_ms)
    if program.watches or (program.applied and program.updates):
        if program.watches:
            told = windows.process(Watching(program.lateness_ms), schema=_SUMS, uid="windowed", parallelism=width[1])
        else:
            told = windows.apply(_summed, schema=_SUMS, uid="windowed", parallelism=width[1])
        table_of(told, "running", width[1], keys=("k", *_BOUNDS))
        return
    if program.remembers:
        sums = windows.process(SumsSoFar(), schema=_SUMS, uid="windowed", parallelism=width[1])
        table_of(sums.rebalance(), "results", width[3])
        return
    if program.applied:
        sums = windows.apply(_summed, schema=_SUMS, uid="windowed", parallelism=width[1])
        if isinstance(program.spec, Count):
            sums = sums.select("k", "n", uid="numbers", parallelism=width[1])
        table_of(sums.rebalance(), "results", width[3])
        return
    if isinstance(program.spec, Count):
        counts = windows.aggregate(n=count(), uid="windowed", parallelism=width[1])
        table_of(counts.rebalance(), "results", width[3])
        return
    results = windows.aggregate(n=count(), total=sum("v"), emit=program.emit, uid="windowed", parallelism=width[1])
    if program.updates:
        table_of(results, "running", width[1], keys=("k", *_BOUNDS))
    else:
        table_of(results.rebalance(), "results", width[3])


def expect_windowed(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Row by row: late for its first window by the rows before it in its split, else in each of its windows."""
    program, rows = _program(inputs[0]), _rows(inputs[0])
    if program.by_clock:
        times = program.spec.size_ms // program.spec.slide_ms if isinstance(program.spec, Sliding) else 1
        values = [(key, value) for key, value, _ in rows for _ in range(times)]
        return {"sim://results": grouped(values)}
    timely: list[Row] = []
    late: list[Row] = []
    for split in range(SPLITS):
        newest_ms: int | None = None
        for row in rows[len(rows) * split // SPLITS : len(rows) * (split + 1) // SPLITS]:
            over_ms = int(program.over_ms(np.array([row[2]]))[0]) - 1 + program.lateness_ms
            is_late = newest_ms is not None and over_ms <= newest_ms - _BOUND_MS - 1
            (late if is_late else timely).append(row)
            if _moves(row) or not program.punctuated:
                newest_ms = row[2] if newest_ms is None else max(newest_ms, row[2])
    if program.remembers:
        return {"sim://results": _sums_so_far(program.spec, timely), "sim://late": counted(late)}
    table = "sim://running" if program.updates else "sim://results"
    return {table: _results(program.spec, timely), "sim://late": counted(late)}


def _results(spec: Tumbling | Sliding | Cumulating | Session | Count, rows: Sequence[Row]) -> Counter[str]:
    """What windows of some rows give in the end."""
    if isinstance(spec, Count):
        of_keys = Counter(key for key, _, _ in rows)
        return counted([(key, spec.rows) for key, n in of_keys.items() for _ in range(n // spec.rows)])
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    if isinstance(spec, Session):
        held: dict[int, list[list[Row]]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row[2]):
            sessions = held[row[0]]
            if not sessions or row[2] - sessions[-1][-1][2] > spec.gap_ms:
                sessions.append([])
            sessions[-1].append(row)
        for key, sessions in held.items():
            for session in sessions:
                groups[key, session[0][2], session[-1][2] + spec.gap_ms] = [value for _, value, _ in session]
    else:
        for key, value, time_ms in rows:
            for start, end in windows_of(spec, time_ms):
                groups[key, start, end].append(value)
    return counted([(*window, len(values), builtins.sum(values)) for window, values in groups.items()])


def _sums_so_far(spec: Tumbling | Sliding | Cumulating | Session | Count, rows: Sequence[Row]) -> Counter[str]:
    """What the windows of each key come to, one after the other."""
    assert isinstance(spec, Tumbling), "windows that end one after the other"
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for key, value, time_ms in rows:
        ((start, end),) = windows_of(spec, time_ms)
        groups[key, start, end].append(value)
    totals: Counter[int] = Counter()
    found = []
    for (key, start, end), values in sorted(groups.items()):
        totals[key] += builtins.sum(values)
        found.append((key, start, end, len(values), totals[key]))
    return counted(found)


def windows_of(spec: Tumbling | Sliding | Cumulating, time_ms: int) -> Iterator[tuple[int, int]]:
    """The windows that hold a time, found by trying."""
    match spec:
        case Tumbling():
            start = time_ms - (time_ms - spec.offset_ms) % spec.size_ms
            yield start, start + spec.size_ms
        case Sliding():
            for start in range(time_ms - spec.size_ms + 1, time_ms + 1):
                if (start - spec.offset_ms) % spec.slide_ms == 0:
                    yield start, start + spec.size_ms
        case Cumulating():
            first = time_ms - time_ms % spec.max_ms
            for end in range(first + spec.step_ms, first + spec.max_ms + 1, spec.step_ms):
                if time_ms < end:
                    yield first, end


class SumsSoFar(ProcessWindowFunction):
    """The sum of a window, and of those of its key before it."""

    def open(self, context: ProcessWindowContext) -> None:
        """Bind the sum."""
        self.total = context.state(ValueState("total", pa.int64()))

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> dict[str, int]:
        """Add a window."""
        found = _summed(rows)
        self.total.update((self.total.value() or 0) + found["total"])
        return {**found, "total": self.total.value()}


class Watching(ProcessWindowFunction):
    """What a window has is told by a timer for the moment at which it is over, and by nothing else."""

    def __init__(self, lateness_ms: int) -> None:
        self._lateness_ms = lateness_ms

    def open(self, context: ProcessWindowContext) -> None:
        """Bind a state of the window."""
        self.sums = context.window_state(MapState("sums", pa.string(), pa.int64()))

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> None:
        """Keep what the window has, and wait."""
        assert context.window is not None, "windows without bounds"
        self.sums.put_all(_summed(rows))
        context.timer_service.register_event_time_timer(context.window.end_ms - 1 + self._lateness_ms)

    def on_timer(self, timestamp: int, context: ProcessWindowContext) -> dict[str, int]:
        """The window is over."""
        return dict(self.sums.items())


def _summed(rows: pa.Table) -> dict[str, int]:
    """What the aggregates of the others are."""
    return {"n": rows.num_rows, "total": builtins.sum(rows.column("v").to_pylist())}


def _moves(row: Row) -> bool:
    """Whether a row moves event time on, where not all do."""
    return row[1] % 3 == 0


def _program(data: Data) -> Program:
    return PROGRAMS[len(data) % len(PROGRAMS)]


def _rows(data: Data) -> list[Row]:
    """Times go on by a window in a few rows of a split, and every third row is behind, as its value says."""
    starts = [len(data) * split // SPLITS for split in range(SPLITS)]
    found = []
    for number, (key, value) in enumerate(data):
        place = number - max(start for start in starts if start <= number)
        found.append((key, value, 5 * place - (7 * value if number % 3 == 2 else 0)))
    return found
