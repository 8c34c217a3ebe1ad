"""Rows a second and core of counts and sums by key: from 10 to 50 million keys, skewed ones, and words.

    .venv/bin/python benchmarks/keyed_rows.py [--programs keys-1000,words] [--rows 100000000] [--rounds 3]
        [--runtimes local,ray] [--local-aggregation auto,on,off]

`keys-N` counts and sums an int64 for each of N int64 keys, drawn evenly, `keys-zipf` for keys drawn by Zipf 1.1;
`words` counts words drawn evenly from 100,000, `words-zipf` words drawn by Zipf 1.1 from a million. Blocks of rows are
made once in memory and handed out in turns; even keys are shifted by the block, so that all of them come. Results leave
at the end. A checkpoint each `--interval`; without `--rows` each program has rows for some seconds. How it is measured
on either runtime says `rates.py`, and `keyed_floors.py` which plain loops over the same batches stand beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from common import describe_machine
from keyed_floors import floors
from rates import RUNTIMES, Program, Settings, measure_all, parser_of
from ray import cloudpickle
from rich.console import Console

import tidegate as tg

BLOCK = 1 << 17
BLOCKS = 16
ZIPF = 1.1
MODES = ("auto", "on", "off")
# Processes of a job cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Keyed:
    """`rows` rows in each of two splits. `keys`: so many drawn evenly; None: by Zipf."""

    rows: int
    keys: int | None
    words: bool
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """A key and a number."""
        return pa.schema([("key", pa.string() if self.words else pa.int64()), ("value", pa.int64())])

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Two, which are read side by side."""
        return [tg.SourceSplit(f"part-{part}", str(part).encode(), self.rows) for part in range(2)]

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _Reader(self.schema, self.keys, self.words)


def blocks(keys: int | None, words: bool) -> list[np.ndarray[tuple[int], np.dtype[np.int64]] | pa.Array]:
    """The keys of some blocks."""
    chance = np.random.default_rng(1)
    found: list[np.ndarray[tuple[int], np.dtype[np.int64]] | pa.Array] = []
    for _ in range(BLOCKS):
        numbers = (
            chance.integers(0, keys, BLOCK) if keys else chance.zipf(ZIPF, BLOCK) % (1_000_000 if words else 1 << 40)
        )
        found.append(pc.binary_join_element_wise("word", pa.array(numbers).cast(pa.string()), "") if words else numbers)
    return found


class _Reader:
    def __init__(self, schema: pa.Schema, keys: int | None, words: bool) -> None:
        self._schema, self._keys, self._blocks = schema, keys, blocks(keys, words)
        self._values = pa.array(np.random.default_rng(2).integers(0, 1_000, BLOCK))

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """The next block, as far as it goes."""
        number, start = divmod(offset, BLOCK)
        rows = min(rows_max, BLOCK - start, split.rows - offset)
        if not rows:
            return tg.ReadResult(None, offset, at_end=True)
        keys = self._blocks[number % BLOCKS][start : start + rows]
        if isinstance(keys, np.ndarray):
            if self._keys:
                keys = (keys + number * 7_919) % self._keys
            keys = pa.array(keys)
        batch = pa.RecordBatch.from_arrays([keys, self._values.slice(start, rows)], schema=self._schema)
        return tg.ReadResult(batch, offset + rows, at_end=offset + rows == split.rows)

    def close(self) -> None:
        """Nothing to let go of."""


def program(keys: int | None, words: bool) -> Program:
    """Count and sum, or count alone."""

    def built(env: tg.StreamEnvironment, rows: int) -> tg.Stream:
        keyed = env.from_source(Keyed(rows // 2, keys, words)).key_by("key")
        if words:
            return keyed.aggregate(n=tg.count(), emit="final")
        return keyed.aggregate(n=tg.count(), total=tg.sum("value"), emit="final")

    return built


@dataclass(frozen=True)
class Kind:
    """Of a program: how many keys, None for Zipf; whether they are words; the rows of a run of some seconds."""

    keys: int | None
    words: bool
    rows: int


KINDS: dict[str, Kind] = {
    "keys-10": Kind(10, False, 300_000_000),
    "keys-1000": Kind(1_000, False, 300_000_000),
    "keys-100000": Kind(100_000, False, 150_000_000),
    "keys-1000000": Kind(1_000_000, False, 100_000_000),
    "keys-10000000": Kind(10_000_000, False, 100_000_000),
    "keys-50000000": Kind(50_000_000, False, 100_000_000),
    "keys-zipf": Kind(None, False, 100_000_000),
    "words": Kind(100_000, True, 100_000_000),
    "words-zipf": Kind(None, True, 100_000_000),
}


def batches_of(kind: Kind, rows: int) -> Iterator[pa.RecordBatch]:
    """The batches of a program, as one subtask reads them."""
    reader, split, offset = Keyed(rows, kind.keys, kind.words).reader(), tg.SourceSplit("all", b"0", rows), 0
    while (read := reader.read(split, offset, BLOCK)).batch is not None:
        offset = read.next_offset
        yield read.batch


def main() -> int:
    """Measure."""
    parser = parser_of(__doc__, KINDS, ".bench/keyed", None)
    parser.add_argument("--local-aggregation", default="auto", help="auto (default), on, off, or some of them")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    names, runtimes, modes = (
        each.split(",") for each in (arguments.programs, arguments.runtimes, arguments.local_aggregation)
    )
    known = (*KINDS, *RUNTIMES, *MODES)
    if unknown := [name for name in (*names, *runtimes, *modes) if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    figures: dict[str, float] = {}
    kinds = {name: replace(KINDS[name], rows=arguments.rows or KINDS[name].rows) for name in names}
    yardsticks = {
        name: floors(partial(batches_of, kind), kind.rows, kind.keys, kind.words) for name, kind in kinds.items()
    }
    for name, rates in yardsticks.items():
        told = ", ".join(f"{loop} {rate / 1e6:.1f}" for loop, rate in rates.items())
        console.print(f"M rows/s and core of plain loops over {name}: {told}", highlight=False)
    for runtime in runtimes:
        programs = {
            f"{name}, {mode}" if len(modes) > 1 else name: (
                program(kind.keys, kind.words),
                Settings(kind.rows, arguments.interval, arguments.folder.resolve(), mode),
            )
            for mode in modes
            for name, kind in kinds.items()
        }
        figures |= measure_all(programs, runtime, arguments.rounds, console)
        for name, mode in [(name, mode) for name in names for mode in modes]:
            kind = f"{name}, {mode}" if len(modes) > 1 else name
            figures |= {f"{kind}, {runtime}, a core, {loop}": rate for loop, rate in yardsticks[name].items()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
