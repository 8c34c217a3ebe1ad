"""The contract of sources, as checks that any source can be run against."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

import cloudpickle
import pyarrow as pa

from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.actors.graph.source_checks import checked_read
from tidegate.connectors.source import Source, SourceReader, SourceSplit, is_unbounded
from tidegate.storage.ids import OperatorUid

SIZES = (1, 3, 1_000)
READS_MAX = 10_000
NOTHING_MAX = 20
"""So often is a split asked in vain before it counts as having no more for now."""

Row = dict[str, object]


@dataclass(frozen=True)
class Place:
    """Where a read begins, and what it has given: rows, and the splits that it has found."""

    split: SourceSplit
    offset: int
    batch: pa.RecordBatch | None
    found: tuple[SourceSplit, ...] = ()


def read_split(source: Source, reader: SourceReader, split: SourceSplit, rows_max: int, offset: int = 0) -> list[Place]:
    """Read a split from a position until it has ended, or has nothing; the reads that gave something."""
    spec, nothing, places = SourceSpec(OperatorUid("source"), "source", source), 0, []
    for _ in range(READS_MAX):
        result = checked_read(spec, source.schema, split, offset, reader.read(split, offset, rows_max))
        assert result.batch is None or 0 < result.batch.num_rows <= rows_max
        if result.batch is not None or result.found:
            places.append(Place(split, offset, result.batch, result.found))
        nothing = 0 if result.next_offset > offset or result.found else nothing + 1
        split = split if result.payload is None else replace(split, payload=result.payload)
        offset = result.next_offset
        if result.at_end:
            assert split.rows in (-1, offset)
            return [*places, Place(split, offset, None)]
        if nothing == NOTHING_MAX:
            assert is_unbounded(source), f"{split.split_id} has neither rows nor an end"
            return places
    raise AssertionError(f"{split.split_id} was read {READS_MAX} times and goes on")


def rows_of(places: Sequence[Place]) -> list[Row]:
    """The rows of reads, in their order."""
    return [row for place in places if place.batch is not None for row in place.batch.to_pylist()]


def all_splits(source: Source, reader: SourceReader) -> list[SourceSplit]:
    """The splits of a source, and those that they find."""
    splits = list(source.splits())
    for split in splits:
        if split.rows == 0 and is_unbounded(source):
            splits += [found for place in read_split(source, reader, split, 1) for found in place.found]
    return splits


def check_source(source: Source) -> list[Row]:
    """Check all that must hold of a source that stays as it is meanwhile; returns the rows of all its splits.

    Splits have names of their own. A split gives the same rows whatever the size of reads; from every position, also in
    another process and with a reader that was elsewhere, those rows that had not been read. What has ended has ended.
    """
    source = cloudpickle.loads(cloudpickle.dumps(source))
    reader, found = source.reader(), []
    splits = all_splits(source, reader)
    assert len({split.split_id for split in splits}) == len(splits)
    for split in splits:
        pickle.dumps(split)
        whole = read_split(source, reader, split, SIZES[-1])
        expected = rows_of(whole)
        for size in SIZES:
            places = read_split(source, reader, split, size)
            assert rows_of(places) == expected
            assert [place.split.split_id for place in places[-1:]] == [place.split.split_id for place in whole[-1:]]
            other = cloudpickle.loads(cloudpickle.dumps(source)).reader()
            for at in (0, len(places) // 2, len(places) - 1) if places else ():
                for again in (reader, other):
                    rest = rows_of(read_split(source, again, places[at].split, 2, places[at].offset))
                    assert rest == rows_of(places[at:])
            other.close()
        found += expected
    reader.close()
    return found
