"""Programs of joins, changes, rankings, times to live and async calls. The rules are in `topologies.py`.

The number of rows selects the program. No row of a timed input is late: each subtask of its source has one split, and
the watermark stays behind every row. No two rows have the same time, so the data determines everything that depends on
their order. A program whose rows replace each other writes the table `running`, any other program `results`.
"""

from __future__ import annotations

import builtins
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from random_jobs.pieces import SPLITS, Data, source_of, table_of
from random_jobs.sources import TricklingSource
from random_jobs.window_models import windows_of
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.aggregates.aggregate import bool_or, count, count_distinct, max, min, sum
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment
from tidegate.operators.windows.window_specs import Session, Sliding, Tumbling
from tidegate.testing.runtime.run import Rows, counted

_PLACE_MS = 20
_BEHIND_MS = 41
_BOUND_MS = 60
_NEAR_MS = 25
_TTL_MS = 60
_WINDOW = Tumbling(50)
_SLIDES = Sliding(60, 20)
_GAP_MS = 45
_TOP = 2
_PACES = (1, 3)
"""Steps of event time of two sources that wait for each other."""
_ALIGNMENT = WatermarkAlignment("pace", _PLACE_MS, 150)
_CALLED = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.int64())])

Row = tuple[int, int, int, int]
"""Key, value, event time, and a key that includes the split. Rows of such a key arrive in order."""
Found = Iterable[Sequence[object]]
Inputs = Sequence[Data]
Widths = Sequence[int]


def _multisets(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Counts each value of a key. Of these counts, which change, keeps the least and the greatest."""
    rows = source_of(env, inputs[0], 0, width[0]).key_by("k", "v")
    numbers = rows.aggregate(n=count(), emit="changes", uid="numbers", parallelism=width[1])
    kept = numbers.key_by("k").aggregate(
        least=min("n"),
        most=max("n"),
        kinds=count_distinct("n"),
        odd=bool_or(pl.col("n") % 2 == 1),
        t=sum("n"),
        emit="changes",
        uid="kept",
        parallelism=width[2],
    )
    table_of(kept, "running", width[2], keys=("k",))


def _expect_multisets(inputs: Inputs) -> Found:
    numbers: dict[int, list[int]] = defaultdict(list)
    for (key, _), times in Counter(inputs[0]).items():
        numbers[key].append(times)
    for key, of in numbers.items():
        yield key, builtins.min(of), builtins.max(of), len({*of}), any(n % 2 for n in of), builtins.sum(of)


def _both(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Counts how many keys of either input have each greatest value, and the least of these keys."""
    best = [
        source_of(env, inputs[number], number, width[0])
        .key_by("k")
        .aggregate(best=max("v"), emit="changes", uid=f"best{number}", parallelism=width[1])
        for number in (0, 1)
    ]
    keys = best[0].union(best[1]).key_by("best")
    table_of(
        keys.aggregate(n=count(), least=min("k"), emit="changes", uid="keys", parallelism=width[2]),
        "running",
        width[2],
        keys=("best",),
    )


def _expect_both(inputs: Inputs) -> Found:
    keys: dict[int, list[int]] = defaultdict(list)
    for data in inputs[:2]:
        for key, value in dict(sorted(data)).items():
            keys[value].append(key)
    for best, of in keys.items():
        yield best, len(of), builtins.min(of)


def _totals(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Joins the totals of the keys of two inputs. Both sides retract rows."""
    left, right = (
        source_of(env, inputs[number], number, width[number])
        .key_by("k")
        .aggregate(n=count(), t=sum("v"), emit="changes", uid=f"totals{number}", parallelism=width[2])
        for number in (0, 1)
    )
    joined = left.join(right, on="k", how="full", uid="join", parallelism=width[3])
    table_of(joined, "running", width[3], keys=("k",))


def _expect_totals(inputs: Inputs) -> Found:
    left, right = ({k: [v for key, v in data if key == k] for k, _ in data} for data in inputs[:2])
    for key in {*left, *right}:
        found = ((len(side[key]), builtins.sum(side[key])) if key in side else (None, None) for side in (left, right))
        yield key, *(number for of in found for number in of)


def _near(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Joins rows in an interval, and keeps all rows of both sides."""
    left, right = (_timed(env, inputs[number], number) for number in (0, 1))
    between = (-_NEAR_MS, _NEAR_MS)
    near = left.interval_join(right, on="k", between=between, how="full", uid="join", parallelism=width[1])
    table_of(near.select("k", "t", "t_right", uid="columns", parallelism=width[1]).rebalance(), "results", width[2])


def _expect_near(inputs: Inputs) -> Found:
    left, right = (_rows(inputs[number], number) for number in (0, 1))
    return _outer(left, right, lambda a, b: abs(b[2] - a[2]) <= _NEAR_MS)


def _outer(left: Sequence[Row], right: Sequence[Row], fits: Callable[[Row, Row], bool]) -> Found:
    """Computes a full join by key and a condition: the key, and the time on either side."""
    pairs = [(a, b) for a in left for b in right if a[0] == b[0] and fits(a, b)]
    yield from ((a[0], a[2], b[2]) for a, b in pairs)
    yield from ((a[0], a[2], None) for a in left if a not in {pair[0] for pair in pairs})
    yield from ((b[0], None, b[2]) for b in right if b not in {pair[1] for pair in pairs})


def _windows(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Joins rows in windows, and keeps all rows of both sides."""
    left, right = (_timed(env, inputs[number], number) for number in (0, 1))
    joined = left.join(right, on="k", window=_WINDOW, how="full", uid="join", parallelism=width[1])
    table_of(joined.select("k", "t", "t_right", uid="columns", parallelism=width[1]).rebalance(), "results", width[2])


def _expect_windows(inputs: Inputs) -> Found:
    left, right = (_rows(inputs[number], number) for number in (0, 1))
    return _outer(left, right, lambda a, b: a[2] // _WINDOW.size_ms == b[2] // _WINDOW.size_ms)


def _aligned(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Joins two sources without an end in windows. The right one is faster in event time, and waits."""
    left, right = (_timed(env, inputs[number], number, pace) for number, pace in enumerate(_PACES))
    joined = left.join(right, on="k", window=_WINDOW, how="full", uid="join", parallelism=width[1])
    table_of(joined.select("k", "t", "t_right", uid="columns", parallelism=width[1]).rebalance(), "results", width[2])


def _expect_aligned(inputs: Inputs) -> Found:
    left, right = (_rows(inputs[number], number, pace) for number, pace in enumerate(_PACES))
    return _outer(left, right, lambda a, b: a[2] // _WINDOW.size_ms == b[2] // _WINDOW.size_ms)


def _versions(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Joins each row with the version of its key at its time."""
    rows, versions = (_timed(env, inputs[number], number) for number in (0, 1))
    joined = rows.join_asof(versions, on="k", uid="join", parallelism=width[1])
    table_of(joined.select("k", "t", "t_right", uid="columns", parallelism=width[1]).rebalance(), "results", width[2])


def _expect_versions(inputs: Inputs) -> Found:
    for key, _, time_ms, _ in _rows(inputs[0], 0):
        held = [since for of, _, since, _ in _rows(inputs[1], 1) if of == key and since <= time_ms]
        yield key, time_ms, builtins.max(held, default=None)


def _lives(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Computes running aggregates of keys whose state expires."""
    rows = _timed(env, inputs[0], 0).key_by("g")
    lives = rows.aggregate(n=count(), t=sum("v"), ttl=_TTL_MS, ttl_time="event", uid="lives", parallelism=width[1])
    table_of(lives, "running", width[1], keys=("g",))


def _expect_lives(inputs: Inputs) -> Found:
    lives: dict[int, tuple[int, int, int]] = {}
    for _, value, time_ms, key in _rows(inputs[0], 0):
        newest_ms, number, total = lives.get(key, (time_ms, 0, 0))
        if time_ms - newest_ms >= _TTL_MS:
            number = 0
            total = 0
        lives[key] = builtins.max(newest_ms, time_ms), number + 1, total + value
    return [(key, number, total) for key, (_, number, total) in lives.items()]


def _newest(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Keeps the newest row of each key."""
    newest = _timed(env, inputs[0], 0).key_by("k").deduplicate("t", keep="last", uid="newest", parallelism=width[1])
    table_of(newest.select("k", "v", "t", uid="columns", parallelism=width[1]), "running", width[1], keys=("k",))


def _expect_newest(inputs: Inputs) -> Found:
    rows = sorted(_rows(inputs[0], 0), key=lambda row: row[2])
    return {key: (key, value, time_ms) for key, value, time_ms, _ in rows}.values()


def _early(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Emits early results of windows, which the results at their end replace."""
    windows = _timed(env, inputs[0], 0).key_by("k").window(_SLIDES)
    sums = windows.aggregate(n=count(), total=sum("v"), emit_every=30, uid="sums", parallelism=width[1])
    table_of(sums, "running", width[1], keys=("k", "window_start", "window_end"))


def _expect_early(inputs: Inputs) -> Found:
    return [(*window, len(of), builtins.sum(of)) for window, of in _held(_SLIDES, inputs[0]).items()]


def _first(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Ranks the greatest values of each key and window."""
    windows = _timed(env, inputs[0], 0).key_by("k").window(_WINDOW)
    top = windows.top_n(_TOP, "v", rank="rank", uid="top", parallelism=width[1])
    columns = ("k", "window_start", "window_end", "v", "rank")
    table_of(top.select(*columns, uid="columns", parallelism=width[1]).rebalance(), "results", width[2])


def _expect_first(inputs: Inputs) -> Found:
    for window, of in _held(_WINDOW, inputs[0]).items():
        for rank, value in enumerate(sorted(of, reverse=True)[:_TOP], start=1):
            yield *window, value, rank


def _held(spec: Tumbling | Sliding, data: Data) -> dict[tuple[int, int, int], list[int]]:
    """Returns the values of each key and window."""
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for key, value, time_ms, _ in _rows(data, 0):
        for start, end in windows_of(spec, time_ms):
            groups[key, start, end].append(value)
    return groups


def _calls(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Makes async calls whose results come unordered, and windows behind them that must not lose any."""
    rows = _timed(env, inputs[0], 0)
    called = rows.map_async(_called, schema=_CALLED, capacity=3, ordered=False, uid="calls", parallelism=SPLITS)
    sessions = called.key_by("k").window(Session(_GAP_MS))
    sums = sessions.aggregate(n=count(), total=sum("v"), uid="sessions", parallelism=width[1])
    table_of(sums.rebalance(), "results", width[2])


async def _called(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "v": 2 * row["v"], "t": row["t"]}


def _expect_calls(inputs: Inputs) -> Found:
    sessions: dict[int, list[list[Row]]] = defaultdict(list)
    for row in sorted(_rows(inputs[0], 0), key=lambda row: row[2]):
        of = sessions[row[0]]
        if not of or row[2] - of[-1][-1][2] > _GAP_MS:
            of.append([])
        of[-1].append(row)
    for key, of in sessions.items():
        for rows in of:
            yield key, rows[0][2], rows[-1][2] + _GAP_MS, len(rows), 2 * builtins.sum(row[1] for row in rows)


@dataclass(frozen=True, slots=True)
class Program:
    """Builds a program and computes its output. `running` is True if its rows replace each other."""

    build: Callable[[StreamEnvironment, Inputs, Widths], None]
    expect: Callable[[Inputs], Found]
    running: bool = True


PROGRAMS = (
    Program(_multisets, _expect_multisets),
    Program(_near, _expect_near, running=False),
    Program(_both, _expect_both),
    Program(_early, _expect_early),
    Program(_totals, _expect_totals),
    Program(_windows, _expect_windows, running=False),
    Program(_lives, _expect_lives),
    Program(_first, _expect_first, running=False),
    Program(_newest, _expect_newest),
    Program(_versions, _expect_versions, running=False),
    Program(_calls, _expect_calls, running=False),
    Program(_aligned, _expect_aligned, running=False),
)


def relations(env: StreamEnvironment, inputs: Inputs, width: Widths) -> None:
    """Builds the program that the data selects."""
    _program(inputs).build(env, inputs, width)


def expect_relations(inputs: Inputs, _: Widths) -> Rows:
    """Computes the output in plain Python."""
    program = _program(inputs)
    return {"sim://running" if program.running else "sim://results": counted(list(program.expect(inputs)))}


def _program(inputs: Inputs) -> Program:
    return PROGRAMS[len(inputs[0]) % len(PROGRAMS)]


def _rows(data: Data, number: int, pace: int = 1) -> list[Row]:
    """Returns rows with event times.

    Times advance by a step for each row of a split, and some rows are behind. Remainders identify splits and inputs.
    """
    found = []
    for split in range(SPLITS):
        rows = range(len(data) * split // SPLITS, len(data) * (split + 1) // SPLITS)
        for place, row in enumerate(rows):
            key, value = data[row]
            behind_ms = _BEHIND_MS if row % 3 == 2 and value % 2 else 0
            time_ms = pace * _PLACE_MS * place + 4 * split + 2 * number - behind_ms
            found.append((key, value, time_ms, SPLITS * key + split))
    return found


def _timed(env: StreamEnvironment, data: Data, number: int, pace: int | None = None) -> Stream:
    """Returns a source with event time. A source with a pace has no end, and waits for others."""
    rows = _rows(data, number, pace or 1)
    table = pa.table({name: pa.array([row[at] for row in rows], pa.int64()) for at, name in enumerate("kvtg")})
    memory = MemorySource.of(table, SPLITS)
    name = f"source{number}"
    source = memory if pace is None else TricklingSource(memory)
    alignment = None if pace is None else _ALIGNMENT
    stream = env.from_source(source, uid=name, name=name, parallelism=SPLITS)
    return stream.assign_timestamps("t", _BOUND_MS, alignment=alignment, uid=f"{name}-timestamps")
