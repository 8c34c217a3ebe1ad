"""Rows a second and core of counts and sums by key: from 10 to 50 million keys, skewed ones, and words.

    .venv/bin/python benchmarks/keyed_rows.py [--programs keys-1000,words] [--rows 20000000] [--rounds 3]
        [--runtimes local,ray] [--local-aggregation auto,on,off]

`keys-N` counts and sums an int64 for each of N int64 keys, drawn evenly, `keys-zipf` for keys drawn by Zipf 1.1;
`words` counts words drawn evenly from 100,000, `words-zipf` words drawn by Zipf 1.1 from a million. Blocks of rows are
made once in memory and handed out in turns; even keys are shifted by the block, so that all of them come. Results leave
at the end. A checkpoint each `--interval`. How it is measured on either runtime says `rates.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from common import describe_machine
from rates import RUNTIMES, Program, Settings, measure_all
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
        found.append(pa.array(np.char.add("word", numbers.astype(str))) if words else numbers.astype(np.int64))
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


PROGRAMS: dict[str, Program] = {
    **{f"keys-{keys}": program(keys, words=False) for keys in (10, 1_000, 100_000, 1_000_000, 10_000_000, 50_000_000)},
    "keys-zipf": program(None, words=False),
    "words": program(100_000, words=True),
    "words-zipf": program(None, words=True),
}


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names with commas between (default: all)")
    parser.add_argument("--rows", type=int, default=20_000_000, help="rows of a run (default 20,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--runtimes", default="local", help="local (default), ray, or both")
    parser.add_argument("--local-aggregation", default="auto", help="auto (default), on, off, or some of them")
    parser.add_argument("--folder", type=Path, default=Path(".bench/keyed"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    names, runtimes, modes = (
        each.split(",") for each in (arguments.programs, arguments.runtimes, arguments.local_aggregation)
    )
    known = (*PROGRAMS, *RUNTIMES, *MODES)
    if unknown := [name for name in (*names, *runtimes, *modes) if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    for runtime in runtimes:
        for mode in modes:
            console.print(f"local aggregation: {mode}", highlight=False)
            settings = Settings(arguments.rows, arguments.interval, arguments.folder.resolve(), mode)
            measure_all({name: PROGRAMS[name] for name in names}, runtime, arguments.rounds, settings, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
