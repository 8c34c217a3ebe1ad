"""`NexmarkSource`: the people, the auctions or the bids of a workload. Any part can be read again.

A split has every n-th block, as partitions of a topic would. The number of a row in its split says block and place, so
a position is a number. Splits are read in turn, and each has a watermark of its own, so that no row is late, however
many subtasks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

import tidegate as tg
from nexmark import auctions, bids, people
from nexmark.workload import Workload

MODULES = {"person": people, "auction": auctions, "bid": bids}


@dataclass(frozen=True)
class NexmarkSource:
    """The rows of one kind. `also` are kinds that are made and dropped, for queries that read few of the events.

    Flink's generator makes one stream of all kinds, of which a query takes its own. So what a query costs there
    contains the making of all events, and here too if each kind that nobody reads is among `also` of one source.
    """

    workload: Workload
    kind: str
    parts: int = 2
    also: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    """Those that are handed on; all are made, as by Flink's generator."""
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """The columns of the kind."""
        whole: pa.Schema = MODULES[self.kind].SCHEMA
        return whole if self.columns is None else pa.schema([whole.field(name) for name in self.columns])

    def projected(self, columns: Sequence[str]) -> NexmarkSource:
        """The same rows with these columns only."""
        return replace(self, columns=tuple(columns))

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Block i belongs to part i modulo the parts; those that have none are left out."""
        blocks = self.workload.events // self.workload.block
        rows = self.workload.rows(self.kind, self.workload.block)
        return [
            tg.SourceSplit(f"{self.kind}-{part:03d}", str(part).encode(), len(range(part, blocks, self.parts)) * rows)
            for part in range(min(self.parts, blocks))
        ]

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _NexmarkReader(self)


class _NexmarkReader:
    def __init__(self, source: NexmarkSource) -> None:
        self._source = source
        self._made: tuple[int, pa.RecordBatch] | None = None

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of one block, or the rest of them."""
        source = self._source
        rows = source.workload.rows(source.kind, source.workload.block)
        place, start = divmod(offset, rows)
        if offset == split.rows:
            return tg.ReadResult(None, offset, at_end=True)
        batch = self._block(int(split.payload) + place * source.parts).slice(start, rows_max)
        following = offset + batch.num_rows
        return tg.ReadResult(batch, following, at_end=following == split.rows)

    def _block(self, block: int) -> pa.RecordBatch:
        """A block that is read in several parts is made once."""
        if self._made is None or self._made[0] != block:
            for kind in self._source.also:
                MODULES[kind].make(self._source.workload, block)
            made = MODULES[self._source.kind].make(self._source.workload, block)
            self._made = (block, made.select(self._source.schema.names))
        return self._made[1]

    def close(self) -> None:
        """Let go of the last block."""
        self._made = None


def table(workload: Workload, kind: str) -> pa.Table:
    """All rows of a kind, for references."""
    module = MODULES[kind]
    blocks = range(workload.events // workload.block)
    return pa.Table.from_batches([module.make(workload, block) for block in blocks], module.SCHEMA)
