"""Checks that a source follows the contract of sources: `check_source`.

The checks read each split in the same way as tasks: from positions that a checkpoint would store, with readers that
have read elsewhere before, and with copies of the source as in other processes. A violated rule raises AssertionError
with the split.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cloudpickle
import pyarrow as pa

from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.actors.graph.source_checks import checked_read
from tidegate.connectors.source import (
    DynamicSource,
    FilterableSource,
    LastingInputSource,
    ProjectableSource,
    Source,
    SourceReader,
    SourceSplit,
    is_unbounded,
)
from tidegate.protocol.failures import interrupts
from tidegate.storage.ids import OperatorUid

SIZES = (1, 3, 1_000)
"""The maximum numbers of rows of a read, used one after the other."""
READS_MAX = 10_000
EMPTY_READS_MAX = 20
"""After this many empty reads, a split of an unbounded source has no more rows for now."""

Row = dict[str, object]


@dataclass(frozen=True)
class Place:
    """A position at which a read started, and the rows and new splits that it returned."""

    split: SourceSplit
    offset: int
    batch: pa.RecordBatch | None
    found: tuple[SourceSplit, ...] = ()


def check_source(source: Source, *, remove: Callable[[], object] | None = None) -> list[Row]:
    """Checks a source over an input that does not change during the check. Returns the rows of all its splits.

    - `remove`: removes the input, such as a file. Afterwards reads must raise an error, and must not return the end.

    These rules are checked:

    - Source and splits can be pickled, and all splits have different ids.
    - A split has the same rows for every size of reads, and a read returns no more rows than requested.
    - From each position another reader continues with exactly the rows that were not read, also in another process, and
      after it has read other splits (rescaling).
    - A split that has ended stays at its end. A read without rows does not change the position.
    - A projection has the same splits and rows, with only its columns; not checked for a source that takes filters.
    - The source accepts its own splits when it is restored.

    Raises AssertionError if the source breaks a rule, and ConfigurationError for results that a job would refuse.

    Example:

        >>> from tidegate.testing import check_source
        >>> rows = check_source(MySource())  # doctest: +SKIP
    """
    source = cloudpickle.loads(cloudpickle.dumps(source))
    reader = source.reader()
    rows: list[Row] = []
    splits = all_splits(source, reader)
    names = {split.split_id for split in splits}
    assert len(names) == len(splits), f"several splits have one id: {sorted(split.split_id for split in splits)}"
    for split in splits:
        assert pickle.loads(pickle.dumps(split)) == split, f"{split.split_id}: the split changes when it is pickled"
        rows += _check_split(source, reader, split)
    _check_interleaved(source, splits, rows)
    _check_restored(source, splits)
    _check_projection(source, splits, rows)
    reader.close()
    if remove is not None:
        _check_removed(source, splits, remove)
    return rows


def read_split(source: Source, reader: SourceReader, split: SourceSplit, rows_max: int, offset: int = 0) -> list[Place]:
    """Reads a split from a position until it has ended or has no more rows for now. Returns the reads that returned
    something.

    Raises AssertionError for a read that returns too many rows, or for a bounded split that does not end.
    """
    spec = SourceSpec(OperatorUid("source"), "source", source)
    empty_reads = 0
    places: list[Place] = []
    for _ in range(READS_MAX):
        result = checked_read(spec, source.schema, split, offset, reader.read(split, offset, rows_max))
        rows = 0 if result.batch is None else result.batch.num_rows
        assert rows <= rows_max, f"{split.split_id}: a read of at most {rows_max} rows has returned {rows}"
        assert result.batch is None or rows, f"{split.split_id}: a read has returned a batch without rows"
        if result.batch is not None or result.found:
            places.append(Place(split, offset, result.batch, result.found))
        empty_reads = 0 if result.next_offset > offset or result.found else empty_reads + 1
        split = split if result.payload is None else replace(split, payload=result.payload)
        offset = result.next_offset
        if result.at_end:
            assert split.rows in (-1, offset), f"{split.split_id} has {offset} rows, and its split names {split.rows}"
            return [*places, Place(split, offset, None)]
        if empty_reads == EMPTY_READS_MAX:
            assert is_unbounded(source), f"{split.split_id} has neither rows nor an end"
            return places
    raise AssertionError(f"{split.split_id} has no end after {READS_MAX} reads; return at_end=True after its last row")


def rows_of(places: Sequence[Place]) -> list[Row]:
    """Returns the rows of several reads, in their order."""
    return [row for place in places if place.batch is not None for row in place.batch.to_pylist()]


def all_splits(source: Source, reader: SourceReader) -> list[SourceSplit]:
    """Returns the splits of a source, and the splits that are found while they are read."""
    splits = list(source.splits())
    for split in splits:
        if split.rows == 0 and is_unbounded(source):
            splits += [found for place in read_split(source, reader, split, 1) for found in place.found]
    return splits


def _check_split(source: Source, reader: SourceReader, split: SourceSplit) -> list[Row]:
    """Reads a split with several sizes of reads, and again from several positions. Returns its rows."""
    whole = read_split(source, reader, split, SIZES[-1])
    expected = rows_of(whole)
    for size in SIZES:
        places = read_split(source, reader, split, size)
        assert rows_of(places) == expected, f"{split.split_id}: reads of {size} rows return other rows"
        ends = [[place.split.split_id for place in found[-1:]] for found in (places, whole)]
        assert ends[0] == ends[1], f"{split.split_id}: reads of {size} rows end elsewhere"
        other = cloudpickle.loads(cloudpickle.dumps(source)).reader()
        for at in sorted({0, len(places) // 2, len(places) - 1}) if places else ():
            for again in (reader, other):
                rest = rows_of(read_split(source, again, places[at].split, 2, places[at].offset))
                where = f"{split.split_id} from row {places[at].offset}"
                assert rest == rows_of(places[at:]), f"{where}: another reader returns other rows"
        other.close()
    return expected


def _check_interleaved(source: Source, splits: Sequence[SourceSplit], rows: Sequence[Row]) -> None:
    """Reads a few rows of each split with one reader, and the rest with another one, as after rescaling."""
    spec = SourceSpec(OperatorUid("source"), "source", source)
    first, second = (cloudpickle.loads(cloudpickle.dumps(source)).reader() for _ in range(2))
    found: list[Row] = []
    for split in splits:
        result = checked_read(spec, source.schema, split, 0, first.read(split, 0, 1))
        begun = [] if result.batch is None else result.batch.to_pylist()
        moved = split if result.payload is None else replace(split, payload=result.payload)
        rest = [] if result.at_end else rows_of(read_split(source, second, moved, SIZES[1], result.next_offset))
        found += [*begun, *rest]
    first.close()
    second.close()
    assert found == list(rows), "a reader that continues where another one stopped returns other rows"


def _check_restored(source: Source, splits: Sequence[SourceSplit]) -> None:
    if isinstance(source, DynamicSource):
        source.check_restored(splits)
    if isinstance(source, LastingInputSource):
        source.check_unread(splits)


def _check_projection(source: Source, splits: Sequence[SourceSplit], rows: Sequence[Row]) -> None:
    if not isinstance(source, ProjectableSource) or isinstance(source, FilterableSource):
        return  # Filters follow projections, so the rows of a source that is filtered already may differ.
    name = source.schema.names[-1]
    projected = source.projected([name])
    assert projected.schema.names == [name], f"projected([{name!r}]) has columns {projected.schema.names}"
    reader = projected.reader()
    found = [row for split in splits for row in rows_of(read_split(projected, reader, split, SIZES[-1]))]
    reader.close()
    assert found == [{name: row[name]} for row in rows], f"projected([{name!r}]) has other rows"


def _check_removed(source: Source, splits: Sequence[SourceSplit], remove: Callable[[], object]) -> None:
    """Removes the input. A read of a split with rows must then fail, and must not return the end."""
    before = cloudpickle.loads(cloudpickle.dumps(source)).reader()
    with_rows = [split for split in splits if rows_of(read_split(source, before, split, SIZES[-1]))]
    before.close()
    remove()
    reader = cloudpickle.loads(cloudpickle.dumps(source)).reader()
    for split in with_rows:
        try:
            result = reader.read(split, 0, SIZES[-1])
        except BaseException as error:
            if interrupts(error):
                raise
            continue  # Any other error fails the job, or restarts it.
        assert not result.at_end, f"{split.split_id} has ended, although its rows are gone"
    reader.close()
